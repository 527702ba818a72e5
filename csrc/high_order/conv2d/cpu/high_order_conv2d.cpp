// The high-order convolution on the CPU, forward and backward.
//
// The work is cut into strips: some rows of one image and group. A worker first copies the images
// of a strip into rows padded with zeros, in the type of the arithmetic, so that the inner loops
// know no borders, strides or dtypes; it copies the weights likewise, tap by tap, unless the loops
// can read them in place. The copies stay in the L2 cache. While a row is computed, later weights
// are prefetched. One thread sums each output element in a fixed order, so that the result does not
// depend on the number of threads.
//
// B batch, C channels, G groups of channels, H height, W width, k kernel size.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "high_order/conv2d/problem.h"
#include "high_order/padded_image.h"
#include "hoconv/blocks.h"
#include "hoconv/huge_pages.h"
#include "hoconv/vec.h"

namespace hoconv::high_order::conv2d {
namespace {

constexpr int64_t kChannelBlock = 4;               // channels that share a weight register
constexpr int64_t kTapBlock = 6;                   // weight gradients kept in registers at once
constexpr int64_t kStripBytes = int64_t{1} << 17;  // a small part of the L2 cache
constexpr int64_t kStripsAThread = 4;              // so that no thread waits long for the last
constexpr int64_t kRowsAhead = 4;  // by which weights that are read in place are prefetched

// Covers a row of W columns with blocks of registers and calls f(w, U) for each: U registers from
// column w on, U = Most first, then single ones. If W is not a multiple, the last register overlaps
// the one before it, so that nothing past the row is touched. A row shorter than a register takes
// one.
template <typename V, int64_t Most, typename F>
inline void for_each_register(int64_t W, F&& f) {
  constexpr std::integral_constant<int64_t, Most> most;
  constexpr std::integral_constant<int64_t, 1> one;
  int64_t w = 0;
  for (; w + Most * V::size <= W; w += Most * V::size) f(w, most);
  for (; w + V::size <= W; w += V::size) f(w, one);
  if (w < W) f(std::max<int64_t>(0, W - V::size), one);
}

// How the rows of all images and groups are cut into strips, each a task.
struct Strips {
  int64_t rows, per_image;

  Strips(const Problem& p, int64_t element_size) {
    // The weights and images of a strip fit the L2 cache, and there are strips for every thread.
    const int64_t halo = p.across.reach();
    const int64_t image = (p.W + halo) * std::max<int64_t>(p.group_channels(), 1);
    const int64_t row_bytes = (p.k * p.k * (p.W + halo) + 2 * image) * element_size;
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t fair = p.B * p.G * p.H / (kStripsAThread * threads) + 1;
    rows = std::clamp<int64_t>(kStripBytes / std::max<int64_t>(row_bytes, 1), 1, fair);
    per_image = (p.H + rows - 1) / rows;
  }
};

// The images and weights of one strip, and the loops of one thread.
template <typename T>
struct Worker {
  using A = acc_t<T>;
  using V = Vec<A>;

  const Problem& p;
  const int64_t rows;      // of a strip
  PaddedImage<T> x, grad;  // grad has its padding swapped: there the taps are mirrored
  const int64_t width;
  Scratch<A> weights, buffer;  // (k * k, rows, width); rows of output

  Worker(const Problem& p, int64_t rows, bool needs_x, bool needs_grad)
      : p(p),
        rows(rows),
        x(needs_x ? p.group_channels() : 0, rows + p.down.reach(), p.W, p.across.before,
          p.across.after),
        grad(needs_grad ? p.group_channels() : 0, rows + p.down.reach(), p.W, p.across.after,
             p.across.before),
        width(x.width) {
    weights.resize(p.k * p.k * rows * width);
    buffer.resize(kChannelBlock * round_up(p.W, V::size));
  }

  A* weight_row(int64_t tap, int64_t r) { return weights.data + (tap * rows + r) * width; }

  void load_x(const T* image, const ImageStrides& s, int64_t first, int64_t count) {
    x.fill(image, s, first - p.down.before, count + p.down.reach(), p.H, p.W);
  }
  void load_grad(const T* image, const ImageStrides& s, int64_t first, int64_t count) {
    grad.fill(image, s, first - p.down.after, count + p.down.reach(), p.H, p.W);
  }

