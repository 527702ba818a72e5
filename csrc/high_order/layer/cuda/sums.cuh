// Adds up the partial sums that the blocks of a backward kernel leave of the gradients of the
// generator's parameters: in double, and in the same order every time.
#pragma once

#include <cstdint>

namespace hoconv::high_order::layer {

constexpr int kSumColumns = 32, kSumParts = 8;  // threads of a block: kSumParts for each sum

// The grid and the block of a kernel that computes `sums` sums.
inline int64_t sum_blocks(int64_t sums) { return (sums + kSumColumns - 1) / kSumColumns; }
inline dim3 sum_threads() { return dim3(kSumColumns, kSumParts); }

// Sets `sum` to part(0) + ... + part(parts - 1) and returns true in the thread of the column that
// is to write it; returns false in all others, and in all unless `exists`. All threads of the block
// call it.
template <typename Part>
__device__ __forceinline__ bool sum_parts(int parts, bool exists, const Part& part, double& sum) {
  __shared__ double shared[kSumParts][kSumColumns];
  sum = 0;
  if (exists)
    for (int n = threadIdx.y; n < parts; n += kSumParts) sum += part(n);
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y || !exists) return false;
  for (int n = 1; n < kSumParts; ++n) sum += shared[n][threadIdx.x];
  return true;
}

}  // namespace hoconv::high_order::layer
