// Products of matrices in shared memory, and of states, by tensor cores.
#pragma once

#include "recurrent/chunks/rows.cuh"

namespace hoconv::recurrent {

// Operands of products, in TF32: what a lane has of 16 rows of the left one, or of N tiles of 8
// columns of the right one, and of 16 of the depth from `at` on. Lane 4 g + k has rows g and g + 8,
// column 8 n + g of tile n, and numbers k, k + 4, k + 8 and k + 12 of the depth. Where the tiles
// are wide, column N g + n is in tile n, so that a lane reads and writes neighbours.
__device__ __forceinline__ int lane_row() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int lane_depth() { return threadIdx.x % 4; }

// A matrix in shared memory that has a row for each row, or column, of the product.
struct Along {
  const float* x;
  int pitch;
  __device__ __forceinline__ void left(uint32_t (&a)[2][4], int row, int at) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 2; ++k)
      load_tiles(a[k], x + (row + lane % 16) * pitch + at + 8 * k + lane / 16 * 4);
  }
  static __device__ __forceinline__ bool skips(int, int) { return false; }
  template <int N>
  __device__ __forceinline__ void right(uint32_t (&b)[N][4], int column, int at) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N; ++n)
      load_tiles(b[n], x + (column + 8 * n + lane % 8) * pitch + at + lane / 8 * 4);
  }
};

// Its triangle left of the diagonal, or UPPER: right of it, with the diagonal. What is elsewhere
// counts as zero.
template <bool UPPER>
struct Triangle : Along {
  static __device__ __forceinline__ bool skips(int row, int at) {
    return UPPER ? at < row : at > row;
  }
  __device__ __forceinline__ void left(uint32_t (&a)[2][4], int row, int at) const {
    Along::left(a, row, at);
    if (at != row) return;
#pragma unroll
    for (int z = 0; z < 8; ++z) {
      const int i = lane_row() + z % 2 * 8, j = lane_depth() + z / 2 * 4;
      if (UPPER ? j < i : j > i) a[z / 4][z % 4] = 0;
    }
  }
};

// One that has a row for each number of the depth.
struct Across {
  const float* x;
  int pitch;
  __device__ __forceinline__ void left(uint32_t (&a)[2][4], int row, int at) const {
#pragma unroll
    for (int z = 0; z < 8; ++z)
      a[z / 4][z % 4] =
          as_bits(x[(at + lane_depth() + z / 2 * 4) * pitch + row + lane_row() + z % 2 * 8]);
  }
  static __device__ __forceinline__ bool skips(int, int) { return false; }
  template <int N>
  __device__ __forceinline__ void right(uint32_t (&b)[N][4], int column, int at) const {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int z = 0; z < 4; ++z)
        b[n][z] = as_bits(x[(at + lane_depth() + 4 * z) * pitch + column + 8 * n + lane_row()]);
  }
};

// The same of wide tiles.
struct WideAcross {
  const float* x;
  int pitch;
  template <int N>
  __device__ __forceinline__ void right(uint32_t (&b)[N][4], int column, int at) const {
#pragma unroll
    for (int z = 0; z < 4; ++z) {
      float numbers[N];
      load(numbers, x + (at + lane_depth() + 4 * z) * pitch + column + N * lane_row());
#pragma unroll
      for (int n = 0; n < N; ++n) b[n][z] = as_bits(numbers[n]);
    }
  }
};

// A state whose keys are the depth, of wide tiles.
template <int KEYS, int COLUMNS, typename Call>
struct DeepKeys : State<KEYS, COLUMNS, Call> {
  template <int N>
  __device__ __forceinline__ void right(uint32_t (&b)[N][4], int column, int at) const {
#pragma unroll
    for (int z = 0; z < 4; ++z) {
      float numbers[N];
      this->read(numbers, at + lane_depth() + 4 * z, column + N * lane_row());
#pragma unroll
      for (int n = 0; n < N; ++n) b[n][z] = round_to_tf32(numbers[n]);
    }
  }
};

