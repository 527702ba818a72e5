// The matrix product of 8-bit integers whose products come from a table of all of them.
//
// A block copies the table into shared memory once, as 16-bit numbers, which hold every product of
// 8-bit integers, and then computes tiles of the result one after the other. The lanes of a warp
// look up the same row of the table at a time: their banks depend on the right operand only, and
// lanes with equal operands share a read. Tables with larger numbers, and all tables on a GPU whose
// shared memory is too small, are read through the L1 cache.
//
// M, N rows and columns of the product, K what it sums over.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <type_traits>

#include "approx/problem.h"
#include "hoconv/cuda_launch.cuh"

namespace hoconv::approx {
namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kRows = 8;    // of a thread; a tile has kWarps * kRows
constexpr int kDepth = 32;  // k in shared memory at a time
constexpr int kTable = 256 * 256;

// Element (i, k) of matrix n.
struct Bytes {
  const uint8_t* data;
  int64_t batch, row, depth;  // strides

  __device__ uint8_t operator()(int64_t n, int64_t i, int64_t k) const {
    return data[n * batch + i * row + k * depth];
  }
};

// Loads kDepth k of `rows` rows, from the first ones on; zeros out of range.
template <int rows>
__device__ void load(uint8_t (&target)[kDepth][rows], const Bytes& source, int64_t n,
                     int64_t first_row, int64_t row_count, int64_t first_k, int64_t K) {
#pragma unroll 2
  for (int i = threadIdx.x; i < kDepth * rows; i += kThreads) {
    // Neighbouring threads load neighbours in memory.
    const int row = source.depth == 1 ? i / kDepth : i % rows;
    const int d = source.depth == 1 ? i % kDepth : i / rows;
    const bool exists = first_row + row < row_count && first_k + d < K;
    target[d][row] = exists ? source(n, first_row + row, first_k + d) : 0;
  }
}

// `columns` neighbouring columns belong to a thread; a tile has 32 times as many.
template <int columns>
struct Tiles {
  static constexpr int kHeight = kWarps * kRows, kWidth = 32 * columns;
  // kDepth k of both operands in shared memory.
  struct Stage {
    alignas(16) uint8_t left[kDepth][kHeight], right[kDepth][kWidth];
  };
  Bytes left, right;
  int32_t* out;
  TableMatmul p;
  int64_t down, across;  // tiles of a matrix

  Tiles(const Bytes& left, const Bytes& right, int32_t* out, const TableMatmul& p)
      : left(left),
        right(right),
        out(out),
        p(p),
        down((p.M + kHeight - 1) / kHeight),
        across((p.N + kWidth - 1) / kWidth) {}

  __host__ __device__ int64_t count() const { return p.batch * down * across; }

  // Computes the tiles of this block; table[256 * a + b] is the product of a and b.
  template <bool limited, typename T>
  __device__ void compute(const T* table, const Limits& limits, Stage& stage) const {
    for (int64_t tile = blockIdx.x; tile < count(); tile += gridDim.x)
      compute<limited>(table, limits, stage, tile / across / down, tile / across % down * kHeight,
                       tile % across * kWidth);
  }

 private:
  template <bool limited, typename T>
  __device__ void compute(const T* table, const Limits& limits, Stage& stage, int64_t n,
                          int64_t first_row, int64_t first_column) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int32_t sum[kRows][columns] = {};
    for (int64_t k = 0; k < p.K; k += kDepth) {
      __syncthreads();
      load(stage.left, left, n, first_row, p.M, k, p.K);
      load(stage.right, right, n, first_column, p.N, k, p.K);
      __syncthreads();
      const int depth = min(int64_t{kDepth}, p.K - k);
#pragma unroll 1
      for (int d = 0; d < depth; ++d) {
        const auto x = reinterpret_cast<const Pack<uint8_t, kRows>*>(stage.left[d])[warp];
        const auto y = reinterpret_cast<const Pack<uint8_t, columns>*>(stage.right[d])[lane];
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int c = 0; c < columns; ++c) {
            const int32_t product = table[256 * x.e[r] + y.e[c]];
            if constexpr (limited)
              sum[r][c] = max(limits.least, min(limits.most, int64_t{sum[r][c]} + product));
            else
              sum[r][c] += product;
          }
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < columns; ++c) {
        const int64_t row = first_row + warp * kRows + r;
        const int64_t column = first_column + lane * columns + c;
        if (row < p.M && column < p.N) out[(n * p.M + row) * p.N + column] = sum[r][c];
      }
  }
};

