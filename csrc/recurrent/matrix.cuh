// Steps whose states are matrices of independent columns, for generated CUDA kernels. A block has
// some columns of a matrix, its slab. A warp has whole columns; LANES of its lanes divide the KEYS
// of a column among them. A thread has a tile of ROWS keys and COLUMNS columns in registers: it
// takes all steps, and waits for other lanes of its warp only.
#pragma once

#include "recurrent/block.cuh"

namespace hoconv::recurrent {

// Numbers that a thread reads at once, or 16 bytes of them.
template <typename A, int N>
struct alignas(sizeof(A) * N < 16 ? sizeof(A) * N : 16) Neighbours {
  A values[N];
};

// The place of a thread in its slab, which has `width` columns. A vector of keys in memory is
// divided so that lanes read VECTOR neighbours each. FULL: no thread has less than its tile.
template <int KEYS, int LANES, int ROWS, int VECTOR, int COLUMNS, bool FULL>
struct Place {
  int lane, warp, key_lane, first, width;

  __device__ explicit Place(int width) : width(width) {
    lane = threadIdx.x % 32, warp = threadIdx.x / 32, key_lane = lane % LANES;
    first = (warp * (32 / LANES) + lane / LANES) * COLUMNS;
  }
  __device__ __forceinline__ int row(int r) const {
    return (r / VECTOR * LANES + key_lane) * VECTOR + r % VECTOR;
  }
  __device__ __forceinline__ bool has_row(int r) const {
    return KEYS == LANES * ROWS || row(r) < KEYS;
  }
  __device__ __forceinline__ bool has_column(int c) const { return FULL || first + c < width; }

  // The thread's part of a vector of keys.
  template <typename A>
  __device__ __forceinline__ void read_rows(A (&rows)[ROWS], const A* from) const {
#pragma unroll
    for (int j = 0; j < ROWS / VECTOR; ++j) {
      const auto some = reinterpret_cast<const Neighbours<A, VECTOR>*>(from)[j * LANES + key_lane];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) rows[j * VECTOR + i] = some.values[i];
    }
  }

  // The sum of a function of the thread's keys, by four sums that need not wait for each other.
  template <typename A, typename F>
  __device__ __forceinline__ A add_rows(F of) const {
    A sums[4] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      if (has_row(r)) sums[r % 4] += of(r);
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
  // The sum of a function of the thread's columns.
  template <typename A, typename F>
  __device__ __forceinline__ A add_columns(F of) const {
    A sum = 0;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
      if (has_column(c)) sum += of(c);
    return sum;
  }

  // Sums each of N values over the lanes that divide the keys of a column; all of them get it.
  template <typename A, int N>
  __device__ __forceinline__ void sum_over_keys(A (&values)[N]) const {
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2)
#pragma unroll
      for (int n = 0; n < N; ++n) values[n] += __shfl_xor_sync(0xffffffffu, values[n], lanes);
  }
  template <typename A>
  __device__ __forceinline__ A sum_over_keys(A value) const {
    A values[1] = {value};
    sum_over_keys(values);
    return values[0];
  }
  // Writes the sums of vectors of keys over the columns of the warp.
  template <typename A>
  __device__ __forceinline__ void write_rows(A* to, A (&rows)[ROWS]) const {
    divide_rows<LANES>(to, rows, 0, true);
  }
  // Writes the sum of a number over the columns of the warp.
  template <typename A>
  __device__ __forceinline__ void write(A* to, A value) const {
#pragma unroll
    for (int lanes = LANES; lanes < 32; lanes *= 2)
      value += __shfl_xor_sync(0xffffffffu, value, lanes);
    if (lane == 0) *to = value;
  }

