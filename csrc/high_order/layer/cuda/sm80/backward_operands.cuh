// Operands of the backward kernel's products on tensor cores: the transposed parameters of the
// generator; and dW, the gradient of the weights, once with taps and once with pixels as the depth.
//
// C channels, S kernel size of the generator, N = columns / 8 of the product that generates the
// weights, Q channels a chunk.
#pragma once

#include "high_order/layer/cuda/sm80/backward_strips.cuh"

namespace hoconv::high_order::layer::sm80 {

// The parameters as the right operand of dW times parameters. The depth of a step is taps; the
// columns are (c, dx) of a chunk, for every dy.
template <typename P, int N, int S, int Q>
struct Transposed {
  static constexpr int steps = N / P::elements;
  static constexpr int columns = (Q * S + 7) / 8;
  static constexpr int64_t chunk = int64_t{steps} * S * columns * P::terms * 32;
};

template <typename P, int N, int S, int Q>
__global__ void arrange_transposed(const typename P::T* weight, ImageStrides strides, Layer l,
                                   int chunks, uint2* out) {
  using Order = Transposed<P, N, S, Q>;
  const int64_t total = Order::chunk / P::terms * chunks * l.G;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < total; n += stride) {
    int64_t rest = n / 32;
    const int lane = n % 32, column = rest % Order::columns;
    rest /= Order::columns;
    const int dy = rest % S;
    rest /= S;
    const int step = rest % Order::steps;
    rest /= Order::steps;
    const int chunk = rest % chunks, g = rest / chunks;
    const int at = column * 8 + lane / 4, c = chunk * Q + at / S, dx = at % S;
    const bool exists = at < Q * S;
    uint32_t words[2][P::terms];
    for (int r = 0; r < 2; ++r) {
      // In 16 bits, word t of a step is taps 2t and 2t + 1. In floats, word t is tap 2t and word t
      // + 4 is tap 2t + 1.
      const int first =
          P::elements == 2 ? 16 * step + 8 * r + 2 * (lane % 4) : 8 * step + 2 * (lane % 4) + r;
      const float low = exists ? parameter<P>(weight, strides, l, g, first, c, dy, dx) : 0.0f;
      const float high = exists ? parameter<P>(weight, strides, l, g, first + 1, c, dy, dx) : 0.0f;
      P::split(low, high, words[r]);
    }
    for (int term = 0; term < P::terms; ++term)
      out[(n / 32 * P::terms + term) * 32 + lane] = {words[0][term], words[1][term]};
  }
}

// dW as the left operand of a product whose depth is taps.
template <typename P, int N>
__device__ __forceinline__ typename P::A taps_operand(const float (&w)[N][4], int step) {
  typename P::A a;
  uint32_t words[4][P::terms];
  if constexpr (P::elements == 2) {
    P::split(w[2 * step][0], w[2 * step][1], words[0]);
    P::split(w[2 * step][2], w[2 * step][3], words[1]);
    P::split(w[2 * step + 1][0], w[2 * step + 1][1], words[2]);
    P::split(w[2 * step + 1][2], w[2 * step + 1][3], words[3]);
  } else {
    P::split(w[step][0], 0, words[0]);
    P::split(w[step][2], 0, words[1]);
    P::split(w[step][1], 0, words[2]);
    P::split(w[step][3], 0, words[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int term = 0; term < P::terms; ++term) a.w[term][i] = words[i][term];
  return a;
}

// Loads taps 8j to 8j + 7 of staged dW as the right operand of a product whose depth is pixels.
template <typename P, int N>
__device__ __forceinline__ typename P::B pixels_operand(const uint32_t* staged, int step, int j) {
  constexpr int pitch = BackwardShared<P, N, 1>::staged_words();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  typename P::B b;
  if constexpr (P::elements == 2) {
    const uint32_t* row = staged + (lane % 16) * pitch + 4 * j;
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(b.w[0][0]), "=r"(b.w[0][1])
                 : "r"(address)
                 : "memory");
  } else {
    uint32_t words[2][P::terms];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      P::split(__uint_as_float(staged[(8 * step + t + 4 * r) * pitch + 8 * j + g]), 0, words[r]);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int term = 0; term < P::terms; ++term) b.w[term][r] = words[r][term];
  }
  return b;
}

}  // namespace hoconv::high_order::layer::sm80
