// The kernels for taps that read whole loads: rows are contiguous, and neighbouring taps of a row
// are a multiple of V pixels apart, or the only ones.
//
// A thread owns V neighbouring pixels of a row. The V pixels that a tap of theirs reads are aligned
// as they are, so they are one load, and all of them inside the image or none. So are the weights
// of a tap: for the output those of the thread's own pixels, for the gradient of x those of the
// pixels that read them. No two taps share a load, so the window has no shape here: its taps are
// a list, and M of them are loaded before the first is multiplied.
//
// An example, 16 images of 16 channels, 112 x 112, k = 5, dilation 8, in bfloat16: the weights are
// 10 MB and the images 13, 5.7 us of an H200's memory; 80 million products. A tap of a thread is a
// load of 8 weights and 4 loads of 8 pixels, one for each channel, for 32 products, and 40
// conversions: 6 us of all schedulers. As compiled for sm_90 there are twice as many instructions,
// for addresses and for zeros outside, and it takes 24 us: the schedulers issue two thirds of the
// time. What did not help: 2 channels at once, or 1, for more threads; 3 taps at once, or 8; zeros
// by masks in the conversions instead of in the loads.
//
// B batch, C channels, G groups of channels, V pixels a thread, N channels at once, M taps at once.
#pragma once

#include "high_order/conv2d/cuda/general.cuh"

namespace hoconv::high_order::conv2d {

constexpr int kAlignedTaps = 5;  // M

// Loads V pixels, or weights; zeros where they are none.
template <int V, typename T, typename A>
__device__ __forceinline__ void load_where(bool exists, const T* p, A (&values)[V]) {
  Pack<T, V> pack = {};
  if (exists) pack = load<V>(p);
  widen_all(pack, values);
}

// The output, or with `Adjoint` the gradient of x, of which `source` is then the output's gradient.
template <typename T, int V, int N, bool Adjoint>
__global__ void __launch_bounds__(kThreads, 4)
    apply_aligned(Image<const T> source, Weights<const T> weight, Image<T> out, Windows p,
                  Tiling t) {
  using A = acc_t<T>;
  constexpr int M = kAlignedTaps;
  const ThreadPixels<V> at(t);
  if (!at.exists) return;
  const int all = p.down.taps * p.across.taps;
  const int begin = blockIdx.y * t.parts * N;
  const int end = min(begin + t.parts * N, t.group_channels);
  for (int c = begin; c < end; c += N) {
    const int64_t channel = int64_t{at.g} * t.group_channels + c;
    A sum[N][V] = {};
    Taps<Adjoint> tap(p, at.h, at.w);
#pragma unroll 1
    for (int first = 0; first < all; first += M) {
      Pack<T, V> factors[M] = {};
      const T* pixels[M];
      bool inside[M];
#pragma unroll
      for (int m = 0; m < M; ++m, tap.next()) {
        const bool exists = first + m < all;
        inside[m] = exists && tap.is_inside();
        pixels[m] = source.at(at.b, channel, tap.y, tap.z);
        if (Adjoint ? inside[m] : exists)
          factors[m] = load_once<V>(
              weight.at(first + m, at.b, at.g, Adjoint ? tap.y : at.h, Adjoint ? tap.z : at.w));
      }
#pragma unroll
      for (int m = 0; m < M; ++m) {
        A values[N][V], factor[V];
#pragma unroll
        for (int n = 0; n < N; ++n) load_where(inside[m], pixels[m] + n * source.s.c, values[n]);
        widen_all(factors[m], factor);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int v = 0; v < V; ++v) sum[n][v] += factor[v] * values[n][v];
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) store_sum<V>(out.at(at.b, channel + n, at.h, at.w), sum[n]);
  }
}

// grad_weight. Blocks share the taps.
template <typename T, int V>
__global__ void __launch_bounds__(kThreads, 4)
    sum_aligned(Image<const T> grad, Image<const T> x, Weights<T> out, Windows p, Tiling t) {
  using A = acc_t<T>;
  constexpr int M = kAlignedTaps;
  const ThreadPixels<V> at(t);
  if (!at.exists) return;
  const int all = p.down.taps * p.across.taps;
  const int begin = blockIdx.y * t.parts * M, end = min(begin + t.parts * M, all);
  const int64_t channel = int64_t{at.g} * t.group_channels;
  Taps<> tap(p, at.h, at.w);
  for (int i = 0; i < begin; ++i) tap.next();
#pragma unroll 1
  for (int first = begin; first < end; first += M) {
    const T* pixels[M];
    bool inside[M];
#pragma unroll
    for (int m = 0; m < M; ++m, tap.next()) {
      inside[m] = first + m < all && tap.is_inside();
      pixels[m] = x.at(at.b, channel, tap.y, tap.z);
    }
    const T* gradients = grad.at(at.b, channel, at.h, at.w);
    A sum[M][V] = {};
#pragma unroll 2
    for (int c = 0; c < t.group_channels; ++c, gradients += grad.s.c) {
      A gradient[V];
      widen_all(load<V>(gradients), gradient);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        A values[V];
        load_where(inside[m], pixels[m], values);
        pixels[m] += x.s.c;
#pragma unroll
        for (int v = 0; v < V; ++v) sum[m][v] += gradient[v] * values[v];
      }
    }
#pragma unroll
    for (int m = 0; m < M; ++m)
      if (first + m < all) store_sum<V>(out.at(first + m, at.b, at.g, at.h, at.w), sum[m]);
  }
}

