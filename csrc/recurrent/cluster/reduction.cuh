// Reductions over the features of a row, which the blocks of a cluster share.
#pragma once

#include "recurrent/cluster/exchange.cuh"

namespace hoconv::recurrent {

// Rounds in which threads reduce all rows of all vectors: LANES lanes each.
template <int THREADS, int JOBS, int LANES>
constexpr int ROUNDS = (JOBS * LANES + THREADS - 1) / THREADS;

// Combines what LANES neighbouring lanes have, in a fixed order; each gets the result.
template <int LANES, typename A, typename F>
__device__ __forceinline__ A reduce_lanes(A value, F combine) {
#pragma unroll
  for (int lanes = LANES / 2; lanes > 0; lanes /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  return value;
}

// Reduces `columns` numbers, UNITS in most blocks, of each row of each vector, (N, ROWS, UNITS +
// LANES), and writes the result to (ROWS, STRIDE), that of vector n to column n.
template <int THREADS, int ROWS, int N, int LANES, int STRIDE, int UNITS, typename A, typename F>
__device__ __forceinline__ void reduce_rows(const A* from, int columns, A* to, A neutral,
                                            F combine) {
#pragma unroll
  for (int round = 0; round < ROUNDS<THREADS, N * ROWS, LANES>; ++round) {
    const int at = round * THREADS + threadIdx.x, job = min(at / LANES, N * ROWS - 1);
    A value = neutral;
#pragma unroll
    for (int first = 0; first < UNITS; first += LANES)
      if (const int column = first + at % LANES; column < columns)
        value = combine(value, from[job * (UNITS + LANES) + column]);
    value = reduce_lanes<LANES>(value, combine);
    if (at % LANES == 0 && at / LANES < N * ROWS) to[job % ROWS * STRIDE + job / ROWS] = value;
  }
}

// The same for the sum of the numbers, column 2 n, and for their spread, column 2 n + 1: the sum of
// the squares of what they deviate from their mean.
template <int THREADS, int ROWS, int N, int LANES, int STRIDE, int UNITS, typename A>
__device__ __forceinline__ void spread_rows(const A* from, int columns, A* to) {
  const auto add = [](A a, A b) { return a + b; };
#pragma unroll
  for (int round = 0; round < ROUNDS<THREADS, N * ROWS, LANES>; ++round) {
    const int at = round * THREADS + threadIdx.x, job = min(at / LANES, N * ROWS - 1);
    A sum = 0, spread = 0;
    A values[UNITS / LANES];
#pragma unroll
    for (int z = 0; z < UNITS / LANES; ++z) {
      const int column = z * LANES + at % LANES;
      values[z] = from[job * (UNITS + LANES) + column];
      if (column < columns) sum += values[z];
    }
    sum = reduce_lanes<LANES>(sum, add);
    const A mean = sum / A(max(columns, 1));
#pragma unroll
    for (int z = 0; z < UNITS / LANES; ++z) {
      const A deviation = values[z] - mean;
      if (z * LANES + at % LANES < columns) spread += deviation * deviation;
    }
    spread = reduce_lanes<LANES>(spread, add);
    if (at % LANES == 0 && at / LANES < N * ROWS) {
      A* const place = to + job % ROWS * STRIDE + job / ROWS * 2;
      place[0] = sum, place[1] = spread;
    }
  }
}

// Combines what the C blocks have reduced rows of N vectors to, (C, ROWS, STRIDE), and writes it to
// (ROWS, STRIDE).
template <int C, int THREADS, int ROWS, int N, int LANES, int STRIDE, typename A, typename F>
__device__ __forceinline__ void combine_rows(const A* from, A* to, A neutral, F combine) {
#pragma unroll
  for (int round = 0; round < ROUNDS<THREADS, N * ROWS, LANES>; ++round) {
    const int at = round * THREADS + threadIdx.x, job = min(at / LANES, N * ROWS - 1);
    const int place = job / N * STRIDE + job % N;
    A value = neutral;
    for (int k = at % LANES; k < C; k += LANES)
      value = combine(value, from[k * ROWS * STRIDE + place]);
    value = reduce_lanes<LANES>(value, combine);
    if (at % LANES == 0 && at / LANES < N * ROWS) to[place] = value;
  }
}

// The same of sums and spreads; a block has UNITS of SIZE features, the last ones fewer.
template <int C, int THREADS, int ROWS, int N, int LANES, int STRIDE, int UNITS, int SIZE,
          typename A>
__device__ __forceinline__ void combine_spreads(const A* from, A* to) {
  const auto add = [](A a, A b) { return a + b; };
#pragma unroll
  for (int round = 0; round < ROUNDS<THREADS, N * ROWS, LANES>; ++round) {
    const int at = round * THREADS + threadIdx.x, job = min(at / LANES, N * ROWS - 1);
    const int place = job / N * STRIDE + job % N * 2;
    A sum = 0, spread = 0;
    for (int k = at % LANES; k < C; k += LANES) sum += from[k * ROWS * STRIDE + place];
    sum = reduce_lanes<LANES>(sum, add);
    for (int k = at % LANES; k < C; k += LANES) {
      const A* own = from + k * ROWS * STRIDE + place;
      const int count = C * UNITS == SIZE ? UNITS : max(min(UNITS, SIZE - k * UNITS), 0);
      spread += combine_spread(own[1], own[0], count, sum, SIZE);
    }
    spread = reduce_lanes<LANES>(spread, add);
    if (at % LANES == 0 && at / LANES < N * ROWS) to[place] = sum, to[place + 1] = spread;
  }
}

}  // namespace hoconv::recurrent
