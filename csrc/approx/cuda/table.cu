// The matrix product of 8-bit integers whose products come from a table of all of them.
//
// A look-up at random takes its bank of shared memory for one product of 2 bytes, and lanes that
// need the same bank wait for each other. So a block brings the products of 8 rows together: for
// each of some k it copies the 8 rows of the table that their operands name to shared memory, those
// of one operand of a column beside each other. A thread has neighbouring columns, and reads the
// products of a column with all 8 rows at once, 16 bytes. The copies are the price, 8 rows of the
// table for each k; 512 to 2,048 columns of a block share it. Which operand's vectors are the rows
// is chosen: where a few filters meet many pixels, the filters.
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

constexpr int kThreads = 512;
constexpr int kRows = 8;   // of a tile
constexpr int kDepth = 4;  // k of which products are in shared memory at a time
constexpr int kOperands = 256;
constexpr int kTable = kOperands * kOperands;

// How a table is read: as the 16-bit numbers that hold all of its products, or as it is.
enum Kind : int32_t { kSigned, kUnsigned, kWide };

struct Table {
  const int32_t* wide;
  const uint16_t* narrow;
  const Kind* kind;
};

// Copies the lowest 16 bits of all products, and says whether they are enough. One block.
__global__ void __launch_bounds__(kThreads)
    narrow_table(const int32_t* __restrict__ table, uint16_t* __restrict__ narrow, Kind* kind) {
  bool is_signed = true, is_unsigned = true;
#pragma unroll 8
  for (int i = threadIdx.x; i < kTable; i += kThreads) {
    const int32_t product = table[i];
    is_signed &= product == static_cast<int16_t>(product);
    is_unsigned &= product == static_cast<uint16_t>(product);
    narrow[i] = static_cast<uint16_t>(product);
  }
  is_signed = __syncthreads_and(is_signed), is_unsigned = __syncthreads_and(is_unsigned);
  if (threadIdx.x == 0) *kind = is_signed ? kSigned : is_unsigned ? kUnsigned : kWide;
}

// Byte (i, k) of matrix n. Neighbours along i are neighbours in memory, unless a tile has them as
// rows.
struct Bytes {
  const uint8_t* data;
  int64_t batch, next, depth;  // strides
  int64_t count;               // of i

  __device__ const uint8_t* at(int64_t n, int64_t i, int64_t k) const {
    return data + n * batch + i * next + k * depth;
  }
};

// The products of an operand of a column with those of a tile's rows.
template <typename T>
struct alignas(16) Entry {
  T of[kRows];
};

// A matrix product, cut into tiles of kRows rows. `columns` neighbouring ones belong to a thread.
template <int columns>
struct Tiles {
  static constexpr int kWidth = kThreads * columns;
  using Operands = Pack<uint8_t, columns>;

  Bytes down, across;
  int32_t* out;
  int64_t next_matrix, next_row, next_column;  // strides of out
  int64_t batch, K;
  int64_t rows, widths;  // tiles of a matrix
  bool aligned;          // whether the operands of neighbouring columns are loaded at once

  Tiles(const Bytes& down, const Bytes& across, int32_t* out, int64_t batch, int64_t K,
        bool transposed)
      : down(down),
        across(across),
        out(out),
        next_matrix(down.count * across.count),
        next_row(transposed ? 1 : across.count),
        next_column(transposed ? down.count : 1),
        batch(batch),
        K(K),
        rows((down.count + kRows - 1) / kRows),
        widths((across.count + kWidth - 1) / kWidth),
        aligned((reinterpret_cast<uintptr_t>(across.data) | across.batch | across.depth) %
                    columns ==
                0) {}

  int64_t count() const { return batch * rows * widths; }

  // Computes the tiles of this block, with the products of a table. Shared memory has products of
  // kDepth k, an entry for each operand.
  template <bool limited, typename T>
  __device__ void compute(const T* __restrict__ table, Entry<T>* products,
                          const Limits& limits) const {
    __shared__ Pack<uint8_t, kRows> table_rows[kDepth];  // that operands name
    for (int64_t tile = blockIdx.x; tile < batch * rows * widths; tile += gridDim.x) {
      // Blocks that run at once read the same columns.
      const int64_t n = tile / rows / widths;
      const int64_t row = tile % rows * kRows;
      const int64_t column = tile / rows % widths * kWidth + threadIdx.x * columns;
      int32_t sums[kRows][columns] = {};
      uint8_t table_row = load_table_row(n, row, 0);
      Operands operands[kDepth];
      load_operands(operands, n, column, 0);
      for (int64_t k = 0; k < K; k += kDepth) {
        if (threadIdx.x < kDepth * kRows)
          table_rows[threadIdx.x / kRows].e[threadIdx.x % kRows] = table_row;
        __syncthreads();
#pragma unroll
        for (int i = threadIdx.x; i < kDepth * kOperands; i += kThreads) {
          const Pack<uint8_t, kRows> named = table_rows[i / kOperands];
          Entry<T> entry;
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            entry.of[r] = table[kOperands * named.e[r] + i % kOperands];
          products[i] = entry;
        }
        __syncthreads();
        Operands now[kDepth];
#pragma unroll
        for (int d = 0; d < kDepth; ++d) now[d] = operands[d];
        table_row = load_table_row(n, row, k + kDepth);
        load_operands(operands, n, column, k + kDepth);
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
          if (d >= K - k) break;
#pragma unroll
          for (int c = 0; c < columns; ++c) {
            const Entry<T> entry = products[d * kOperands + now[d].e[c]];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              if constexpr (limited)
                sums[r][c] = max(limits.least, min(limits.most, int64_t{sums[r][c]} + entry.of[r]));
              else
                sums[r][c] += entry.of[r];
            }
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int c = 0; c < columns; ++c)
          if (row + r < down.count && column + c < across.count)
            out[n * next_matrix + (row + r) * next_row + (column + c) * next_column] = sums[r][c];
    }
  }

