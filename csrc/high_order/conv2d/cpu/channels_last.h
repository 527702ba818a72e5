// The loops of the high-order convolution on the CPU where channels are last: registers hold
// neighbouring channels of a pixel, so that nothing is transposed and a weight is read once for all
// channels of its group. The groups are the inner loop: where the weights' groups are neighbours,
// too, a cache line of them is read once.
//
// In float32 and float64 the images are read in place. In half precision the rows of a strip are
// first widened. A tap outside the image reads zeros.
//
// C channels, G groups of channels.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "high_order/conv2d/cpu/readers.h"
#include "high_order/conv2d/problem.h"
#include "hoconv/blocks.h"
#include "hoconv/vec.h"

namespace hoconv::high_order::conv2d {

// Rows of a strip, of which many are worth widening those around it in half precision.
constexpr int64_t kLastRows = 16;

// Whether the loops here take these images: channels are last and fill registers, two at least.
// With one, rows of pixels are faster.
template <typename T>
bool has_channels_last(const Problem& p, std::initializer_list<const Tensor*> images) {
  constexpr int64_t size = Vec<acc_t<T>>::size;
  if (p.C < 2 * size || p.group_channels() % size) return false;
  return std::all_of(images.begin(), images.end(),
                     [](const Tensor* t) { return channels_last(*t); });
}

// Rows of an image in the type of the arithmetic.
template <typename T>
class ChannelRows {
  using A = acc_t<T>;

 public:
  ChannelRows(int64_t width, int64_t channels)
      : width_(width), channels_(channels), zeros_(channels) {}

  // Takes the rows from `begin` up to `end`.
  void take(const T* image, const ImageStrides& s, int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<T, A>) {
      data_ = image, row_ = s.h, column_ = s.w;
    } else {
      column_ = channels_, row_ = width_ * column_;
      wide_.resize(std::max<int64_t>(end - begin, 0) * row_);
      for (int64_t h = begin; h < end; ++h)
        for (int64_t w = 0; w < width_; ++w)
          load_row<T>(wide_.data() + (h - begin) * row_ + w * column_, image + h * s.h + w * s.w, 1,
                      channels_);
      data_ = wide_.data() - begin * row_;
    }
  }

  int64_t column() const { return column_; }    // elements from one pixel of a row to the next
  const A* pixel(int64_t h, int64_t w) const {  // zeros where one of them is -1
    return h >= 0 && w >= 0 ? data_ + h * row_ + w * column_ : zeros_.data();
  }

 private:
  int64_t width_, channels_;
  std::vector<A> zeros_, wide_;
  const A* data_ = nullptr;
  int64_t row_ = 0, column_ = 0;
};

// The loops of one thread over the rows of a strip.
template <typename T>
struct LastWorker {
  using A = acc_t<T>;
  using V = Vec<A>;
  static constexpr int64_t kRegisters = 8;  // of channels at once
  static constexpr int64_t kTaps = 6;       // at once, of the gradient of the weights

  const Problem& p;
  const Readers &down_readers, &across_readers;
  ChannelRows<T> x, grad;
  // Of the taps of a pixel, or of those that read it: the pixel at the other end, and where the
  // weight of group 0 is.
  std::vector<const A*> pixels;
  std::vector<int64_t> places;

  LastWorker(const Problem& p, const Readers& down_readers, const Readers& across_readers)
      : p(p),
        down_readers(down_readers),
        across_readers(across_readers),
        x(p.across.in, p.C),
        grad(p.across.out, p.C) {
    const int64_t readers = down_readers.most() * across_readers.most();
    pixels.resize(std::max(p.taps(), readers)), places.resize(pixels.size());
  }

  // The first and the last row + 1 that are among `rows`, of those that exist.
  struct Extent {
    int64_t begin = 0, end = 0;
    void add(int64_t row) {
      if (row < 0) return;
      begin = begin < end ? std::min(begin, row) : row;
      end = std::max(end, row + 1);
    }
  };

  void load_x(const T* image, const ImageStrides& s, int64_t first, int64_t count) {
    Extent rows;
    for (int64_t h = first; h < first + count; ++h)
      for (int64_t i = 0; i < p.down.taps; ++i) rows.add(p.down.source(h, i));
    x.take(image, s, rows.begin, rows.end);
  }
  void load_grad(const T* image, const ImageStrides& s, int64_t first, int64_t count) {
    grad.take(image, s, first, first + count);
  }
  // The rows that read `count` rows of x, and where both gradients are computed at once those
  // themselves, which an even kernel may not have among them.
  void load_readers(const T* image, const ImageStrides& s, int64_t first, int64_t count) {
    Extent rows;
    for (int64_t h = first; h < first + count; ++h) {
      for (const auto reader : down_readers.of(h)) rows.add(reader.pixel);
      if (p.down.in == p.down.out) rows.add(h);
    }
    grad.take(image, s, rows.begin, rows.end);
  }