// Adds the products of 16 numbers of the depth to M x N tiles of 16 x 8 sums.
template <int M, int N, typename Left>
__device__ __forceinline__ void add_products(float (&sums)[M][N][4], int row, int at, Left left,
                                             const uint32_t (&b)[N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
    if (left.skips(row + 16 * m, at)) continue;
    uint32_t a[2][4];
    left.left(a, row + 16 * m, at);
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int n = 0; n < N; ++n) multiply_tile(sums[m][n], a[k], {b[n][2 * k], b[n][2 * k + 1]});
  }
}
// Adds those of all the depth.
template <int M, int N, typename Left, typename Right>
__device__ __forceinline__ void add_products(float (&sums)[M][N][4], int row, int column, int begin,
                                             int depth, Left left, Right right) {
#pragma unroll 4
  for (int at = begin; at < begin + depth; at += 16) {
    uint32_t b[N][4];
    right.right(b, column, at);
    add_products(sums, row, at, left, b);
  }
}

// Calls f(row, column, numbers) for the sums of a lane in wide tiles: 2 N of neighbouring columns.
template <int M, int N, typename F>
__device__ __forceinline__ void for_each(float (&sums)[M][N][4], int row, int column, F f) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int y = 0; y < 2; ++y) {
      float numbers[2 * N];
#pragma unroll
      for (int n = 0; n < 2 * N; ++n) numbers[n] = sums[m][n % N][2 * y + n / N];
      f(row + 16 * m + 8 * y + lane_row(), column + 2 * N * lane_depth(), numbers);
#pragma unroll
      for (int n = 0; n < 2 * N; ++n) sums[m][n % N][2 * y + n / N] = numbers[n];
    }
}

// The same of other tiles: f gets pairs.
template <int M, int N, typename F>
__device__ __forceinline__ void for_each_pair(const float (&sums)[M][N][4], int row, int column,
                                              F f) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int y = 0; y < 2; ++y)
        f(row + 16 * m + 8 * y + lane_row(), column + 8 * n + 2 * lane_depth(),
          {sums[m][n][2 * y], sums[m][n][2 * y + 1]});
}

// The part of a warp in a product of some rows and N columns: M x TILES tiles. Rows are divided
// among GROUPS of the warps.
template <int WARPS, int GROUPS, int ROWS, int N>
struct Part {
  static constexpr int M = ROWS / 16 / GROUPS, ACROSS = WARPS / GROUPS;
  static constexpr int TILES = next_power((N / 8 + ACROSS - 1) / ACROSS), WIDTH = 2 * TILES;
  float sums[M][TILES][4] = {};
  int row, column;

  __device__ explicit Part(int warp)
      : row(warp / ACROSS * M * 16), column(warp % ACROSS * TILES * 8) {}
  // Some warps have none.
  __device__ __forceinline__ bool any() const { return column < N; }
  template <typename Left, typename Right>
  __device__ __forceinline__ void add(int depth, Left left, Right right) {
    add_products(sums, row, column, 0, depth, left, right);
  }
  template <typename F>
  __device__ __forceinline__ void each(F f) {
    for_each(sums, row, column, f);
  }
  template <typename F>
  __device__ __forceinline__ void each_pair(F f) const {
    for_each_pair(sums, row, column, f);
  }
  template <typename F>
  __device__ __forceinline__ void scale_rows(F factor) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const float by = factor(row + 16 * m + 8 * y + lane_row());
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
          for (int z = 0; z < 2; ++z) sums[m][n][2 * y + z] *= by;
      }
  }
  __device__ __forceinline__ void add(const Part& other) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int z = 0; z < 4; ++z) sums[m][n][z] += other.sums[m][n][z];
  }
  // Adds the products of single sums.
  __device__ __forceinline__ void add_each(const Part& left, const Part& right) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int z = 0; z < 4; ++z) sums[m][n][z] += left.sums[m][n][z] * right.sums[m][n][z];
  }
};

}  // namespace hoconv::recurrent
