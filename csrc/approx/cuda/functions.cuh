// Sums of products, and products, of integers by functions in C. NVRTC compiles this file at run
// time, before the text of the functions (hoconv/ops/approx/function_kernels.py).
//
// A block computes a tile of the result. The lanes of a warp have the same row, whose left operand
// they all read, and a column each. A thread has a few sums, which do not depend on each other, so
// that it can work on one while it waits for another. It has no more, since the code has a copy of
// both functions for each.
//
// B batch, M, N rows and columns of a matrix product, K what it sums over.
#pragma once

#ifdef __CUDACC_RTC__  // what C takes from headers, of which NVRTC has none
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
#define CHAR_BIT 8
#define INT8_MAX 127
#define INT8_MIN (-INT8_MAX - 1)
#define UINT8_MAX 255
#define INT16_MAX 32767
#define INT16_MIN (-INT16_MAX - 1)
#define UINT16_MAX 65535
#define INT32_MAX 2147483647
#define INT32_MIN (-INT32_MAX - 1)
#define UINT32_MAX 4294967295u
#define INT64_MAX 9223372036854775807l
#define INT64_MIN (-INT64_MAX - 1)
#define UINT64_MAX 18446744073709551615ul
#define INT_MAX INT32_MAX
#define INT_MIN INT32_MIN
#define UINT_MAX UINT32_MAX
// What finds leading ones in C.
#define __builtin_clz __clz
#define __builtin_clzl __clzll
#define __builtin_clzll __clzll
#define __builtin_ctz(n) (__ffs(n) - 1)
#define __builtin_ctzl(n) (__ffsll(n) - 1)
#define __builtin_ctzll(n) (__ffsll(n) - 1)
#define __builtin_popcount __popc
#define __builtin_popcountl __popcll
#define __builtin_popcountll __popcll
#endif

namespace hoconv::approx {

constexpr int kColumns = 32, kWarps = 8, kThreads = 32 * kWarps;
constexpr int kSums = 4;  // of a thread: neighbouring rows of a column
constexpr int kRows = kWarps * kSums;
constexpr int kDepth = 32;  // k in shared memory at a time

// Element (i, k) of matrix n.
struct Operand {
  const int32_t* data;
  int64_t batch, row, depth;  // strides

  __device__ int32_t operator()(int64_t n, int64_t i, int64_t k) const {
    return data[n * batch + i * row + k * depth];
  }
};

// out (B, M, N) of left (B, M, K) and right (B, N, K).
struct Matrices {
  Operand left, right;
  const int32_t* table;  // of the products of all pairs of bytes, or null
  int64_t* out;
  int64_t B, M, N, K;
};

// out (count) of left (count) and right (count).
struct Pairs {
  const int32_t *left, *right;
  int64_t* out;
  int64_t count;
};

// The products of a table (256, 256).
struct Table {
  const int32_t* products;

  __device__ int64_t operator()(int64_t a, int64_t b) const {
    return products[(a & 255) << 8 | (b & 255)];
  }
};

// Additions, of a product to a sum: exact, or in a register that holds numbers from least to most.
struct Exact {
  __device__ int64_t operator()(int64_t sum, int64_t product) const { return sum + product; }
};
struct Saturate {
  int64_t least, most;

  __device__ int64_t operator()(int64_t sum, int64_t product) const {
    return max(least, min(most, sum + product));
  }
};
struct Wrap {
  int64_t least, most;

  __device__ int64_t operator()(int64_t sum, int64_t product) const {
    return ((sum + product - least) & (most - least)) + least;
  }
};

// Loads kDepth k of `rows` rows, from the first ones on; zeros out of range.
template <int rows>
__device__ void load(int32_t (&target)[kDepth][rows + 1], const Operand& source, int64_t n,
                     int64_t first_row, int64_t row_count, int64_t first_k, int64_t K) {
  for (int i = threadIdx.x; i < kDepth * rows; i += kThreads) {
    // Neighbouring threads load neighbours in memory.
    const int row = source.depth == 1 ? i / kDepth : i % rows;
    const int d = source.depth == 1 ? i % kDepth : i / rows;
    const bool exists = first_row + row < row_count && first_k + d < K;
    target[d][row] = exists ? source(n, first_row + row, first_k + d) : 0;
  }
}

// Sums from 0 in ascending k: sum = add(sum, multiply(left, right)).
template <typename Multiply, typename Add>
__device__ __forceinline__ void sum_products(const Matrices& p, const Multiply& multiply,
                                             const Add& add) {
  // Rows of an odd number of words, so that threads store a column of them at once.
  __shared__ int32_t left[kDepth][kRows + 1], right[kDepth][kColumns + 1];
  const int row = threadIdx.x / kColumns * kSums, column = threadIdx.x % kColumns;
  const int64_t down = (p.M + kRows - 1) / kRows, across = (p.N + kColumns - 1) / kColumns;
  for (int64_t tile = blockIdx.x; tile < p.B * down * across; tile += gridDim.x) {
    const int64_t n = tile / across / down, first_row = tile / across % down * kRows,
                  first_column = tile % across * kColumns;
    int64_t sum[kSums] = {};
    for (int64_t k = 0; k < p.K; k += kDepth) {
      __syncthreads();
      load<kRows>(left, p.left, n, first_row, p.M, k, p.K);
      load<kColumns>(right, p.right, n, first_column, p.N, k, p.K);
      __syncthreads();
      const int depth = min(int64_t{kDepth}, p.K - k);
#pragma unroll 1
      for (int d = 0; d < depth; ++d)
#pragma unroll
        for (int i = 0; i < kSums; ++i)
          sum[i] = add(sum[i], multiply(left[d][row + i], right[d][column]));
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      if (first_row + row + i < p.M && first_column + column < p.N)
        p.out[(n * p.M + first_row + row + i) * p.N + first_column + column] = sum[i];
  }
}

template <typename Multiply>
__device__ __forceinline__ void multiply_pairs(const Pairs& p, const Multiply& multiply) {
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int64_t i = first; i < p.count; i += int64_t{gridDim.x} * kThreads)
    p.out[i] = multiply(p.left[i], p.right[i]);
}

}  // namespace hoconv::approx
