// grad_x[b, c, h, w] = sum over taps, and over the output pixels that read h, w by the tap, of
// weight[tap, b, g, that pixel] * grad[b, c, that pixel]
//
// A gather: no thread adds to the output of another. Weights shifted by dx are not aligned for
// 16-byte loads, so the tuned kernel loads them unshifted. A thread multiplies them with the V
// source columns that it owns, keeps the products for those columns and the K - 1 around them in
// registers, and hands those that belong to a neighbour over by warp shuffles.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "high_order/conv2d/cuda/aligned.cuh"
#include "high_order/conv2d/cuda/border.cuh"
#include "high_order/conv2d/cuda/kernels.cuh"
#include "high_order/conv2d/cuda/layouts.cuh"
#include "high_order/conv2d/cuda/staged.cuh"

namespace hoconv::high_order::conv2d {
namespace {

constexpr __host__ __device__ int floor_div(int a, int b) {
  return a >= 0 ? a / b : -((b - 1 - a) / b);
}

// Threads on either side whose columns a thread adds to.
template <int K, int V>
constexpr int kHalo = ((K - 1) / 2 + V - 1) / V;

template <typename T, int K, int V, int N>
__global__ void __launch_bounds__(kThreads, 4)
    gather_tuned(Image<const T> grad, Weights<const T> weight, Image<T> out, Tiling t) {
  using A = acc_t<T>;
  constexpr int before = (K - 1) / 2;
  const ThreadPixels<V, kHalo<K, V>> at(t);
  const int first = blockIdx.y * t.parts * N;
  const int last = min(first + t.parts * N, t.group_channels);
  for (int c = first; c < last; c += N) {
    const int64_t channel = int64_t{at.g} * t.group_channels + c;
    A window[N][V + K - 1] = {};  // sums for columns w - before ... w + V - 1 + after
// Unrolled, it takes so many registers that it is slower.
#pragma unroll 1
    for (int i = 0; i < K; ++i) {
      const int y = at.h - i + before;
      if (!at.exists || y < 0 || y >= t.H) continue;
      A taps[K][V];
      load_taps<K, V>(weight.at(i * K, at.b, at.g, y, at.w), weight.s.tap, taps);
      const T* row = grad.at(at.b, channel, y, at.w);
#pragma unroll
      for (int m = 0; m < N; ++m) {
        A gradient[V];
        widen_all(load<V>(row + m * grad.s.c), gradient);
#pragma unroll
        for (int j = 0; j < K; ++j)
#pragma unroll
          for (int v = 0; v < V; ++v) window[m][v + j] += taps[j][v] * gradient[v];
      }
    }
#pragma unroll
    for (int m = 0; m < N; ++m) {
      A sum[V];
#pragma unroll
      for (int v = 0; v < V; ++v) sum[v] = window[m][before + v];
#pragma unroll
      for (int a = 0; a < V + K - 1; ++a) {
        const int threads =
            floor_div(a - before, V);  // between this thread and the owner, to its right
        if (threads == 0) continue;
        const A received = __shfl_sync(0xffffffff, window[m][a], (at.lane - threads) & 31);
        const bool same_row = at.column - threads >= 0 && at.column - threads < t.columns;
        sum[a - before - threads * V] += same_row ? received : A(0);
      }
      if (at.keeps) store_sum<V>(out.at(at.b, channel + m, at.h, at.w), sum);
    }
  }
}

// Whether a pixel gathers from so many, of so many channels, that it pays to copy images to memory
// with channels last and back: of 4 images of 384 channels, 32 x 32, k = 7, scale 4, in float32 on
// an H200, this takes 1,650 us with rows last, 205 with channels last, and 270 with the copies.
bool gathers_many(const Problem& p) {
  constexpr int64_t many_channels = 32, many_taps = 9;
  return p.down.scale * p.across.scale > 1 && p.taps() >= many_taps &&
         p.group_channels() >= many_channels;
}

}  // namespace

Tensor cuda_grad_input(Tensor out, const Tensor& grad, const Tensor& weight, const Problem& p) {
  if (out.numel() == 0) return out;
  const Launch launch(grad);
  const bool banded = apply_from_bands<true>(grad, weight, out, p, launch.stream);
  if (!banded && !channels_last(grad) && gathers_many(p) && fills_loads(grad, p)) {
    const Tensor last = make_channels_last(out, {out.sizes().begin(), out.sizes().end()});
    const Tensor gradients = copy_channels_last(grad, launch.stream);
    copy_image(out, cuda_grad_input(last, gradients, weight, p), launch.stream);
    return out;
  }
  dispatch_cuda(grad, [&](auto zero) {
    using T = decltype(zero);
    const bool done = banded || gather_from_stage<T>(grad, weight, out, p, launch.stream) ||
                      apply_where_aligned<true, T>(grad, weight, out, p, launch.stream) ||
                      dispatch_tuned<T, 8>(p, {&grad, &weight, &out}, [&](auto K, auto V, auto N) {
                        Tiling tiling;
                        const dim3 grid = grid_for<ThreadPixels<V, kHalo<K, V>>>(
                            p, p.down.in, p.across.in, V, p.group_channels() / N, tiling);
                        gather_tuned<T, K, V, N><<<grid, kThreads, 0, launch.stream>>>(
                            image<T>(grad), weights<T>(weight), mutable_image<T>(out), tiling);
                      });
    if (!done) apply_general<true, T>(grad, weight, out, p, launch.stream);
    if (p.repeats()) gather_border<T>(grad, weight, out, p, launch.stream);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return out;
}

namespace {

Tensor grad_input(const Tensor& grad, const Tensor& weight, std::vector<int64_t> size,
                  std::vector<int64_t> stride, std::vector<int64_t> window) {
  const Problem p(size, weight.sizes(), Window(window));
  check_gradient(grad, weight, p);
  return cuda_grad_input(make_strided(grad, size, stride), grad, weight, p);
}

}  // namespace
}  // namespace hoconv::high_order::conv2d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("high_order_conv2d_grad_input.cuda", TORCH_BOX(&hoconv::high_order::conv2d::grad_input));
}
