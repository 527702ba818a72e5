// Adds up the partial sums that the blocks of a backward kernel leave of the gradients of the
// generator's parameters: in double, and in the same order every time.
#pragma once

#include <cstdint>

namespace hoconv::high_order::layer {

constexpr int kSumColumns = 32, kSumParts = 8;  // threads of a block: kSumParts for each sum

// The grid and the block of a kernel that computes `sums` sums.
inline int64_t sum_blocks(int64_t sums) { return (sums + kSumColumns - 1) / kSumColumns; }
inline dim3 sum_threads() { return dim3(kSumColumns, kSumParts); }

// The sum that the threads of a column compute.
__device__ __forceinline__ int64_t sum_index() {
  return int64_t{blockIdx.x} * kSumColumns + threadIdx.x;
}

// Returns part(0) + ... + part(parts - 1) in thread 0 of the column, or 0 unless `exists`. All
// threads of the block call it.
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
