// The gradient of weights that are neighbours in memory by their pixel, of few channels.
//
// A thread owns a tap of pixels that lie apart, so that neighbouring threads write neighbours. In
// general.cuh neighbouring threads own neighbouring pixels, and each weight is a write of its own
// to the L2 cache, 32 bytes for two: 1.3 ms for 64 images of 3 channels, 224 x 224, k = 5, in
// bfloat16, which have 80 million weights. Here they take 0.37 ms. A weight takes two loads and a
// product per channel, from the L1 cache: with more than a few channels that costs more than the
// writes.
//
// B batch, C channels, G groups of channels.
#pragma once

#include "high_order/conv2d/cuda/windowed.cuh"

namespace hoconv::high_order::conv2d {

constexpr int kTapThreads = 256;
constexpr int kPixelsOfThread = 16;  // for which it finds its tap once
constexpr int kFewChannels = 4;      // of a group
constexpr int kWarp = 32;            // threads

// Pixels that a block computes at once.
inline __host__ __device__ int pixels_at_once(int weights) {
  return weights < kTapThreads ? kTapThreads / weights : 1;
}

// N channels of a group.
template <typename T, int N>
__global__ void __launch_bounds__(kTapThreads)
    sum_taps(Image<const T> grad, Image<const T> x, Weights<T> out, Windows p) {
  using A = acc_t<T>;
  const int weights = p.down.taps * p.across.taps * p.G;
  const int together = pixels_at_once(weights), pixels = together * kPixelsOfThread;
  const int blocks = (p.across.out + pixels - 1) / pixels;  // of a row
  const int64_t row = blockIdx.x / blocks, b = row / p.down.out;
  const int h = row - b * p.down.out, left = (blockIdx.x - row * blocks) * pixels;
  const int first = threadIdx.x / weights, right = min(left + pixels, p.across.out);
  if (first >= together) return;
  for (int i = threadIdx.x - first * weights; i < weights; i += kTapThreads) {
    const int tap = i / p.G, g = i - tap * p.G;
    const int down = tap / p.across.taps, across = tap - down * p.across.taps;
    const int y = p.down.pixel_at(p.down.first_position(h) + down * p.down.step);
    const T* image = x.at(b, g * N, y, 0);
    const T* gradients = grad.at(b, g * N, h, left + first);
    T* target = out.at(tap, b, g, h, left + first);
    for (int w = left + first; w < right;
         w += together, gradients += together * grad.s.w, target += together * out.s.w) {
      const int z = p.across.pixel_at(p.across.first_position(w) + across * p.across.step);
      A gradient[N], pixel[N], sum = 0;
      load_channels<N, false>(gradients, grad.s.c, true, gradient);
      load_channels<N, false>(image + z * x.s.w, x.s.c, y >= 0 && z >= 0, pixel);
#pragma unroll
      for (int c = 0; c < N; ++c) sum += gradient[c] * pixel[c];
      *target = narrow<T>(sum);
    }
  }
}

// Launches `sum_taps` where it is faster; returns whether it did.
template <typename T>
bool sum_tapwise(const Tensor& grad, const Tensor& x, Tensor& out, const Problem& p,
                 cudaStream_t stream) {
  using std::integral_constant;
  const WeightStrides s = weight_strides(out);
  // With a group for each thread of a warp general.cuh writes neighbours, too.
  const bool pays = s.w != 1 && (s.tap == 1 || s.g == 1) && p.G < kWarp;
  if (!pays || p.group_channels() > kFewChannels) return false;
  check_positions(p);
  const int64_t pixels = int64_t{pixels_at_once(p.taps() * p.G)} * kPixelsOfThread;
  const int64_t blocks = p.B * p.down.out * ((p.across.out + pixels - 1) / pixels);
  const auto launch = [&](auto N) {
    sum_taps<T, N><<<blocks, kTapThreads, 0, stream>>>(image<T>(grad), image<T>(x),
                                                       mutable_weights<T>(out), Windows(p));
  };
  static_assert(kFewChannels == 4);
  switch (p.group_channels()) {
    case 1:
      launch(integral_constant<int, 1>{});
      break;
    case 2:
      launch(integral_constant<int, 2>{});
      break;
    case 3:
      launch(integral_constant<int, 3>{});
      break;
    default:
      launch(integral_constant<int, 4>{});
  }
  return true;
}

}  // namespace hoconv::high_order::conv2d