  // out[c, h, w] = sum over taps of weight[tap, h, w] * x[c, h + dy, w + dx]
  void forward(const T* weight, const WeightStrides& ws, T* out, const ImageStrides& os,
               int64_t first, int64_t count) {
    const bool in_place = std::is_same_v<T, A> && ws.w == 1 && p.W >= V::size;
    if (!in_place)
      for (int64_t tap = 0; tap < p.k * p.k; ++tap)
        for (int64_t r = 0; r < count; ++r)
          load_row<T>(weight_row(tap, r), weight + tap * ws.tap + (first + r) * ws.h, ws.w, p.W);
    for (int64_t r = 0; r < count; ++r) {
      const T* row = weight + (first + r) * ws.h;
      const A* tap_weight = in_place ? reinterpret_cast<const A*>(row) : weight_row(0, r);
      const int64_t next_tap = in_place ? ws.tap : rows * width;
      const T* next = row + (in_place ? kRowsAhead : count) * ws.h;
      for_each_block<kChannelBlock>(x.channels, [&](int64_t c, auto N) {
        apply<N, false>(x, c, r, tap_weight, next_tap, next, ws, out, os, first);
      });
    }
  }

  // grad_x[c, h, w] = sum over taps of weight[tap, h - dy, w - dx] * grad[c, h - dy, w - dx]
  void grad_input(const T* weight, const WeightStrides& ws, T* out, const ImageStrides& os,
                  int64_t first, int64_t count) {
    for (int64_t tap = 0; tap < p.k * p.k; ++tap) {
      // Pads the row with zeros, which a shifted register reads past its ends.
      const int64_t dy = p.down.dilation * (tap / p.k) - p.down.before;
      for (int64_t r = 0; r < count; ++r) {
        A* row = weight_row(tap, r);
        const int64_t h = first + r - dy;
        if (h >= 0 && h < p.H) {
          std::fill_n(row, p.across.after, A(0));
          load_row<T>(row + p.across.after, weight + tap * ws.tap + h * ws.h, ws.w, p.W);
          std::fill_n(row + p.across.after + p.W, p.across.before, A(0));
        } else {
          std::fill_n(row, p.W + p.across.reach(), A(0));
        }
      }
    }
    for (int64_t r = 0; r < count; ++r) {
      const T* next = weight + (first + count + r + p.down.before) * ws.h;
      for_each_block<kChannelBlock>(grad.channels, [&](int64_t c, auto N) {
        apply<N, true>(grad, c, r, weight_row(0, r), rows * width, next, ws, out, os, first);
      });
    }
  }

  // Computes a row of N channels from c on: the sum over taps of weights times pixels. If Mirrored,
  // the taps go backwards through the image and the weights are read at the pixel that is read.
  // `next` is the address of later weights, for the prefetch; it may be past the last of them.
  template <int64_t N, bool Mirrored>
  void apply(const PaddedImage<T>& image, int64_t c, int64_t r, const A* weight_row,
             int64_t next_tap, const T* next, const WeightStrides& ws, T* out,
             const ImageStrides& os, int64_t first) {
    T* row = out + c * os.c + (first + r) * os.h;
    const bool direct = std::is_same_v<T, A> && os.w == 1 && p.W >= V::size;
    A* target = direct ? reinterpret_cast<A*>(row) : buffer.data;
    const int64_t pitch = direct ? os.c : round_up(p.W, V::size);

    const int64_t k = p.k, step = Mirrored ? -p.across.dilation : p.across.dilation;
    const int64_t step_down = Mirrored ? -p.down.dilation : p.down.dilation;
    // The first tap's column and row in the padded image.
    const int64_t start = Mirrored ? p.across.reach() : 0, top = Mirrored ? p.down.reach() : 0;
    const int64_t next_channel = image.rows * image.width, next_line = step_down * image.width;
    const A* tap_row = weight_row + start;
    const A* image_row = image.row(c, r + top) + start;
    const int64_t next_plane = ws.tap, next_column = ws.w;
    // Two registers at once: independent sums hide the latency of an addition.
    for_each_register<V, 2>(p.W, [=](int64_t w, auto U) {
      typename V::type acc[N][U] = {};
      const A* tap_weight = tap_row + w;
      const T* fetched = next + w * next_column;
      const A* line = image_row + w;
      for (int64_t i = 0; i < k; ++i, line += next_line) {
        for (int64_t j = 0; j < k; ++j, tap_weight += next_tap, fetched += next_plane) {
          __builtin_prefetch(fetched, 0, 2);
          for (int64_t u = 0; u < U; ++u) {
            const auto weight = V::load(tap_weight + (Mirrored ? j * step : 0) + u * V::size);
            for (int64_t m = 0; m < N; ++m)
              acc[m][u] += weight * V::load(line + m * next_channel + j * step + u * V::size);
          }
        }
      }
      for (int64_t m = 0; m < N; ++m)
        for (int64_t u = 0; u < U; ++u) V::store(target + m * pitch + w + u * V::size, acc[m][u]);
    });
    if (!direct)
      for (int64_t m = 0; m < N; ++m) store_row<T>(row + m * os.c, os.w, target + m * pitch, p.W);
  }