// `shared`: the table fits the shared memory of a block; `limited`: sums are kept within limits.
template <int columns, bool shared, bool limited>
__global__ void __launch_bounds__(kThreads, 1)
    multiply(Tiles<columns> tiles, const int32_t* __restrict__ table, Limits limits) {
  __shared__ typename Tiles<columns>::Stage stage;
  if constexpr (shared) {
    extern __shared__ uint16_t products[];
    bool is_signed = true, is_unsigned = true;
    for (int i = threadIdx.x; i < kTable; i += kThreads) {
      const int32_t product = table[i];
      is_signed &= product == static_cast<int16_t>(product);
      is_unsigned &= product == static_cast<uint16_t>(product);
      products[i] = static_cast<uint16_t>(product);
    }
    if (__syncthreads_and(is_signed))
      return tiles.template compute<limited>(reinterpret_cast<const int16_t*>(products), limits,
                                             stage);
    if (__syncthreads_and(is_unsigned))
      return tiles.template compute<limited>(products, limits, stage);
  }
  tiles.template compute<limited>(table, limits, stage);
}

template <int columns, bool shared, bool limited>
void launch(const Tiles<columns>& tiles, const int32_t* table, const Limits& limits,
            cudaStream_t stream) {
  constexpr int bytes = shared ? kTable * sizeof(uint16_t) : 0;
  const auto kernel = multiply<columns, shared, limited>;
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const int64_t blocks =
      std::min<int64_t>(tiles.count(), device_attribute(cudaDevAttrMultiProcessorCount));
  kernel<<<blocks, kThreads, bytes, stream>>>(tiles, table, limits);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// out (B, M, N) int32, the sum over k, in ascending order, of table[a[m, k] mod 256, b[k, n] mod
// 256]; modulo 2^32, or kept within limits at each addition.
Tensor table_matmul(const Tensor& a, const Tensor& b, const Tensor& table,
                    std::optional<int64_t> least, std::optional<int64_t> most) {
  const TableMatmul p(a, b, table);
  const std::optional<Limits> limits = Limits::of(least, most);
  Tensor out = make_tensor(table, {p.batch, p.M, p.N});
  if (out.numel() == 0) return out;
  const Launch current(a);
  const Bytes left{static_cast<const uint8_t*>(a.const_data_ptr()), a.stride(0), a.stride(1),
                   a.stride(2)};
  const Bytes right{static_cast<const uint8_t*>(b.const_data_ptr()), b.stride(0), b.stride(2),
                    b.stride(1)};
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  const auto tiles_of = [&](auto columns) {
    return Tiles<columns>(left, right, static_cast<int32_t*>(out.mutable_data_ptr()), p);
  };
  // What the last block takes: a tile takes its columns, and about a fifth of one more to load.
  const auto time_of = [&](auto columns) {
    const int64_t count = tiles_of(columns).count();
    return (count + multiprocessors - 1) / multiprocessors * (5 * columns + 1);
  };
  const auto multiply_by = [&](auto columns, auto limited) {
    const Tiles<columns> tiles = tiles_of(columns);
    const auto* products = static_cast<const int32_t*>(table.const_data_ptr());
    constexpr int needed = kTable * sizeof(uint16_t) + sizeof(typename Tiles<columns>::Stage);
    const Limits kept = limits.value_or(Limits{});
    if (device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= needed)
      launch<columns, true, limited>(tiles, products, kept, current.stream);
    else
      launch<columns, false, limited>(tiles, products, kept, current.stream);
  };
  const auto choose_columns = [&](auto limited) {
    const std::integral_constant<int, 1> one;
    const std::integral_constant<int, 2> two;
    const std::integral_constant<int, 4> four;
    const int64_t least_time = std::min({time_of(one), time_of(two), time_of(four)});
    if (time_of(four) == least_time)
      multiply_by(four, limited);
    else if (time_of(two) == least_time)
      multiply_by(two, limited);
    else
      multiply_by(one, limited);
  };
  if (limits)
    choose_columns(std::true_type{});
  else
    choose_columns(std::false_type{});
  return out;
}

}  // namespace
}  // namespace hoconv::approx

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("approx_table_matmul.cuda", TORCH_BOX(&hoconv::approx::table_matmul));
}
