// The types and block-wide reductions that generated CUDA kernels call. NVRTC compiles this file at
// run time, without any header of a CUDA toolkit or a C++ library.
#pragma once

using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

#include "recurrent/math.h"

namespace hoconv::recurrent {

// 16-bit types that only load, store and convert, rounding to nearest even; arithmetic is in float.
struct BFloat16 {
  static constexpr bool IS_BFLOAT16 = true;
  unsigned short bits;
  BFloat16() = default;
  __device__ explicit BFloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ explicit operator float() const { return __uint_as_float(uint32_t{bits} << 16); }
};

struct Half {
  static constexpr bool IS_BFLOAT16 = false;
  unsigned short bits;
  Half() = default;
  __device__ explicit Half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ explicit operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};

constexpr int64_t WARP = 32;

// Reduces a value over the lanes of a warp, or over each LANES neighbours of them, a power of two.
// All lanes of the warp call it and get the result, in the same bits in every run.
template <int LANES = WARP, typename A, typename F>
__device__ A warp_reduce(A value, F combine) {
  for (int lanes = LANES / 2; lanes > 0; lanes /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  return value;
}

// Reduces each of N values over the threads of the block. All threads call it and get the result,
// in the same bits in every run: lanes, then warps, in a fixed order. The block is a whole number
// of warps.
template <typename A, int N, typename F>
__device__ void block_reduce(A (&values)[N], A neutral, F combine) {
  __shared__ A warps[N][32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int lanes = 16; lanes > 0; lanes /= 2)
    for (int n = 0; n < N; ++n)
      values[n] = combine(values[n], __shfl_xor_sync(0xffffffffu, values[n], lanes));
  if (blockDim.x == 32) return;
  if (lane == 0)
    for (int n = 0; n < N; ++n) warps[n][warp] = values[n];
  __syncthreads();
  for (int n = 0; n < N; ++n) values[n] = lane < blockDim.x / 32 ? warps[n][lane] : neutral;
  for (int lanes = 16; lanes > 0; lanes /= 2)
    for (int n = 0; n < N; ++n)
      values[n] = combine(values[n], __shfl_xor_sync(0xffffffffu, values[n], lanes));
  __syncthreads();  // until `warps` is read, since the next call writes it
}

template <typename A, typename... Rest>
__device__ void block_sum(A& first, Rest&... rest) {
  A values[]{first, rest...};
  block_reduce(values, A(0), [](A a, A b) { return a + b; });
  int n = 0;
  first = values[n];
  ((rest = values[++n]), ...);
}
template <typename A, typename... Rest>
__device__ void block_max(A& first, Rest&... rest) {
  A values[]{first, rest...};
  block_reduce(values, -infinity<A>(), [](A a, A b) { return maximum(a, b); });
  int n = 0;
  first = values[n];
  ((rest = values[++n]), ...);
}

}  // namespace hoconv::recurrent