  void forward(const T* image, const ImageStrides& xs, const T* weight, const WeightStrides& ws,
               T* out, const ImageStrides& os, int64_t first, int64_t count) {
    load_x(image, xs, first, count);
    apply<false>(x, weight, ws, out, os, p.across.out, first, count);
  }
  void grad_input(const T* weight, const WeightStrides& ws, T* out, const ImageStrides& os,
                  int64_t first, int64_t count) {
    apply<true>(grad, weight, ws, out, os, p.across.in, first, count);
  }

  // out[c, h, w] = sum over taps of weight[tap, h, w] * x[c, y, z]. In the adjoint the sum is over
  // the output pixels that read h, w, and over their taps that do.
  template <bool Adjoint>
  void apply(const ChannelRows<T>& image, const T* weight, const WeightStrides& ws, T* out,
             const ImageStrides& os, int64_t W, int64_t first, int64_t count) {
    for (int64_t h = first; h < first + count; ++h) {
      for (int64_t w = 0; w < W; ++w) {
        const int64_t taps = find_taps<Adjoint>(image, ws, h, w);
        T* target = out + h * os.h + w * os.w;
        for (int64_t g = 0; g < p.G; ++g) {
          for_each_block<kRegisters>(p.group_channels() / V::size, [&](int64_t block, auto N) {
            const int64_t c = g * p.group_channels() + block * V::size;
            typename V::type acc[N] = {};
            for (int64_t tap = 0; tap < taps; ++tap) {
              const A factor = static_cast<A>(weight[places[tap] + g * ws.g]);
              const A* pixel = pixels[tap] + c;
              for (int64_t m = 0; m < N; ++m) acc[m] += factor * V::load(pixel + m * V::size);
            }
            A sums[N * V::size];
            for (int64_t m = 0; m < N; ++m) V::store(sums + m * V::size, acc[m]);
            store_row<T>(target + c * os.c, os.c, sums, N * V::size);
          });
        }
      }
    }
  }

  // Finds `pixels` and `places` of a pixel, after those of the pixel before it in the row; returns
  // how many there are.
  template <bool Adjoint>
  int64_t find_taps(const ChannelRows<T>& image, const WeightStrides& ws, int64_t h, int64_t w) {
    int64_t found = 0;
    if (is_inner<Adjoint>(h, w) && w > 0 && is_inner<Adjoint>(h, w - 1)) {
      for (; found < p.taps(); ++found) pixels[found] += image.column(), places[found] += ws.w;
      return found;
    }
    if constexpr (Adjoint) {
      for (const auto row : down_readers.of(h))
        for (const auto column : across_readers.of(w)) {
          pixels[found] = image.pixel(row.pixel, column.pixel);
          places[found++] = (row.tap * p.across.taps + column.tap) * ws.tap + row.pixel * ws.h +
                            column.pixel * ws.w;
        }
    } else {
      for (int64_t i = 0; i < p.down.taps; ++i) {
        const int64_t y = p.down.source(h, i);
        for (int64_t j = 0; j < p.across.taps; ++j) {
          pixels[found] = image.pixel(y, p.across.source(w, j));
          places[found++] = (i * p.across.taps + j) * ws.tap + h * ws.h + w * ws.w;
        }
      }
    }
    return found;
  }

  // Whether the window is plain and within the image, in the adjoint the pixels that read it.
  template <bool Adjoint>
  bool is_inner(int64_t h, int64_t w) const {
    if (!p.is_plain()) return false;
    if constexpr (Adjoint)
      return down_readers.of(h).size() * across_readers.of(w).size() == p.taps();
    const auto fits = [](const Axis& axis, int64_t at) {
      return axis.source(at, 0) >= 0 && axis.source(at, axis.taps - 1) >= 0;
    };
    return fits(p.down, h) && fits(p.across, w);
  }

  // grad_weight[tap, h, w] = sum over c of grad[c, h, w] * x[c, y, z]
  void grad_weight(T* out, const WeightStrides& os, int64_t first, int64_t count) {
    const int64_t channels = p.group_channels();
    for (int64_t h = first; h < first + count; ++h) {
      for (int64_t w = 0; w < p.across.out; ++w) {
        const int64_t taps = find_taps<false>(x, os, h, w);
        for (int64_t g = 0; g < p.G; ++g) {
          const A* gradient = grad.pixel(h, w) + g * channels;
          for_each_block<kTaps>(taps, [&](int64_t tap, auto N) {
            typename V::type acc[N] = {};
            const A* read[N];
            for (int64_t m = 0; m < N; ++m) read[m] = pixels[tap + m] + g * channels;
            for (int64_t c = 0; c < channels; c += V::size) {
              const auto factor = V::load(gradient + c);
              for (int64_t m = 0; m < N; ++m) acc[m] += factor * V::load(read[m] + c);
            }
            for (int64_t m = 0; m < N; ++m)
              out[places[tap + m] + g * os.g] = static_cast<T>(sum(acc[m]));
          });
        }
      }
    }
  }

  static A sum(typename V::type lanes) {
    A values[V::size];
    V::store(values, lanes);
    for (int64_t half = V::size / 2; half > 0; half /= 2)
      for (int64_t i = 0; i < half; ++i) values[i] += values[i + half];
    return values[0];
  }
};

}  // namespace hoconv::high_order::conv2d