  // grad_weight[tap, h, w] = sum over c of grad[c, h, w] * x[c, h + dy, w + dx]
  void grad_weight(T* out, const WeightStrides& os, int64_t first, int64_t count) {
    for (int64_t r = 0; r < count; ++r)
      for (int64_t i = 0; i < p.k; ++i)
        for_each_block<kTapBlock>(p.k, [&](int64_t j, auto N) { correlate<N>(i, j, r); });
    for (int64_t tap = 0; tap < p.k * p.k; ++tap)
      for (int64_t r = 0; r < count; ++r)
        stream_row<T>(out + tap * os.tap + (first + r) * os.h, os.w, weight_row(tap, r), p.W);
  }

  // Computes a row of the weight gradient for N taps of row i, from column j on.
  template <int64_t N>
  void correlate(int64_t i, int64_t j, int64_t r) {
    const int64_t channels = x.channels, step = p.across.dilation, next_tap = rows * width;
    const int64_t next_x = x.rows * x.width, next_grad = grad.rows * grad.width;
    const A* grad_row = grad.row(0, r + p.down.after) + p.across.after;
    const A* x_row = x.row(0, r + i * p.down.dilation) + j * step;
    A* out = weight_row(i * p.k + j, r);
    for_each_register<V, 1>(p.W, [=](int64_t w, auto) {
      typename V::type acc[N] = {};
      const A* g = grad_row + w;
      const A* line = x_row + w;
      for (int64_t c = 0; c < channels; ++c, g += next_grad, line += next_x) {
        const auto factor = V::load(g);
        for (int64_t m = 0; m < N; ++m) acc[m] += factor * V::load(line + m * step);
      }
      for (int64_t m = 0; m < N; ++m) V::store(out + m * next_tap + w, acc[m]);
    });
  }
};

// The first channel of group g of image b, and the weights of group g.
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
const T* weights(const Tensor& weight, int64_t b, int64_t g) {
  return static_cast<const T*>(weight.const_data_ptr()) + b * weight.stride(1) +
         g * weight.stride(2);
}
template <typename T>
T* weights(Tensor& weight, int64_t b, int64_t g) {
  return const_cast<T*>(weights<T>(std::as_const(weight), b, g));
}

// Calls run(worker, b, g, first row, row count) for every strip.
template <typename T, typename Run>
void for_each_strip(const Problem& p, bool needs_x, bool needs_grad, Run&& run) {
  if (p.B * p.H * p.W == 0) return;
  const Strips strips(p, sizeof(acc_t<T>));
  torch::stable::parallel_for(0, p.B * p.G * strips.per_image, 1, [&](int64_t begin, int64_t end) {
    Worker<T> worker(p, strips.rows, needs_x, needs_grad);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t image = i / strips.per_image, first = i % strips.per_image * strips.rows;
      run(worker, image / p.G, image % p.G, first, std::min(strips.rows, p.H - first));
    }
    stream_fence();
  });
}

Tensor forward(const Tensor& x, const Tensor& weight, int64_t dilation) {
  const Problem p(x, weight.sizes(), dilation);
  check_alike(weight, x, "weight");
  Tensor out = make_like(x);
  prefer_huge_pages(out);
  const auto xs = image_strides(x), os = image_strides(out);
  const auto ws = weight_strides(weight);
  dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    for_each_strip<T>(p, true, false, [&](auto& worker, auto b, auto g, auto first, auto count) {
      worker.load_x(group<T>(x, p, b, g), xs, first, count);
      worker.forward(weights<T>(weight, b, g), ws, group<T>(out, p, b, g), os, first, count);
    });
  });
  return out;
}

