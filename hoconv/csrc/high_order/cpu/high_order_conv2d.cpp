// The high-order convolution on the CPU, forward and backward.
//
// The work is cut into strips of rows of one image and group. A strip first copies its images
// into zero-padded rows of the type that is computed in, so that the inner loops know neither
// borders, strides nor dtypes; what they read stays in the L2 cache. The weights, four fifths of
// the traffic at C = 3 and k = 5, are read once, where they can be without a copy. Every output
// element is summed by one thread in a fixed order: the result does not depend on the number of
// threads.
//
// B batch, C channels, G groups of channels, H height, W width, k kernel size.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <vector>

#include "high_order/problem.h"
#include "vec.h"

namespace hoconv {
namespace {

constexpr int64_t kChannelBlock = 4;  // channels that share a weight register
constexpr int64_t kTapBlock = 6;      // weight gradients kept in registers at once

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <typename A>
struct Scratch {  // aligned, zeroed
  std::vector<A> storage;
  A* data = nullptr;
  void resize(int64_t n) {
    storage.assign(n + kVecBytes / sizeof(A), A(0));
    const auto address = reinterpret_cast<uintptr_t>(storage.data());
    data = reinterpret_cast<A*>((address + kVecBytes - 1) / kVecBytes * kVecBytes);
  }
};

// The rows of one group's channels that a strip needs, zero-padded: row r of channel c is at
// data + (c * rows + r) * width, and column w of the image at offset w + left in it.
template <typename T>
struct PaddedImage {
  using A = acc_t<T>;
  int64_t channels, rows, width, left;
  Scratch<A> scratch;

  PaddedImage(int64_t channels, int64_t rows, int64_t columns, int64_t left, int64_t right)
      : channels(channels), rows(rows), left(left) {
    width = round_up(left + columns + right + Vec<A>::size, Vec<A>::size);
    scratch.resize(channels * rows * width);
  }

  // Copies rows first .. first + count of an image of H x W; rows outside it become zero.
  void fill(const T* image, const ImageStrides& s, int64_t first, int64_t count, int64_t H,
            int64_t W) {
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t r = 0; r < count; ++r) {
        A* row = scratch.data + (c * rows + r) * width + left;
        const int64_t h = first + r;
        if (h >= 0 && h < H)
          load_row<T>(row, image + c * s.c + h * s.h, s.w, W);
        else
          std::fill_n(row, W, A(0));
      }
    }
  }

  const A* row(int64_t c, int64_t r) const { return scratch.data + (c * rows + r) * width; }
};

// One row of output, computed in registers of A: written in place where the tensor's row is
// contiguous and of type A, else through a buffer.
template <typename T>
struct RowWriter {
  using A = acc_t<T>;
  using V = Vec<A>;
  A* target;
  T* row;
  int64_t stride, W;
  bool direct, aligned;

  RowWriter() = default;
  RowWriter(T* row, int64_t stride, int64_t W, A* buffer) : row(row), stride(stride), W(W) {
    direct = std::is_same_v<T, A> && stride == 1 && W >= V::size;
    target = direct ? reinterpret_cast<A*>(row) : buffer;
    aligned =
        direct && W % V::size == 0 && reinterpret_cast<uintptr_t>(target) % kVecBytes == 0;
  }
  void put(int64_t w, typename V::type v) {
    if (aligned)
      V::stream(target + w, v);
    else
      V::store(target + w, v);
  }
  void finish() {
    if (!direct) store_row<T>(row, stride, target, W);
  }
};

// Calls f(w) for registers that cover a row of W: the last one overlaps where W is no multiple
// (and W >= size), so that nothing past the row is touched.
template <typename V, typename F>
inline void for_each_register(int64_t W, F&& f) {
  int64_t w = 0;
  for (; w + V::size <= W; w += V::size) f(w);
  if (w < W) f(std::max<int64_t>(0, W - V::size));
}

// Calls f.template operator()<N>(begin) for blocks of N <= Max, equal but for one, that cover n.
template <int64_t Max, typename F>
inline void for_each_block(int64_t n, F&& f) {
  const int64_t blocks = (n + Max - 1) / Max;
  for (int64_t i = 0, begin = 0; i < blocks; ++i) {
    const int64_t size = (n - begin) / (blocks - i);
    switch (size) {
      case 1: f(begin, std::integral_constant<int64_t, 1>{}); break;
      case 2: f(begin, std::integral_constant<int64_t, 2>{}); break;
      case 3: f(begin, std::integral_constant<int64_t, 3>{}); break;
      case 4: f(begin, std::integral_constant<int64_t, 4>{}); break;
      case 5: if constexpr (Max >= 5) f(begin, std::integral_constant<int64_t, 5>{}); break;
      case 6: if constexpr (Max >= 6) f(begin, std::integral_constant<int64_t, 6>{}); break;
    }
    begin += size;
  }
}

