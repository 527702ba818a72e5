// grad_weight[tap, b, g, h, w] = sum over c of grad[b, c, h, w] * x[b, c, the pixel that it reads]
//
// The tuned kernel sums one row of taps at a time in registers, over all channels, and stores it.
// Where the pixels alone do not fill the GPU, blocks share the rows of taps.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "high_order/conv2d/cuda/aligned.cuh"
#include "high_order/conv2d/cuda/border.cuh"
#include "high_order/conv2d/cuda/kernels.cuh"
#include "high_order/conv2d/cuda/layouts.cuh"
#include "high_order/conv2d/cuda/staged.cuh"

namespace hoconv::high_order::conv2d {
namespace {

constexpr int64_t kManyChannels = 64;    // of a group: enough for several threads of a pixel
constexpr int64_t kFewPixels = 1 << 14;  // whose threads leave most of a GPU idle

template <typename T, int K, int V, int N>
__global__ void __launch_bounds__(kThreads, 4)
    sum_tuned(Image<const T> grad, Image<const T> x, Weights<T> out, Tiling t) {
  using A = acc_t<T>;
  constexpr int before = (K - 1) / 2;
  const ThreadPixels<V> at(t);
  if (!at.exists) return;
  const int first = blockIdx.y * t.parts, last = min(first + t.parts, K);
  T* target = out.at(first * K, at.b, at.g, at.h, at.w);
#pragma unroll 1
  for (int i = first; i < last; ++i) {
    const int y = at.h + i - before;
    A sum[K][V] = {};
    const T* gradients = grad.at(at.b, int64_t{at.g} * t.group_channels, at.h, at.w);
    const T* row = x.at(at.b, int64_t{at.g} * t.group_channels, y, at.w);
#pragma unroll 1
    for (int c = 0; c < t.group_channels; c += N) {
#pragma unroll
      for (int m = 0; m < N; ++m, gradients += grad.s.c, row += x.s.c) {
        A gradient[V], window[V + K - 1];
        widen_all(load<V>(gradients), gradient);
        load_window<K, V>(row, y >= 0 && y < t.H, at.w, t.W, window);
#pragma unroll
        for (int j = 0; j < K; ++j)
#pragma unroll
          for (int v = 0; v < V; ++v) sum[j][v] += gradient[v] * window[v + j];
      }
    }
#pragma unroll
    for (int j = 0; j < K; ++j, target += out.s.tap) store_sum<V>(target, sum[j]);
  }
}

// Strides of weights of one group whose neighbours are those of the next pixel of a row.
std::vector<int64_t> strides_of_rows(const Problem& p) {
  const int64_t pixels = p.down.out * p.across.out;
  return {pixels, p.taps() * pixels, pixels, p.across.out, 1};
}

// Whether weights are written so, and then transposed to where all of a pixel are neighbours: the
// threads of general.cuh would write their elements one by one to as many places. With many
// channels a pixel's threads, which share them, are enough for that; few are for staged.cuh.
bool is_worth_transposing(const Tensor& weight, const Problem& p) {
  const int64_t taps = p.taps(), pixels = p.down.out * p.across.out;
  const WeightStrides s = weight_strides(weight);
  constexpr int64_t many_taps = 16;
  return p.G == 1 && taps >= many_taps && s.tap == 1 && s.w == taps && s.h == p.across.out * taps &&
         (p.B == 1 || s.b == pixels * taps) && p.C > kFewChannels && p.C < kManyChannels &&
         is_transposable(p.B, taps);
}

}  // namespace

Tensor cuda_grad_weight(Tensor out, const Tensor& grad, const Tensor& x, const Problem& p) {
  if (out.numel() == 0) return out;
  const Launch launch(x);
  if (sum_to_bands(grad, x, out, p, launch.stream)) return out;
  if (is_worth_transposing(out, p)) {
    Tensor rows = make_strided(out, {out.sizes().begin(), out.sizes().end()}, strides_of_rows(p));
    cuda_grad_weight(rows, grad, x, p);
    transpose_all(rows, out, p.B, p.taps(), p.down.out * p.across.out, launch.stream);
    return out;
  }
  const int64_t n = p.group_channels(), pixels = p.B * p.G * p.down.in * p.across.in;
  const bool many = n >= 2 * kManyChannels, few_pixels = n >= kManyChannels && pixels < kFewPixels;
  bool staged = false, done = false;
  dispatch_cuda(x, [&](auto zero) {
    using T = decltype(zero);
    staged = sum_to_stage<T>(grad, x, out, p, launch.stream);
    done = staged ||
           (!many && !few_pixels && sum_where_aligned<T>(grad, x, out, p, launch.stream)) ||
           (!few_pixels && dispatch_tuned<T, 8>(p, {&grad, &x, &out}, [&](auto K, auto V, auto N) {
             Tiling tiling;
             const dim3 grid = grid_for<ThreadPixels<V>>(p, p.down.in, p.across.in, V, K, tiling);
             // 8 channels at once do not fit the registers at k = 7 in float32.
             constexpr int M = K == 7 && sizeof(T) == 4 && N == 8 ? 4 : N;
             sum_tuned<T, K, V, M><<<grid, kThreads, 0, launch.stream>>>(
                 image<T>(grad), image<T>(x), mutable_weights<T>(out), tiling);
           }));
  });
  // In general.cuh several threads share the channels of a pixel, where channels are last.
  const bool last = channels_last(grad) && channels_last(x);
  if (!done && (many || few_pixels) && !last && fills_loads(x, p)) {
    const Tensor gradients = copy_channels_last(grad, launch.stream);
    return cuda_grad_weight(out, gradients, copy_channels_last(x, launch.stream), p);
  }
  dispatch_cuda(x, [&](auto zero) {
    using T = decltype(zero);
    if (!done) sum_general<T>(grad, x, out, p, launch.stream);
    if (!staged && p.repeats()) sum_border<T>(grad, x, out, p, launch.stream);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

namespace {

Tensor grad_weight(const Tensor& grad, const Tensor& x, std::vector<int64_t> size,
                   std::vector<int64_t> stride, std::vector<int64_t> window) {
  const Problem p(x.sizes(), size, Window(window));
  check_floating(x, "x");
  check_gradient(grad, x, p);
  return cuda_grad_weight(make_strided(x, size, stride), grad, x, p);
}

}  // namespace
}  // namespace hoconv::high_order::conv2d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("high_order_conv2d_grad_weight.cuda", TORCH_BOX(&hoconv::high_order::conv2d::grad_weight));
}
