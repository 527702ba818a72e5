// out[b, c, h, w] = sum over taps of weight[tap, b, g, h, w] * x[b, c, the pixel that it reads]

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "high_order/conv2d/cuda/aligned.cuh"
#include "high_order/conv2d/cuda/border.cuh"
#include "high_order/conv2d/cuda/kernels.cuh"
#include "high_order/conv2d/cuda/staged.cuh"

namespace hoconv::high_order::conv2d {
namespace {

template <typename T, int K, int V, int N>
__global__ void __launch_bounds__(kThreads, N* V > 32 ? 3 : 4)
    apply_tuned(Image<const T> x, Weights<const T> weight, Image<T> out, Tiling t) {
  using A = acc_t<T>;
  constexpr int before = (K - 1) / 2;
  const ThreadPixels<V> at(t);
  if (!at.exists) return;
  const int first = blockIdx.y * t.parts * N;
  const int last = min(first + t.parts * N, t.group_channels);
  for (int c = first; c < last; c += N) {
    const int64_t channel = int64_t{at.g} * t.group_channels + c;
    const T* tap_weight = weight.at(0, at.b, at.g, at.h, at.w);
    A sum[N][V] = {};
#pragma unroll 1  // unrolled, it takes so many registers that it is slower
    for (int i = 0; i < K; ++i) {
      A taps[K][V];
      load_taps<K, V>(tap_weight, weight.s.tap, taps);
      tap_weight += K * weight.s.tap;
      const int y = at.h + i - before;
      const T* row = x.at(at.b, channel, y, at.w);
#pragma unroll
      for (int m = 0; m < N; ++m, row += x.s.c) {
        A window[V + K - 1];
        load_window<K, V>(row, y >= 0 && y < t.H, at.w, t.W, window);
#pragma unroll
        for (int j = 0; j < K; ++j)
#pragma unroll
          for (int v = 0; v < V; ++v) sum[m][v] += taps[j][v] * window[v + j];
      }
    }
#pragma unroll
    for (int m = 0; m < N; ++m) store_sum<V>(out.at(at.b, channel + m, at.h, at.w), sum[m]);
  }
}

Tensor forward(const Tensor& x, const Tensor& weight, std::vector<int64_t> window) {
  const Problem p(x.sizes(), weight.sizes(), Window(window));
  check_floating(x, "x");
  check_alike(weight, x, "weight");
  Tensor out = make_output(x, p);
  if (out.numel() == 0) return out;
  const Launch launch(x);
  if (apply_from_bands<false>(x, weight, out, p, launch.stream)) return out;
  dispatch_cuda(x, [&](auto zero) {
    using T = decltype(zero);
    if (apply_from_stage<T>(x, weight, out, p, launch.stream)) return;
    const bool done = apply_where_aligned<false, T>(x, weight, out, p, launch.stream) ||
                      dispatch_tuned<T, 16>(p, {&x, &weight, &out}, [&](auto K, auto V, auto N) {
                        Tiling tiling;
                        const dim3 grid = grid_for<ThreadPixels<V>>(p, p.down.in, p.across.in, V,
                                                                    p.group_channels() / N, tiling);
                        apply_tuned<T, K, V, N><<<grid, kThreads, 0, launch.stream>>>(
                            image<T>(x), weights<T>(weight), mutable_image<T>(out), tiling);
                      });
    if (!done) apply_general<false, T>(x, weight, out, p, launch.stream);
    if (p.repeats()) apply_border<T>(x, weight, out, p, launch.stream);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

}  // namespace
}  // namespace hoconv::high_order::conv2d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("high_order_conv2d.cuda", TORCH_BOX(&hoconv::high_order::conv2d::forward));
}