 private:
  // Loads an operand of the tile's rows at kDepth k from k on: that of a thread, of the first ones.
  __device__ uint8_t load_table_row(int64_t n, int64_t row, int64_t k) const {
    const int64_t i = row + threadIdx.x % kRows, d = k + threadIdx.x / kRows;
    const bool exists = threadIdx.x < kDepth * kRows && i < down.count && d < K;
    return exists ? *down.at(n, i, d) : 0;
  }

  __device__ void load_operands(Operands (&operands)[kDepth], int64_t n, int64_t column,
                                int64_t k) const {
    const bool whole = aligned && column + columns <= across.count;
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      operands[d] = {};
      if (k + d >= K) continue;
      if (whole) {
        operands[d] = *reinterpret_cast<const Operands*>(across.at(n, column, k + d));
        continue;
      }
#pragma unroll
      for (int c = 0; c < columns; ++c)
        if (column + c < across.count) operands[d].e[c] = *across.at(n, column + c, k + d);
    }
  }
};

// `limited`: sums are kept within limits.
template <int columns, bool limited>
__global__ void __launch_bounds__(kThreads, 1)
    multiply(const __grid_constant__ Tiles<columns> tiles, Table table, Limits limits) {
  __shared__ Entry<int32_t> memory[kDepth * kOperands];
  const auto compute = [&](const auto* entries) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(entries)>>;
    tiles.template compute<limited>(entries, reinterpret_cast<Entry<T>*>(memory), limits);
  };
  switch (*table.kind) {
    case kSigned:
      return compute(reinterpret_cast<const int16_t*>(table.narrow));
    case kUnsigned:
      return compute(table.narrow);
    case kWide:
      return compute(table.wide);
  }
}

// The bytes of a matrix (batch, K, count) whose neighbours along the last dimension are neighbours
// in memory; `kept` is what holds them.
Bytes across_of(const Tensor& t, Tensor& kept) {
  kept = t.stride(2) == 1 ? t : torch::stable::contiguous(t);
  return {static_cast<const uint8_t*>(kept.const_data_ptr()), kept.stride(0), 1, kept.stride(1),
          t.size(2)};
}
Bytes down_of(const Tensor& t) {
  return {static_cast<const uint8_t*>(t.const_data_ptr()), t.stride(0), t.stride(2), t.stride(1),
          t.size(2)};
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
  const int64_t multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  // The time of the last block, where one column of each thread takes 2 and the copies for a k 1.
  const auto time_of = [&](int64_t down, int64_t across, int64_t columns) {
    const int64_t width = kThreads * columns;
    const int64_t tiles = p.batch * ((down + kRows - 1) / kRows) * ((across + width - 1) / width);
    return (tiles + multiprocessors - 1) / multiprocessors * (2 * columns + 1);
  };
  const auto least_time = [&](int64_t down, int64_t across) {
    return std::min({time_of(down, across, 1), time_of(down, across, 2), time_of(down, across, 4)});
  };
  const bool transposed = least_time(p.N, p.M) < least_time(p.M, p.N);
  const Tensor left = torch::stable::transpose(a, 1, 2);  // (B, K, M)
  Tensor kept;
  const Bytes down = down_of(transposed ? b : left);
  const Bytes across = across_of(transposed ? left : b, kept);
  const Tensor entries =
      transposed ? torch::stable::contiguous(torch::stable::transpose(table, 0, 1)) : table;
  Tensor narrow = make_tensor(table, {kTable}, ScalarType::Short);
  Tensor kind = make_tensor(table, {1});
  const Table read{static_cast<const int32_t*>(entries.const_data_ptr()),
                   static_cast<uint16_t*>(narrow.mutable_data_ptr()),
                   static_cast<Kind*>(kind.mutable_data_ptr())};
  narrow_table<<<1, kThreads, 0, current.stream>>>(read.wide, const_cast<uint16_t*>(read.narrow),
                                                   const_cast<Kind*>(read.kind));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  const auto launch = [&](auto columns, auto limited) {
    const Tiles<columns> tiles(down, across, static_cast<int32_t*>(out.mutable_data_ptr()), p.batch,
                               p.K, transposed);
    const int64_t blocks = std::min(tiles.count(), multiprocessors);
    const auto kernel = multiply<columns, limited>;
    kernel<<<blocks, kThreads, 0, current.stream>>>(tiles, read, limits.value_or(Limits{}));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  };
  const auto choose_columns = [&](auto limited) {
    const auto time = [&](int64_t columns) { return time_of(down.count, across.count, columns); };
    if (time(4) <= std::min(time(2), time(1)))
      launch(std::integral_constant<int, 4>{}, limited);
    else if (time(2) <= time(1))
      launch(std::integral_constant<int, 2>{}, limited);
    else
      launch(std::integral_constant<int, 1>{}, limited);
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