  // The sums over all columns of the block, of which all threads get those of their rows. It has
  // WARPS parts of PITCH numbers in shared memory. They are read until the call after the next one
  // writes them: two calls that follow each other have other memory.
  template <int WARPS, int PITCH, typename A>
  __device__ __forceinline__ void share_rows(A* shared, A (&rows)[ROWS]) const {
    write_rows(shared + warp * PITCH, rows);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; ++r) rows[r] = 0;
    for (int w = 0; w < WARPS; ++w) {
      A part[ROWS];
      read_rows(part, shared + w * PITCH);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) rows[r] += part[r];
    }
  }
  template <int WARPS, typename A>
  __device__ __forceinline__ A share(A* shared, A value) const {
    write(shared + warp, value);
    __syncthreads();
    value = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) value += shared[w];
    return value;
  }

 private:
  // Sums each of N values, those of the thread's rows from `begin` on, over lanes that are BIT or
  // more apart, and writes them. Of two such lanes each sums half of the values, where their number
  // is even; else only one of them `writes`.
  template <int BIT, typename A, int N>
  __device__ __forceinline__ void divide_rows(A* to, const A (&rows)[N], int begin,
                                              bool writes) const {
    if constexpr (BIT == 32) {
#pragma unroll
      for (int r = 0; r < N; ++r)
        if (writes && has_row(begin + r)) to[row(begin + r)] = rows[r];
    } else if constexpr (N % 2 == 0) {
      const bool upper = lane & BIT;
      A half[N / 2];
#pragma unroll
      for (int r = 0; r < N / 2; ++r) {
        const A other = upper ? rows[r] : rows[r + N / 2];
        half[r] = (upper ? rows[r + N / 2] : rows[r]) + __shfl_xor_sync(0xffffffffu, other, BIT);
      }
      divide_rows<BIT * 2>(to, half, begin + upper * (N / 2), writes);
    } else {
      A sums[N];
#pragma unroll
      for (int r = 0; r < N; ++r) sums[r] = rows[r] + __shfl_xor_sync(0xffffffffu, rows[r], BIT);
      divide_rows<BIT * 2>(to, sums, begin, writes && !(lane & BIT));
    }
  }
};

// What the steps of a round read of a sequence, COUNT features of each step. A round ahead a block
// loads it to registers, from where it goes to shared memory.
template <typename From, typename To, int STEPS, int COUNT, int PITCH, int THREADS>
struct Staged {
  static constexpr int EACH = (STEPS * COUNT + THREADS - 1) / THREADS;
  From coming[EACH];

  // Loads `steps` steps. `from` is the first feature of the first step; a step lies `step` features
  // from the one before, a feature `apart`; `count` of them are there.
  __device__ __forceinline__ void load(const From* from, int64_t step, int64_t apart, int steps,
                                       int count) {
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int at = j * THREADS + threadIdx.x, d = at / COUNT, i = at % COUNT;
      if (d < steps && i < count) coming[j] = from[d * step + i * apart];
    }
  }
  __device__ __forceinline__ void store(To* to) const {
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int at = j * THREADS + threadIdx.x, d = at / COUNT, i = at % COUNT;
      if (d < STEPS) to[d * PITCH + i] = To(coming[j]);
    }
  }
};

// Stores numbers where the same thread, and no other, gets them from.
template <int THREADS, typename A, int N>
__device__ __forceinline__ void put_own(A* to, const A (&numbers)[N]) {
  constexpr int VECTOR = N % (16 / sizeof(A)) == 0 ? 16 / sizeof(A) : 1;
#pragma unroll
  for (int j = 0; j < N / VECTOR; ++j) {
    Neighbours<A, VECTOR> some;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) some.values[i] = numbers[j * VECTOR + i];
    reinterpret_cast<Neighbours<A, VECTOR>*>(to)[j * THREADS + threadIdx.x] = some;
  }
}
template <int THREADS, typename A, int N>
__device__ __forceinline__ void get_own(const A* from, A (&numbers)[N]) {
  constexpr int VECTOR = N % (16 / sizeof(A)) == 0 ? 16 / sizeof(A) : 1;
#pragma unroll
  for (int j = 0; j < N / VECTOR; ++j) {
    const auto some =
        reinterpret_cast<const Neighbours<A, VECTOR>*>(from)[j * THREADS + threadIdx.x];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) numbers[j * VECTOR + i] = some.values[i];
  }
}

// Writes sums over the columns of a block, given those of its warps: of COUNT features of `steps`
// steps. `to` is as `from` of Staged::load.
template <typename A, int COUNT, int PITCH, int WARPS, int THREADS>
__device__ __forceinline__ void write_sums(A* to, int64_t step, int64_t apart, int steps,
                                           const A* shared) {
  for (int at = threadIdx.x; at < steps * COUNT; at += THREADS) {
    const int d = at / COUNT, i = at % COUNT;
    A sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += shared[(d * WARPS + w) * PITCH + i];
    to[d * step + i * apart] = sum;
  }
}

}  // namespace hoconv::recurrent