template <typename T>
class Strips {
  using A = acc_t<T>;
  using V = Vec<A>;
  static constexpr int64_t L = V::size;

 public:
  Strips(const Problem& p) : p(p), n(p.group_channels()), halo(p.before + p.after) {
    // As many rows as keep a strip's images in half a megabyte, and leave work for every thread.
    const int64_t row_bytes = (p.W + halo) * std::max<int64_t>(n, 1) * sizeof(A);
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t fair = p.B * p.G * p.H / (4 * threads) + 1;
    rows = (int64_t{1} << 19) / row_bytes - halo;
    rows = std::clamp<int64_t>(std::min(rows, fair), 1, 64);
    per_image = (p.H + rows - 1) / rows;
  }

  // Calls run(worker, b, g, first row, row count) for all strips; a worker is a thread's scratch.
  template <typename Worker, typename Run>
  void for_each(Run&& run) const {
    if (p.B * p.C * p.H * p.W == 0 && n != 0) return;
    torch::stable::parallel_for(0, p.B * p.G * per_image, 1, [&](int64_t begin, int64_t end) {
      Worker worker(*this);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t image = i / per_image, first = i % per_image * rows;
        run(worker, image / p.G, image % p.G, first, std::min(rows, p.H - first));
      }
      stream_fence();
    });
  }

  // out[c, h, w] = sum over taps of weight[tap, h, w] * x[c, h + dy, w + dx]
  struct Forward {
    const Problem& p;
    PaddedImage<T> x;
    Scratch<A> copies, buffer;
    std::vector<const A*> taps;
    int64_t width;

    Forward(const Strips& s)
        : p(s.p), x(s.n, s.rows + s.halo, p.W, p.before, p.after), taps(p.k * p.k) {
      width = round_up(p.W, L);
      copies.resize(p.k * p.k * width);
      buffer.resize(kChannelBlock * width);
    }

    void run(const T* image, const ImageStrides& xs, const T* weight, const WeightStrides& ws,
             T* out, const ImageStrides& os, int64_t first, int64_t count) {
      x.fill(image, xs, first - p.before, count + p.before + p.after, p.H, p.W);
      const bool direct = std::is_same_v<T, A> && ws.w == 1 && p.W >= L;
      for (int64_t r = 0; r < count; ++r) {
        const int64_t h = first + r;
        for (int64_t tap = 0; tap < p.k * p.k; ++tap) {
          const T* row = weight + tap * ws.tap + h * ws.h;
          if (direct) {
            taps[tap] = reinterpret_cast<const A*>(row);
          } else {
            load_row<T>(copies.data + tap * width, row, ws.w, p.W);
            taps[tap] = copies.data + tap * width;
          }
        }
        for_each_block<kChannelBlock>(x.channels, [&](int64_t c, auto N) {
          channels<N>(out + c * os.c + h * os.h, os, c, r);
        });
      }
    }

    template <int64_t N>
    void channels(T* out, const ImageStrides& os, int64_t c, int64_t r) {
      RowWriter<T> writers[N];
      for (int64_t i = 0; i < N; ++i)
        writers[i] = RowWriter<T>(out + i * os.c, os.w, p.W, buffer.data + i * width);
      for_each_register<V>(p.W, [&](int64_t w) {
        typename V::type acc[N] = {};
        for (int64_t i = 0; i < p.k; ++i) {
          const A* rows[N];
          for (int64_t j = 0; j < N; ++j) rows[j] = x.row(c + j, r + i * p.dilation) + w;
          for (int64_t j = 0; j < p.k; ++j) {
            const auto weight = V::load(taps[i * p.k + j] + w);
            for (int64_t m = 0; m < N; ++m)
              acc[m] += weight * V::load(rows[m] + j * p.dilation);
          }
        }
        for (int64_t j = 0; j < N; ++j) writers[j].put(w, acc[j]);
      });
      for (auto& writer : writers) writer.finish();
    }
  };

  // grad_x[c, h, w] = sum over taps of weight[tap, h - dy, w - dx] * grad[c, h - dy, w - dx]
  struct GradInput {
    const Problem& p;
    PaddedImage<T> grad;  // padded by what lies after on the low side: the taps are mirrored
    Scratch<A> taps, buffer;
    int64_t width;

    GradInput(const Strips& s)
        : p(s.p), grad(s.n, s.rows + s.halo, p.W, p.after, p.before), width(grad.width) {
      taps.resize(p.k * p.k * width);
      buffer.resize(kChannelBlock * width);
    }

    void run(const T* g, const ImageStrides& gs, const T* weight, const WeightStrides& ws, T* out,
             const ImageStrides& os, int64_t first, int64_t count) {
      grad.fill(g, gs, first - p.after, count + p.before + p.after, p.H, p.W);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t h = first + r;
        for (int64_t tap = 0; tap < p.k * p.k; ++tap) {
          const int64_t source = h + p.before - tap / p.k * p.dilation;
          A* row = taps.data + tap * width + p.after;
          if (source >= 0 && source < p.H)
            load_row<T>(row, weight + tap * ws.tap + source * ws.h, ws.w, p.W);
          else
            std::fill_n(row, p.W, A(0));
        }
        for_each_block<kChannelBlock>(grad.channels, [&](int64_t c, auto N) {
          channels<N>(out + c * os.c + h * os.h, os, c, r);
        });
      }
    }

    template <int64_t N>
    void channels(T* out, const ImageStrides& os, int64_t c, int64_t r) {
      RowWriter<T> writers[N];
      for (int64_t i = 0; i < N; ++i)
        writers[i] = RowWriter<T>(out + i * os.c, os.w, p.W, buffer.data + i * width);
      const int64_t reach = (p.k - 1) * p.dilation;
      for_each_register<V>(p.W, [&](int64_t w) {
        typename V::type acc[N] = {};
        for (int64_t i = 0; i < p.k; ++i) {
          const A* rows[N];
          for (int64_t j = 0; j < N; ++j) rows[j] = grad.row(c + j, r + reach - i * p.dilation) + w;
          for (int64_t j = 0; j < p.k; ++j) {
            const int64_t shift = reach - j * p.dilation;
            const auto weight = V::load(taps.data + (i * p.k + j) * width + w + shift);
            for (int64_t m = 0; m < N; ++m) acc[m] += weight * V::load(rows[m] + shift);
          }
        }
        for (int64_t j = 0; j < N; ++j) writers[j].put(w, acc[j]);
      });
      for (auto& writer : writers) writer.finish();
    }
  };

  // grad_weight[tap, h, w] = sum over c of grad[c, h, w] * x[c, h + dy, w + dx]
  struct GradWeight {
    const Problem& p;
    PaddedImage<T> x, grad;
    Scratch<A> buffer;
    int64_t width;

    GradWeight(const Strips& s)
        : p(s.p), x(s.n, s.rows + s.halo, p.W, p.before, p.after), grad(s.n, s.rows, p.W, 0, 0) {
      width = round_up(p.W, L);
      buffer.resize(kTapBlock * width);
    }

    void run(const T* g, const ImageStrides& gs, const T* image, const ImageStrides& xs, T* out,
             const WeightStrides& os, int64_t first, int64_t count) {
      x.fill(image, xs, first - p.before, count + p.before + p.after, p.H, p.W);
      grad.fill(g, gs, first, count, p.H, p.W);
      for (int64_t r = 0; r < count; ++r) {
        for (int64_t i = 0; i < p.k; ++i) {
          for_each_block<kTapBlock>(p.k, [&](int64_t j, auto N) {
            taps<N>(out + (i * p.k + j) * os.tap + (first + r) * os.h, os, i, j, r);
          });
        }
      }
    }

    template <int64_t N>
    void taps(T* out, const WeightStrides& os, int64_t i, int64_t j, int64_t r) {
      RowWriter<T> writers[N];
      for (int64_t m = 0; m < N; ++m)
        writers[m] = RowWriter<T>(out + m * os.tap, os.w, p.W, buffer.data + m * width);
      for_each_register<V>(p.W, [&](int64_t w) {
        typename V::type acc[N] = {};
        for (int64_t c = 0; c < x.channels; ++c) {
          const auto g = V::load(grad.row(c, r) + w);
          const A* row = x.row(c, r + i * p.dilation) + w + j * p.dilation;
          for (int64_t m = 0; m < N; ++m) acc[m] += g * V::load(row + m * p.dilation);
        }
        for (int64_t m = 0; m < N; ++m) writers[m].put(w, acc[m]);
      });
      for (auto& writer : writers) writer.finish();
    }
  };

  struct Backward {
    GradInput input;
    GradWeight weight;
    Backward(const Strips& s) : input(s), weight(s) {}
  };

  const Problem& p;
  int64_t n, halo, rows, per_image;
};

