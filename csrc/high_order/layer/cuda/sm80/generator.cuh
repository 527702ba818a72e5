// The product that generates the weights: the halo tile of x in shared memory, from which its left
// operand is loaded; the generator's parameters in the order in which it loads them; and the
// product itself.
//
// B batch, C channels, G groups of channels, H height, W width, k kernel size, K = k * k taps,
// s kernel size of the generator, N = K / 8 rounded up to an even number: columns of a product.
#pragma once

#include <optional>

#include "high_order/layer/cuda/layer.cuh"

namespace hoconv::high_order::layer::sm80 {

// The halo tile: rows of x in shared memory, with zeros outside the image, as two planes of words
// (precision.cuh).
struct HaloTile {
  int rows, columns, pitch;
  __host__ __device__ int channel() const { return rows * pitch; }
  __host__ __device__ int plane(const Layer& l) const { return l.C * channel(); }
  __host__ __device__ int words(const Layer& l) const { return 2 * plane(l); }
};

template <typename P>
HaloTile make_halo_tile(int rows, int columns) {
  return {rows, columns, (columns - P::pitch_banks + 31) / 32 * 32 + P::pitch_banks};
}

// The depth of the product: the words of a pixel's window, which is s rows of every channel.
template <typename P>
__host__ __device__ int row_words(const Layer& l) {
  return (l.s + P::elements - 1) / P::elements;
}
template <typename P>
__host__ __device__ int depth_steps(const Layer& l) {
  return (l.C * l.s * row_words<P>(l) + 7) / 8;
}

// The offset of word `n` of the depth in the halo tile, from the word `reach` rows and columns
// before the pixel; -1 past the last word.
template <typename P>
__device__ int word_offset(const Layer& l, const HaloTile& halo, int n) {
  const int per_row = row_words<P>(l), row = n / per_row, dx = (n - row * per_row) * P::elements;
  const int c = row / l.s, dy = row - c * l.s, shift = l.reach - l.generator_reach;
  if (c >= l.C) return -1;
  // The last element of an odd row is alone in its word, which plane 1 has.
  const int plane = P::elements == 2 && dx + 1 == l.s ? halo.plane(l) : 0;
  return plane + c * halo.channel() + (shift + dy) * halo.pitch + shift + dx;
}

// The offset of the pixel that a tap reads, from the same word.
template <int k>
__device__ __forceinline__ int tap_offset(const Layer& l, const HaloTile& halo, int tap) {
  const int i = tap / k, j = tap - i * k, shift = l.reach - l.tap_reach;
  return (shift + i * l.dilation) * halo.pitch + shift + j * l.dilation;
}

// The generator's parameters in the order of the loads: for every group, step, eight columns and
// term, the words of B that each lane holds; and the bias in float.
template <typename P>
struct Parameters {
  const uint2* weight;
  const float* bias;
  int steps, N;
  __device__ const uint2* of_group(int g) const {
    return weight + int64_t{g} * steps * N * P::terms * 32;
  }
};

template <typename P>
__device__ float parameter(const typename P::T* weight, const ImageStrides& s, const Layer& l,
                           int g, int tap, int c, int dy, int dx) {
  if (tap >= l.taps || c >= l.C || dx >= l.s) return 0.0f;
  return P::round(
      widen<float>(weight[(int64_t{tap} * l.G + g) * s.b + c * s.c + dy * s.h + dx * s.w]));
}

template <typename P>
__global__ void arrange(const typename P::T* weight, ImageStrides strides,
                        const typename P::T* bias, int64_t bias_stride, Layer l, int N,
                        uint2* out_weight, float* out_bias) {
  const int steps = depth_steps<P>(l), per_row = row_words<P>(l);
  const int64_t total = int64_t{l.G} * steps * N * 32;
  const int64_t step_size = int64_t{gridDim.x} * blockDim.x;
  for (int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < total; n += step_size) {
    const int lane = n % 32, j = n / 32 % N, step = n / 32 / N % steps, g = n / 32 / N / steps;
    uint32_t words[2][P::terms];
    for (int r = 0; r < 2; ++r) {
      const int word = step * 8 + lane % 4 + 4 * r, row = word / per_row;
      const int dx = (word - row * per_row) * P::elements, c = row / l.s, dy = row - c * l.s;
      const int tap = 8 * j + lane / 4;
      P::split(parameter<P>(weight, strides, l, g, tap, c, dy, dx),
               parameter<P>(weight, strides, l, g, tap, c, dy, dx + 1), words[r]);
    }
    for (int term = 0; term < P::terms; ++term)
      out_weight[(n / 32 * P::terms + term) * 32 + lane] = {words[0][term], words[1][term]};
  }
  const int columns = 8 * N;
  for (int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < l.G * columns;
       n += step_size) {
    const int tap = n % columns, g = n / columns;
    out_bias[n] = bias != nullptr && tap < l.taps
                      ? widen<float>(bias[(int64_t{tap} * l.G + g) * bias_stride])
                      : 0.0f;
  }
}

// N for a kernel size.
template <int k>
constexpr int columns_of = k == 3   ? 2
                           : k == 5 ? 4
                                    : 8;

// Packs the parameters into `memory`, which must live until the kernels that read it are queued.
template <typename P>
Parameters<P> arrange_parameters(const Tensor& weight, const std::optional<Tensor>& bias,
                                 const Layer& l, int N, Tensor& memory, cudaStream_t stream) {
  using T = typename P::T;
  const int steps = depth_steps<P>(l);
  const int64_t fragments = int64_t{l.G} * steps * N * P::terms * 32;
  memory = scratch(weight, 2 * fragments + int64_t{l.G} * 8 * N);
  auto* out_weight = static_cast<uint2*>(memory.mutable_data_ptr());
  auto* out_bias = reinterpret_cast<float*>(out_weight + fragments);
  const int64_t threads = int64_t{l.G} * steps * N * 32;
  arrange<P><<<blocks_for(threads), kThreads, 0, stream>>>(
      static_cast<const T*>(weight.const_data_ptr()), image_strides(weight),
      bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr, bias ? bias->stride(0) : 0, l,
      N, out_weight, out_bias);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {out_weight, out_bias, steps, N};
}

// Loads the lane's words of B; `fragments` already points at them.
template <typename P>
__device__ __forceinline__ typename P::B load_b(const uint2* fragments) {
  typename P::B b;
#pragma unroll
  for (int term = 0; term < P::terms; ++term) {
    const uint2 words = __ldg(fragments + term * 32);
    b.w[term][0] = words.x, b.w[term][1] = words.y;
  }
  return b;
}

// Computes the weights of M tiles of 16 pixels of a row. `at` is the corner of the window of the
// lane's first pixel. The lane gets taps 8j + 2t and 8j + 2t + 1 of its two pixels of each tile.
template <typename P, int N, int M>
__device__ __forceinline__ void generate(float (&out)[M][N][4], const uint32_t* at,
                                         const int* offsets, int plane, const uint2* fragments,
                                         const float* bias, int steps) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  fragments += lane;
  offsets += t;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float2 both = __ldg(reinterpret_cast<const float2*>(bias + 8 * j + 2 * t));
#pragma unroll
    for (int m = 0; m < M; ++m)
      out[m][j][0] = out[m][j][2] = both.x, out[m][j][1] = out[m][j][3] = both.y;
  }
  const auto add = [&](auto guarded) {
    const int o0 = offsets[0], o1 = offsets[4];
    typename P::B b[N];
#pragma unroll
    for (int j = 0; j < N; ++j) b[j] = load_b<P>(fragments + j * P::terms * 32);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const auto a = P::template load<guarded.value>(at + 16 * m, o0, o1, plane);
#pragma unroll
      for (int j = 0; j < N; ++j) P::multiply(out[m][j], a, b[j]);
    }
    offsets += 8, fragments += N * P::terms * 32;
  };
#pragma unroll(M == 1 ? 2 : 1)
  for (int step = 0; step + 1 < steps; ++step) add(std::false_type{});
  add(std::true_type{});  // only the last step may run past the depth
}

}  // namespace hoconv::high_order::layer::sm80
