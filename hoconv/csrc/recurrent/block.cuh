// What generated CUDA kernels call: types, and sums over the threads of a block. Compiled by nvcc,
// or at run time by NVRTC, which has no C++ library.
#pragma once

#if defined(__CUDACC_RTC__)
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "recurrent/math.h"

namespace hoconv::recurrent {

using BFloat16 = __nv_bfloat16;
using Half = __half;

// The same in every thread of the block, and the same bits every time: lanes, then warps, in a
// fixed order. All threads call it; the block is a whole number of warps.
template <typename A, typename F>
__device__ A block_reduce(A value, A neutral, F combine) {
  __shared__ A warps[32];
  for (int lanes = 16; lanes > 0; lanes /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  const unsigned lane = threadIdx.x % 32;
  A total = lane < blockDim.x / 32 ? warps[lane] : neutral;
  for (int lanes = 16; lanes > 0; lanes /= 2)
    total = combine(total, __shfl_xor_sync(0xffffffffu, total, lanes));
  __syncthreads();  // `warps` may be written again
  return total;
}

template <typename A>
__device__ A block_sum(A value) {
  return block_reduce(value, A(0), [](A a, A b) { return a + b; });
}
template <typename A>
__device__ A block_max(A value) {
  return block_reduce(value, lowest<A>(), [](A a, A b) { return maximum(a, b); });
}

}  // namespace hoconv::recurrent