// Where the first channel of group g of image b, or its weights, start.
template <typename T>
const T* group(const Tensor& image, const Problem& p, int64_t b, int64_t g) {
  return static_cast<const T*>(image.const_data_ptr()) + b * image.stride(0) +
         g * p.group_channels() * image.stride(1);
}
template <typename T>
T* group(Tensor& image, const Problem& p, int64_t b, int64_t g) {
  return const_cast<T*>(group<T>(std::as_const(image), p, b, g));
}
template <typename T>
const T* kernels(const Tensor& weight, int64_t b, int64_t g) {
  return static_cast<const T*>(weight.const_data_ptr()) + b * weight.stride(1) +
         g * weight.stride(2);
}
template <typename T>
T* kernels(Tensor& weight, int64_t b, int64_t g) {
  return const_cast<T*>(kernels<T>(std::as_const(weight), b, g));
}

Tensor forward(const Tensor& x, const Tensor& weight, int64_t dilation) {
  const Problem p(x, weight.sizes(), dilation);
  check_alike(weight, x, "weight");
  Tensor out = torch::stable::empty_like(x);
  const auto xs = image_strides(x), os = image_strides(out);
  const auto ws = weight_strides(weight);
  dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    const Strips<T> strips(p);
    strips.template for_each<typename Strips<T>::Forward>(
        [&](auto& worker, int64_t b, int64_t g, int64_t first, int64_t count) {
          worker.run(group<T>(x, p, b, g), xs, kernels<T>(weight, b, g), ws,
                     group<T>(out, p, b, g), os, first, count);
        });
  });
  return out;
}

