// Products without tensor cores, in float32 and float64.
#pragma once

#include "recurrent/cluster/exchange.cuh"

namespace hoconv::recurrent {

// Loads four columns from k on of a row of the weights; as load_slices of product.cuh, no part of
// its caller.
template <typename A, typename K>
__device__ __noinline__ Vector<A, 4> load_four(const A* row, int64_t column_stride, K column,
                                               int k) {
  Vector<A, 4> four;
#pragma unroll
  for (int z = 0; z < 4; ++z) {
    const int at = column(k + z);
    four.of[z] = row && at >= 0 ? row[at * column_stride] : A(0);
  }
  return four;
}

// Adds up sums over SPLIT neighbouring lanes, each of which keeps its share of the totals: those
// from a lane's first on, which this returns, that many less a SPLITth.
template <int SPLIT, int COUNT, typename A>
__device__ __forceinline__ int add_shares(A (&sums)[COUNT]) {
  static_assert(COUNT % SPLIT == 0);
  int first = 0;
  if constexpr (SPLIT > 1) {
    constexpr int HALF = COUNT / 2;
    const bool upper = threadIdx.x & SPLIT / 2;
    A kept[HALF];
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const A given = upper ? sums[i] : sums[i + HALF];
      kept[i] = (upper ? sums[i + HALF] : sums[i]) + __shfl_xor_sync(~0u, given, SPLIT / 2);
    }
    first = upper * HALF + add_shares<SPLIT / 2>(kept);
#pragma unroll
    for (int i = 0; i < COUNT / SPLIT; ++i) sums[i] = kept[i];
  }
  return first;
}

// The same without tensor cores, in float32 or float64: SPLIT lanes share EACH rows of the weights
// and add up at the end, so that y is (ROWS, stride). They take turns with 4 columns; HELD turns
// are in registers, KEPT in shared memory. x has BATCH rows at a time.
template <typename A, int M, int K, int ROWS, int THREADS, int SPLIT, int HELD, int KEPT, int BATCH>
struct PlainProduct {
  using Four = Vector<A, 4>;
  static constexpr int GROUPS = THREADS / SPLIT, EACH = (M + GROUPS - 1) / GROUPS;
  static constexpr int TURNS = K / 4 / SPLIT;
  Four held[EACH][HELD > 0 ? HELD : 1];

  template <typename R, typename K_>
  __device__ __forceinline__ void load(const A* weights, int64_t row_stride, int64_t column_stride,
                                       R row, K_ column, uint4* rest, uint4* far) {
    const int first = threadIdx.x / SPLIT * EACH, part = threadIdx.x % SPLIT;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int found = first + e < M ? row(first + e) : -1;
      const A* const from = found < 0 ? nullptr : weights + found * row_stride;
#pragma unroll
      for (int s = 0; s < HELD; ++s)
        held[e][s] = load_four(from, column_stride, column, (s * SPLIT + part) * 4);
#pragma unroll 1
      for (int s = HELD; s < TURNS; ++s)
        *at(rest, far, e, s) = load_four(from, column_stride, column, (s * SPLIT + part) * 4);
    }
  }

  template <int Y_STRIDE>
  __device__ __forceinline__ void multiply(const A* x, A* y, uint4* rest, uint4* far) const {
    constexpr int SUMS = (EACH * BATCH + SPLIT - 1) / SPLIT;  // of a lane, in the end
    const int group = threadIdx.x / SPLIT, part = threadIdx.x % SPLIT;
#pragma unroll
    for (int begin = 0; begin < ROWS; begin += BATCH) {
      A sums[SUMS * SPLIT] = {};
      const auto turn = [&](const Four(&w)[EACH], int s) {
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
          const int row = begin + n < ROWS ? begin + n : ROWS - 1;
          const A* from = x + Panels<A, ROWS>::at(row, (s * SPLIT + part) * 4);
          const Four v = *reinterpret_cast<const Four*>(from);
#pragma unroll
          for (int e = 0; e < EACH; ++e)
#pragma unroll
            for (int z = 0; z < 4; ++z) sums[n * EACH + e] += w[e].of[z] * v.of[z];
        }
      };
      Four w[EACH];
#pragma unroll
      for (int s = 0; s < HELD; ++s) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) w[e] = held[e][s];
        turn(w, s);
      }
#pragma unroll 4
      for (int s = HELD; s < HELD + KEPT; ++s) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) w[e] = *at(rest, nullptr, e, s);
        turn(w, s);
      }
#pragma unroll 4
      for (int s = HELD + KEPT; s < TURNS; ++s) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) w[e] = *at(nullptr, far, e, s);
        turn(w, s);
      }
      const int first = add_shares<SPLIT>(sums);
#pragma unroll
      for (int i = 0; i < SUMS; ++i) {
        const int n = begin + (first + i) / EACH, m = group * EACH + (first + i) % EACH;
        if (first + i < EACH * BATCH && n < ROWS && m < M) y[n * Y_STRIDE + m] = sums[i];
      }
    }
  }

  // Where a thread's part of a turn past HELD is.
  static __device__ __forceinline__ Four* at(uint4* rest, uint4* far, int e, int s) {
    const int turn = s - HELD - (s < HELD + KEPT ? 0 : KEPT);
    Four* const from = reinterpret_cast<Four*>(s < HELD + KEPT ? rest : far);
    return from + (turn * EACH + e) * THREADS + threadIdx.x;
  }
};

}  // namespace hoconv::recurrent
