// Adds up the sums that blocks of a backward kernel left of the gradients of the generator's
// parameters: in double, and in the same order every time.
#pragma once

#include <cstdint>

namespace hoconv::high_order::layer {

constexpr int kSumColumns = 32, kSumParts = 8;  // threads of a block: sums side by side, parts each

// The blocks of a kernel that makes `sums` of them.
inline int64_t sum_blocks(int64_t sums) { return (sums + kSumColumns - 1) / kSumColumns; }
inline dim3 sum_threads() { return dim3(kSumColumns, kSumParts); }

// Which sum the threads of a column make.
__device__ __forceinline__ int64_t sum_index() {
  return int64_t{blockIdx.x} * kSumColumns + threadIdx.x;
}

// The sum over part(0) to part(parts - 1); zero unless `exists`. Thread 0 of the column has it.
template <typename Part>
__device__ __forceinline__ double sum_parts(int parts, bool exists, const Part& part) {
  __shared__ double shared[kSumParts][kSumColumns];
  double sum = 0;
  if (exists)
    for (int n = threadIdx.y; n < parts; n += kSumParts) sum += part(n);
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y || !exists) return 0;
  for (int n = 1; n < kSumParts; ++n) sum += shared[n][threadIdx.x];
  return sum;
}

}  // namespace hoconv::high_order::layer