Tensor grad_input(const Tensor& grad, const Tensor& weight, int64_t dilation) {
  const Problem p(grad, weight.sizes(), dilation);
  check_alike(weight, grad, "weight");
  Tensor out = make_like(grad);
  prefer_huge_pages(out);
  const auto gs = image_strides(grad), os = image_strides(out);
  const auto ws = weight_strides(weight);
  dispatch_floating(grad, [&](auto zero) {
    using T = decltype(zero);
    for_each_strip<T>(p, false, true, [&](auto& worker, auto b, auto g, auto first, auto count) {
      worker.load_grad(group<T>(grad, p, b, g), gs, first, count);
      worker.grad_input(weights<T>(weight, b, g), ws, group<T>(out, p, b, g), os, first, count);
    });
  });
  return out;
}

Tensor grad_weight(const Tensor& grad, const Tensor& x, std::vector<int64_t> size,
                   std::vector<int64_t> stride, int64_t dilation) {
  const Problem p(x, size, dilation);
  check_alike(grad, x, "grad");
  check_same_sizes(grad, x, "grad");
  Tensor out = make_strided(x, size, stride);
  prefer_huge_pages(out);
  const auto gs = image_strides(grad), xs = image_strides(x);
  const auto os = weight_strides(out);
  dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    for_each_strip<T>(p, true, true, [&](auto& worker, auto b, auto g, auto first, auto count) {
      worker.load_x(group<T>(x, p, b, g), xs, first, count);
      worker.load_grad(group<T>(grad, p, b, g), gs, first, count);
      worker.grad_weight(weights<T>(out, b, g), os, first, count);
    });
  });
  return out;
}

// Computes both gradients strip by strip, so that the output's gradient is read from memory once.
std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                    int64_t dilation) {
  const Problem p(x, weight.sizes(), dilation);
  check_backward(grad, x, weight);
  Tensor grad_x = make_like(x);
  Tensor grad_w = make_like(weight);
  prefer_huge_pages(grad_x);
  prefer_huge_pages(grad_w);
  const auto gs = image_strides(grad), xs = image_strides(x), gxs = image_strides(grad_x);
  const auto ws = weight_strides(weight), gws = weight_strides(grad_w);
  dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    for_each_strip<T>(p, true, true, [&](auto& worker, auto b, auto g, auto first, auto count) {
      worker.load_x(group<T>(x, p, b, g), xs, first, count);
      worker.load_grad(group<T>(grad, p, b, g), gs, first, count);
      worker.grad_weight(weights<T>(grad_w, b, g), gws, first, count);
      worker.grad_input(weights<T>(weight, b, g), ws, group<T>(grad_x, p, b, g), gxs, first, count);
    });
  });
  return {grad_x, grad_w};
}

}  // namespace
}  // namespace hoconv::high_order::conv2d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CPU, m) {
  m.impl("high_order_conv2d.cpp", TORCH_BOX(&hoconv::high_order::conv2d::forward));
  m.impl("high_order_conv2d_backward.cpp", TORCH_BOX(&hoconv::high_order::conv2d::backward));
  m.impl("high_order_conv2d_grad_input.cpp", TORCH_BOX(&hoconv::high_order::conv2d::grad_input));
  m.impl("high_order_conv2d_grad_weight.cpp", TORCH_BOX(&hoconv::high_order::conv2d::grad_weight));
}
