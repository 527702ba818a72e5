// The loops of the high-order convolution on the CPU where channels are last: registers hold
// neighbouring channels of a pixel, so that nothing is transposed and a weight is read once for all
// channels of its group. The groups are the inner loop: where the weights' groups are neighbours,
// too, a cache line of them is read once. Groups of one channel whose weights are neighbours are
// one group here, with a weight for each channel.
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
  ChannelRows(int64_t width, int64_t channels) : width_(width), channels_(channels) {}

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
    zeros_.resize((width_ - 1) * column_ + channels_);
  }

  int64_t column() const { return column_; }  // elements from one pixel of a row to the next
  const A* row(int64_t h) const { return h < 0 ? zeros_.data() : data_ + h * row_; }  // -1: zeros

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
  static constexpr int64_t kRegisters = 8;  // of channels at once, of few those of several pixels
  static constexpr int64_t kTaps = 6;       // at once, of the gradient of the weights

  const Problem& p;
  const Readers &down_readers, &across_readers;
  ChannelRows<T> x, grad;
  // Of the taps of pixel `found` of a row, or of those that read it: the pixel at the other end,
  // and where the weight of group 0 is.
  std::vector<const A*> pixels;
  std::vector<int64_t> places, columns;
  int64_t found = 0, taps = 0;

  LastWorker(const Problem& p, const Readers& down_readers, const Readers& across_readers)
      : p(p),
        down_readers(down_readers),
        across_readers(across_readers),
        x(p.across.in, p.C),
        grad(p.across.out, p.C) {
    const int64_t readers = down_readers.most() * across_readers.most();
    pixels.resize(std::max(p.taps(), readers)), places.resize(pixels.size());
    columns.resize(p.across.taps);
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
               T* out, const ImageStrides& os, int64_t first, int64_t count, bool each) {
    load_x(image, xs, first, count);
    if (each)
      apply<false, true>(x, weight, ws, out, os, p.across.out, first, count);
    else
      apply<false>(x, weight, ws, out, os, p.across.out, first, count);
  }
  void grad_input(const T* weight, const WeightStrides& ws, T* out, const ImageStrides& os,
                  int64_t first, int64_t count, bool each) {
    if (each)
      apply<true, true>(grad, weight, ws, out, os, p.across.in, first, count);
    else
      apply<true>(grad, weight, ws, out, os, p.across.in, first, count);
  }

  // out[c, h, w] = sum over taps of weight[tap, h, w] * x[c, y, z]. In the adjoint the sum is over
  // the output pixels that read h, w, and over their taps that do. Each: there is a weight for each
  // channel, beside that of the next.
  template <bool Adjoint, bool Each = false>
  void apply(const ChannelRows<T>& image, const T* weight, const WeightStrides& ws, T* out,
             const ImageStrides& os, int64_t W, int64_t first, int64_t count) {
    const int64_t registers = p.group_channels() / V::size;
    const int64_t most = std::max<int64_t>(1, kRegisters / registers);
    const int64_t next_pixel = image.column() * p.across.stride;
    for (int64_t h = first; h < first + count; ++h) {
      for (int64_t w = 0, run = 0; w < W; w += run) {
        const bool inner = is_inner<Adjoint>(w) && is_inner<Adjoint>(w + most - 1);
        run = inner ? most : 1;
        const int64_t ahead = find_taps<Adjoint>(image, ws, h, w);
        const T* factors = weight + ahead * ws.w;
        for (int64_t g = 0; g < p.G; ++g, factors += ws.g) {
          for_each_block<kRegisters>(registers, [&](int64_t block, auto N) {
            constexpr int64_t several = kRegisters / N;
            const int64_t c = g * p.group_channels() + block * V::size;
            const int64_t at = c + ahead * next_pixel;
            const T* first_factor = factors + (Each ? c : 0);
            T* target = out + c * os.c + h * os.h + w * os.w;
            if (run == several)
              add_taps<N, several, Each>(at, next_pixel, first_factor, ws.w, target, os);
            else
              add_taps<N, 1, Each>(at, next_pixel, first_factor, ws.w, target, os);
          });
        }
      }
    }
  }

  // Computes N registers of each of P neighbouring pixels. `at` is where they begin, from those of
  // the taps on.
  template <int64_t N, int64_t P, bool Each>
  void add_taps(int64_t at, int64_t next_pixel, const T* weight, int64_t next_weight, T* out,
                const ImageStrides& os) const {
    typename V::type acc[P][N] = {};
    for (int64_t tap = 0; tap < taps; ++tap) {
      const T* factors = weight + places[tap];
      const A* pixel = pixels[tap] + at;
      for (int64_t q = 0; q < P; ++q) {
        for (int64_t m = 0; m < N; ++m)
          acc[q][m] += load_factor<Each>(factors + q * next_weight + (Each ? m * V::size : 0)) *
                       V::load(pixel + q * next_pixel + m * V::size);
      }
    }
    for (int64_t q = 0; q < P; ++q)
      for (int64_t m = 0; m < N; ++m)
        store_vector<T>(out + q * os.w + m * V::size * os.c, os.c, acc[q][m]);
  }

  template <bool Each>
  static auto load_factor(const T* weight) {
    if constexpr (Each)
      return load_vector<T>(weight);
    else
      return static_cast<A>(*weight);
  }

  // Finds the taps of a pixel, or of an inner one before it in the row, from which each is as far.
  // Returns how many pixels that is.
  template <bool Adjoint>
  int64_t find_taps(const ChannelRows<T>& image, const WeightStrides& ws, int64_t h, int64_t w) {
    if (is_inner<Adjoint>(w) && is_inner<Adjoint>(w - 1)) return w - found;
    found = w, taps = 0;
    if constexpr (Adjoint) {
      for (const auto row : down_readers.of(h))
        for (const auto column : across_readers.of(w)) {
          pixels[taps] = image.row(row.pixel) + column.pixel * image.column();
          places[taps++] = (row.tap * p.across.taps + column.tap) * ws.tap + row.pixel * ws.h +
                           column.pixel * ws.w;
        }
    } else {
      for (int64_t j = 0; j < p.across.taps; ++j) columns[j] = p.across.source(w, j);
      const int64_t next_column = image.column(), next_tap = ws.tap;
      int64_t place = h * ws.h + w * ws.w, tap = 0;
      for (int64_t i = 0; i < p.down.taps; ++i) {
        const A* row = image.row(p.down.source(h, i));
        for (const int64_t z : columns) {
          pixels[tap] = z < 0 ? image.row(-1) : row + z * next_column;
          places[tap++] = place;
          place += next_tap;
        }
      }
      taps = tap;
    }
    return 0;
  }

  // Whether the taps of a pixel are those of its neighbours in the row, as far apart: they are all
  // within the row of the image, or all of them read the pixel. Such pixels are neighbours.
  template <bool Adjoint>
  bool is_inner(int64_t w) const {
    const Axis& axis = p.across;
    if constexpr (Adjoint)
      return axis.is_plain() && w >= 0 && w < axis.in && across_readers.of(w).size() == axis.taps;
    const int64_t first = w * axis.stride - axis.before;
    return axis.scale == 1 && w >= 0 && w < axis.out && first >= 0 &&
           first + axis.reach() < axis.in;
  }

  // grad_weight[tap, h, w] = sum over c of grad[c, h, w] * x[c, y, z]; each: no sum
  void grad_weight(T* out, const WeightStrides& os, int64_t first, int64_t count, bool each) {
    const int64_t channels = p.group_channels(), next_pixel = x.column() * p.across.stride;
    for (int64_t h = first; h < first + count; ++h) {
      for (int64_t w = 0; w < p.across.out; ++w) {
        const int64_t ahead = find_taps<false>(x, os, h, w);
        if (each) {
          const A* gradient = grad.row(h) + w * grad.column();
          for (int64_t tap = 0; tap < taps; ++tap)
            multiply(out + places[tap] + ahead * os.w, gradient, pixels[tap] + ahead * next_pixel);
          continue;
        }
        for (int64_t g = 0; g < p.G; ++g) {
          const A* gradient = grad.row(h) + w * grad.column() + g * channels;
          for_each_block<kTaps>(taps, [&](int64_t tap, auto N) {
            typename V::type acc[N] = {};
            const A* read[N];
            for (int64_t m = 0; m < N; ++m)
              read[m] = pixels[tap + m] + ahead * next_pixel + g * channels;
            for (int64_t c = 0; c < channels; c += V::size) {
              const auto factor = V::load(gradient + c);
              for (int64_t m = 0; m < N; ++m) acc[m] += factor * V::load(read[m] + c);
            }
            for (int64_t m = 0; m < N; ++m)
              out[places[tap + m] + ahead * os.w + g * os.g] = static_cast<T>(sum(acc[m]));
          });
        }
      }
    }
  }

  // out[c] = a[c] * b[c] for all channels
  void multiply(T* out, const A* a, const A* b) const {
    for (int64_t c = 0; c < p.C; c += V::size)
      store_vector<T>(out + c, 1, V::load(a + c) * V::load(b + c));
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
