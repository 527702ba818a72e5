// How the tuned CUDA kernels of the high-order convolution cut their work, and how a thread loads
// its pixels.
//
// The first of these that takes a call computes it: the kernels of bands/, staged.cuh,
// aligned.cuh, the `tuned` ones, and those of general.cuh, which take everything. A border that
// repeats pixels is zeros for the last three; border.cuh then writes what reads it.
//
// The tuned kernels take square windows of odd sizes from 3 to 11, padded with zeros, of dilation,
// stride and scale 1, contiguous rows, and all dtypes but float64. At C = 3 and k = 5 four fifths
// of all bytes are weights, so a tuned kernel reads them as well as it can: a thread owns V
// neighbouring pixels of a row, loads a row of their weights, V at a time, and applies it to
// N channels, whose pixels come from the L1 cache and whose sums stay in registers. It uses no
// shared memory and no atomics: two runs give the same bits.
//
// Where there are more than N channels, the weights are read again, from the L2 cache: N is as
// large as the sums of it fit the registers. Weights are widened once for all N.
//
// An example, involution: 32 images of 256 channels in 16 groups, 56 x 56, k = 7, in bfloat16: the
// weights are 157 MB, both images 103 MB, 54 us of an H200's memory; 1.26 billion products, 43 us
// of its arithmetic. A row of taps of a channel loads 12 pixels in three loads and widens 10, for
// 28 products. The output takes 132 us with N = 16: 145 with 8, and 240 where a pixel outside the
// image was a branch, and each product widened its weight anew. What did not help, measured on an
// H200: to load the next row of weights early (registers: 186 us), more pixels a thread (169), to
// copy the weights to shared memory asynchronously (it takes L1 cache from the pixels), and to
// shuffle the neighbours' pixels instead of loading them.
//
// B batch, C channels, G groups of channels, H height, W width, K kernel size, V pixels a
// thread, N channels at once.
#pragma once

#include <algorithm>

#include "high_order/conv2d/problem.h"
#include "high_order/image.cuh"

namespace hoconv::high_order::conv2d {

// The gradients, of tensors that are checked, into `out`, which they return.
Tensor cuda_grad_input(Tensor out, const Tensor& grad, const Tensor& weight, const Problem& p);
Tensor cuda_grad_weight(Tensor out, const Tensor& grad, const Tensor& x, const Problem& p);

// Launch the kernels of bands/ where they take a call; return whether they do.
template <bool Adjoint>
bool apply_from_bands(const Tensor& source, const Tensor& weight, Tensor& out, const Problem& p,
                      cudaStream_t stream);
bool sum_to_bands(const Tensor& grad, const Tensor& x, Tensor& out, const Problem& p,
                  cudaStream_t stream);

// Widens the elements of a pack. Two of bfloat16 are a word: the halves of it that a float has at
// its top, where a conversion of each would keep the integer units busy.
template <typename T, int V, typename A>
__device__ __forceinline__ void widen_all(const Pack<T, V>& pack, A* values) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && V % 2 == 0) {
    const auto* words = reinterpret_cast<const unsigned*>(&pack);
#pragma unroll
    for (int i = 0; i < V / 2; ++i) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) values[v] = widen<A>(pack.e[v]);
  }
}

// How a tuned kernel's work is cut: blockIdx.x counts the blocks of all images and groups. What is
// computed for a pixel has parts, of N channels or of a row of taps; blockIdx.y counts the blocks
// that share them.
struct Tiling {
  int H, W, columns;  // columns: groups of V pixels in a row
  int blocks, G;      // blocks an image
  int group_channels;
  int parts;  // that a block computes
};

template <typename T>
struct Weights {  // the weights, or their gradient
  T* data;
  WeightStrides s;
  __device__ T* at(int64_t tap, int64_t b, int64_t g, int64_t h, int64_t w) const {
    return data + tap * s.tap + b * s.b + g * s.g + h * s.h + w * s.w;
  }
};

template <typename T>
Weights<const T> weights(const Tensor& t) {
  return {static_cast<const T*>(t.const_data_ptr()), weight_strides(t)};
}
template <typename T>
Weights<T> mutable_weights(Tensor& t) {
  return {static_cast<T*>(t.mutable_data_ptr()), weight_strides(t)};
}

// The V pixels of a thread: row h from column w on, the `column`th group of V in that row. The
// outermost `Halo` lanes on either side of a warp compute pixels that another warp writes.
template <int V, int Halo = 0>
struct ThreadPixels {
  static constexpr int kept = 32 - 2 * Halo;  // lanes of a warp that write
  static constexpr int kept_per_block = kThreads / 32 * kept;
  int lane, b, g, h, column, w;
  bool exists, keeps;

  __device__ explicit ThreadPixels(const Tiling& t) {
    const int image = blockIdx.x / t.blocks, block = blockIdx.x - image * t.blocks;
    b = image / t.G, g = image - b * t.G;
    lane = threadIdx.x % 32;
    const int n = (block * (kThreads / 32) + threadIdx.x / 32) * kept + lane - Halo;
    exists = n >= 0 && n < t.H * t.columns;
    keeps = exists && lane >= Halo && lane < 32 - Halo;
    h = exists ? n / t.columns : 0;
    column = exists ? n - h * t.columns : 0;
    w = column * V;
  }
};