Tensor grad_input(const Tensor& grad, const Tensor& weight, int64_t dilation) {
  const Problem p(grad, weight.sizes(), dilation);
  check_alike(weight, grad, "weight");
  Tensor out = torch::stable::empty_like(grad);
  const auto gs = image_strides(grad), os = image_strides(out);
  const auto ws = weight_strides(weight);
  dispatch_floating(grad, [&](auto zero) {
    using T = decltype(zero);
    const Strips<T> strips(p);
    strips.template for_each<typename Strips<T>::GradInput>(
        [&](auto& worker, int64_t b, int64_t g, int64_t first, int64_t count) {
          worker.run(group<T>(grad, p, b, g), gs, kernels<T>(weight, b, g), ws,
                     group<T>(out, p, b, g), os, first, count);
        });
  });
  return out;
}

Tensor grad_weight(const Tensor& grad, const Tensor& x, std::vector<int64_t> size,
                   std::vector<int64_t> stride, int64_t dilation) {
  const Problem p(x, size, dilation);
  check_alike(grad, x, "grad");
  check_same_sizes(grad, x, "grad");
  Tensor out = empty_strided_like(x, size, stride);
  const auto gs = image_strides(grad), xs = image_strides(x);
  const auto os = weight_strides(out);
  dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    const Strips<T> strips(p);
    strips.template for_each<typename Strips<T>::GradWeight>(
        [&](auto& worker, int64_t b, int64_t g, int64_t first, int64_t count) {
          worker.run(group<T>(grad, p, b, g), gs, group<T>(x, p, b, g), xs,
                     kernels<T>(out, b, g), os, first, count);
        });
  });
  return out;
}

// Both gradients, strip by strip, so that the output's gradient is read from memory once.
std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                    int64_t dilation) {
  const Problem p(x, weight.sizes(), dilation);
  check_alike(grad, x, "grad");
  check_alike(weight, x, "weight");
  check_same_sizes(grad, x, "grad");
  Tensor grad_x = torch::stable::empty_like(x);
  Tensor grad_w = torch::stable::empty_like(weight);
  const auto gs = image_strides(grad), xs = image_strides(x), os = image_strides(grad_x);
  const auto ws = weight_strides(weight), gws = weight_strides(grad_w);
  dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    const Strips<T> strips(p);
    strips.template for_each<typename Strips<T>::Backward>(
        [&](auto& worker, int64_t b, int64_t g, int64_t first, int64_t count) {
          worker.weight.run(group<T>(grad, p, b, g), gs, group<T>(x, p, b, g), xs,
                            kernels<T>(grad_w, b, g), gws, first, count);
          worker.input.run(group<T>(grad, p, b, g), gs, kernels<T>(weight, b, g), ws,
                           group<T>(grad_x, p, b, g), os, first, count);
        });
  });
  return {grad_x, grad_w};
}

}  // namespace
}  // namespace hoconv

STABLE_TORCH_LIBRARY_IMPL(hoconv, CPU, m) {
  m.impl("high_order_conv2d.cpp", TORCH_BOX(&hoconv::forward));
  m.impl("high_order_conv2d_backward.cpp", TORCH_BOX(&hoconv::backward));
  m.impl("high_order_conv2d_grad_input.cpp", TORCH_BOX(&hoconv::grad_input));
  m.impl("high_order_conv2d_grad_weight.cpp", TORCH_BOX(&hoconv::grad_weight));
}