// Calls f(V) with the pixels of a thread and returns true; returns false where none are aligned.
template <typename T, typename F>
bool dispatch_aligned(const Problem& p, std::initializer_list<const Tensor*> tensors, F&& f) {
  const Axis& a = p.across;
  constexpr int64_t most = int64_t{1} << 30;  // pixels of an image, and blocks of a launch
  const int64_t pixels = std::max(p.down.in, p.down.out) * std::max(a.in, a.out);
  if (!p.is_dense() || pixels >= most || p.B * p.G * (pixels / kThreads + 1) >= most) return false;
  const auto with = [&](auto V) {
    const auto fits = [&](const Tensor* t) { return vectorizable(*t, V); };
    const bool aligned = a.taps == 1 || a.step() % V == 0;
    if (!aligned || a.before % V || !std::all_of(tensors.begin(), tensors.end(), fits))
      return false;
    check_positions(p);
    f(V);
    return true;
  };
  if (with(std::integral_constant<int, 16 / sizeof(T)>{})) return true;
  if constexpr (sizeof(T) <= 4) return with(std::integral_constant<int, 8 / sizeof(T)>{});
  return false;
}

// Launch their kernel where it takes the problem; return whether it does.
template <bool Adjoint, typename T>
bool apply_where_aligned(const Tensor& source, const Tensor& weight, Tensor& out, const Problem& p,
                         cudaStream_t stream) {
  using std::integral_constant;
  return dispatch_aligned<T>(p, {&source, &weight, &out}, [&](auto V) {
    const auto launch = [&](auto N) {
      Tiling tiling;
      const int64_t H = Adjoint ? p.down.in : p.down.out, W = Adjoint ? p.across.in : p.across.out;
      const dim3 grid = grid_for<ThreadPixels<V>>(p, H, W, V, p.group_channels() / N, tiling);
      apply_aligned<T, V, N, Adjoint><<<grid, kThreads, 0, stream>>>(
          image<T>(source), weights<T>(weight), mutable_image<T>(out), Windows(p), tiling);
    };
    const int64_t n = p.group_channels();
    if (n % 4 == 0)
      launch(integral_constant<int, 4>{});
    else if (n % 3 == 0)
      launch(integral_constant<int, 3>{});
    else
      launch(integral_constant<int, 1>{});
  });
}

template <typename T>
bool sum_where_aligned(const Tensor& grad, const Tensor& x, Tensor& out, const Problem& p,
                       cudaStream_t stream) {
  return dispatch_aligned<T>(p, {&grad, &x, &out}, [&](auto V) {
    Tiling tiling;
    const int64_t parts = (p.taps() + kAlignedTaps - 1) / kAlignedTaps;
    const dim3 grid = grid_for<ThreadPixels<V>>(p, p.down.out, p.across.out, V, parts, tiling);
    sum_aligned<T, V><<<grid, kThreads, 0, stream>>>(image<T>(grad), image<T>(x),
                                                     mutable_weights<T>(out), Windows(p), tiling);
  });
}

}  // namespace hoconv::high_order::conv2d