// Loads the V pixels at `p`, column w of a row of W, and the K - 1 around them; zeros out of range.
template <int K, int V, typename T, typename A>
__device__ __forceinline__ void load_window(const T* p, bool inside, int w, int W,
                                            A (&window)[V + K - 1]) {
  constexpr int before = (K - 1) / 2;
  constexpr int fitting = before <= 1 ? 1 : before <= 2 ? 2 : 4;
  constexpr int side = fitting < V ? fitting : V;  // pixels of one load beside the V
  Pack<T, V> middle = {};
  if (inside) middle = load<V>(p);
  widen_all(middle, window + before);
#pragma unroll
  for (int far = side; far < before + side; far += side) {
    Pack<T, side> left = {}, right = {};
    if (inside && w >= far) left = load<side>(p - far);
    if (inside && w + V + far <= W) right = load<side>(p + V + far - side);
    A lefts[side], rights[side];
    widen_all(left, lefts);
    widen_all(right, rights);
#pragma unroll
    for (int i = 0; i < side; ++i) {
      if (before - far + i >= 0) window[before - far + i] = lefts[i];
      const int at = before + V + far - side + i;
      if (at < V + K - 1) window[at] = rights[i];
    }
  }
}

// Loads a row of taps of V pixels.
template <int K, int V, typename T, typename A>
__device__ __forceinline__ void load_taps(const T* p, int64_t next_tap, A (&taps)[K][V]) {
  Pack<T, V> packs[K];
#pragma unroll
  for (int j = 0; j < K; ++j, p += next_tap) packs[j] = load_once<V>(p);
#pragma unroll
  for (int j = 0; j < K; ++j) widen_all(packs[j], taps[j]);
}

// Calls f(K, V, N) with the constants of a tuned kernel and returns true. Returns false where none
// fits. N is at most `Most`, or 4 where a pixel has more weights than leave registers for more.
template <typename T, int Most, typename F>
bool dispatch_tuned(const Problem& p, std::initializer_list<const Tensor*> tensors, F&& f) {
  if constexpr (sizeof(T) == 8) {
    return false;
  } else {
    using std::integral_constant;
    // The tuned kernels count the pixels of an image, and the blocks of a launch, in 32 bits.
    constexpr int64_t most = int64_t{1} << 30;
    const auto is_tuned = [](const Axis& a) {
      return a.is_dense() && a.padding != Padding::valid && a.dilation == 1;
    };
    if (!is_tuned(p.down) || !is_tuned(p.across) || p.down.taps != p.across.taps) return false;
    const int64_t pixels = p.down.in * p.across.in, n = p.group_channels();
    if (pixels >= most || p.B * p.G * (pixels / 32 + 1) >= most) return false;
    const auto fits = [&](int64_t V) {
      return std::all_of(tensors.begin(), tensors.end(),
                         [&](const Tensor* t) { return vectorizable(*t, V); });
    };
    if (!fits(1)) return false;
    const auto with_many = [&](auto K, auto V) {  // channels: a multiple of 4
      if constexpr (K <= 7 && V > 1) {
        if (n % Most == 0) return f(K, V, integral_constant<int, Most>{});
        if (n % 8 == 0) return f(K, V, integral_constant<int, 8>{});
      }
      f(K, V, integral_constant<int, 4>{});
    };
    const auto with_few = [&](auto K, auto V) {
      if (n % 3 == 0)
        f(K, V, integral_constant<int, 3>{});
      else
        f(K, V, integral_constant<int, 1>{});
    };
    const auto with_pixels = [&](auto K) {
      constexpr integral_constant<int, 4> four;
      constexpr integral_constant<int, 2> two;
      constexpr integral_constant<int, 1> one;
      if (n % 4)
        fits(4) ? with_few(K, four) : with_few(K, one);
      else if (fits(4))
        with_many(K, four);
      else if (fits(2))
        with_many(K, two);
      else if constexpr (sizeof(T) == 2)
        return false;  // 16-bit loads of one pixel; general.cuh shares them among four
      else
        with_many(K, one);
      return true;
    };
    switch (p.across.taps) {
      case 3:
        return with_pixels(integral_constant<int, 3>{});
      case 5:
        return with_pixels(integral_constant<int, 5>{});
      case 7:
        return with_pixels(integral_constant<int, 7>{});
      case 9:
        return with_pixels(integral_constant<int, 9>{});
      case 11:
        return with_pixels(integral_constant<int, 11>{});
      default:
        return false;
    }
  }
}

// The grid of a tuned kernel that writes H x W pixels, given the parts of a pixel. Several blocks
// share them only where the pixels alone do not fill the GPU.
template <typename Pixels>
dim3 grid_for(const Problem& p, int64_t H, int64_t W, int V, int64_t parts, Tiling& tiling) {
  tiling.H = H, tiling.W = W, tiling.columns = W / V, tiling.G = p.G;
  tiling.group_channels = p.group_channels();
  tiling.blocks = (H * tiling.columns + Pixels::kept_per_block - 1) / Pixels::kept_per_block;
  const int64_t x = tiling.blocks * p.B * p.G;
  const int64_t blocks = std::clamp<int64_t>(kEnoughBlocks / x, 1, std::min(parts, kMaxGridYZ));
  tiling.parts = (parts + blocks - 1) / blocks;
  return dim3(x, (parts + tiling.parts - 1) / tiling.parts);
}

}  // namespace hoconv::high_order::conv2d
