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
constexpr int kBlocks = 2;       // of a multiprocessor
constexpr int kRows = 8;         // of a tile
constexpr int kMostColumns = 4;  // of a thread
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

// An operand: byte i of k of matrix n. Whole vectors of `width` bytes are aligned.
struct Bytes {
  const uint8_t* data;
  int64_t batch, depth;  // strides, of n and k
  int64_t count, width;  // of i, and of all bytes

  __device__ const uint8_t* at(int64_t n, int64_t i) const { return data + n * batch + i; }
};

// The products of an operand of a column with those of a tile's rows, T in words of 32 bits.
template <typename T>
struct alignas(16) Entry {
  static constexpr int kInWord = sizeof(uint32_t) / sizeof(T);

  uint32_t words[kRows / kInWord];

  __device__ T of(int row) const {
    return static_cast<T>(words[row / kInWord] >> row % kInWord * (32 / kInWord));
  }
};

// As many k as the threads copy the products of, a word of each row of the table a thread.
template <typename T>
struct Step {
  static constexpr int kDepth = kThreads * Entry<T>::kInWord / kOperands;

  Entry<T> products[kDepth * kOperands];
};

// Adds the products of an entry to the sums of column c. A dot product with 1 and 0 takes one
// instruction for a product of 16 bits, whose extension would take another.
template <bool limited, int columns, typename T>
__device__ void add(int32_t (&sums)[kRows][columns], int c, Entry<T> entry, const Limits& limits) {
  if constexpr (!limited && Entry<T>::kInWord == 2) {
    using Two = std::conditional_t<std::is_signed_v<T>, int, unsigned>;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      sums[r][c] =
          __dp2a_lo(static_cast<Two>(entry.words[r / 2]), static_cast<Two>(r % 2 ? 0x0100 : 0x0001),
                    static_cast<Two>(sums[r][c]));
  } else {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (limited)
        sums[r][c] = max(limits.least, min(limits.most, int64_t{sums[r][c]} + entry.of(r)));
      else
        sums[r][c] += entry.of(r);
    }
  }
}

__device__ inline unsigned byte_of(uint2 bytes, int i) {
  return (i < 4 ? bytes.x : bytes.y) >> i % 4 * 8 & 0xff;
}

// A matrix product, cut into tiles of kRows rows. `columns` neighbouring ones belong to a thread.
template <int columns>
struct Tiles {
  static constexpr int kWidth = kThreads * columns;
  using Operands = std::conditional_t<columns == 1, uint8_t, bits_t<columns>>;

  Bytes down, across;
  int32_t* out;
  int64_t next_matrix, next_row, next_column;  // strides of out
  int64_t batch, K;
  int64_t rows, widths;  // tiles of a matrix

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
        widths((across.count + kWidth - 1) / kWidth) {}

  int64_t count() const { return batch * rows * widths; }

  // Computes the tiles of this block, with the products of a table. While one of two steps in
  // shared memory is read, the next is copied to the other.
  template <bool limited, typename T>
  __device__ void compute(const T* __restrict__ table, Step<T>* steps, const Limits& limits) const {
    constexpr int depth = Step<T>::kDepth;
    for (int64_t tile = blockIdx.x; tile < batch * rows * widths; tile += gridDim.x) {
      // Blocks that run at once read the same columns.
      const int64_t n = tile / rows / widths;
      const int64_t row = tile % rows * kRows;
      const int64_t column = tile / rows % widths * kWidth + threadIdx.x * columns;
      const uint8_t* named = down.at(n, row);
      const uint8_t* at = across.at(n, min(column, across.width - columns));
      int64_t left = K;
      int32_t sums[kRows][columns] = {};
      Operands operands[depth];
      uint32_t words[kRows];
      uint2 names = load_names<T>(named, left);
      load_words(words, table, names, left);
      store_words(words, steps[0]);
      names = load_names<T>(named += depth * down.depth, left - depth);
      load_operands(operands, at, left);
      __syncthreads();
      for (int step = 0; left > 0; step ^= 1) {
        left -= depth;
        load_words(words, table, names, left);
        names = load_names<T>(named += depth * down.depth, left - depth);
#pragma unroll
        for (int d = 0; d < depth; ++d)
#pragma unroll
          for (int c = 0; c < columns; ++c)
            add<limited>(sums, c,
                         steps[step].products[d * kOperands + (operands[d] >> 8 * c & 0xff)],
                         limits);
        load_operands(operands, at += depth * across.depth, left);
        store_words(words, steps[step ^ 1]);
        __syncthreads();
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
  // The first product of a step that this thread copies, of its row of the table.
  template <typename T>
  static __device__ int first_copied() {
    return threadIdx.x * Entry<T>::kInWord;
  }

  // Loads the operands of the rows of a tile, which name rows of the table.
  template <typename T>
  __device__ uint2 load_names(const uint8_t* named, int64_t left) const {
    const int d = first_copied<T>() / kOperands;
    return d < left ? __ldg(reinterpret_cast<const uint2*>(named + d * down.depth)) : uint2{};
  }

  // The products behind the last k are zeros: they change no sum, and none that is within limits.
  template <typename T>
  __device__ void load_words(uint32_t (&words)[kRows], const T* __restrict__ table, uint2 names,
                             int64_t left) const {
    const int d = first_copied<T>() / kOperands;
    const T* const copied = table + first_copied<T>() % kOperands;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      words[r] =
          d < left
              ? __ldg(reinterpret_cast<const uint32_t*>(copied + kOperands * byte_of(names, r)))
              : 0;
  }

  template <typename T>
  __device__ void store_words(const uint32_t (&words)[kRows], Step<T>& step) const {
    if constexpr (Entry<T>::kInWord == 1) {
      Entry<T> entry;
#pragma unroll
      for (int r = 0; r < kRows; ++r) entry.words[r] = words[r];
      step.products[first_copied<T>()] = entry;
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Entry<T> entry;
#pragma unroll
        for (int r = 0; r < kRows; r += 2)
          entry.words[r / 2] = __byte_perm(words[r], words[r + 1], i ? 0x7632 : 0x5410);
        step.products[first_copied<T>() + i] = entry;
      }
    }
  }

  template <int depth>
  __device__ void load_operands(Operands (&operands)[depth], const uint8_t* at,
                                int64_t left) const {
#pragma unroll
    for (int d = 0; d < depth; ++d)
      operands[d] = d < left ? __ldg(reinterpret_cast<const Operands*>(at + d * across.depth)) : 0;
  }
};

// `limited`: sums are kept within limits.
template <int columns, bool limited>
__global__ void __launch_bounds__(kThreads, kBlocks)
    multiply(const __grid_constant__ Tiles<columns> tiles, Table table, Limits limits) {
  static_assert(sizeof(Step<int16_t>) == sizeof(Step<int32_t>));
  __shared__ uint4 memory[2 * sizeof(Step<int32_t>) / sizeof(uint4)];
  const auto compute = [&](const auto* products) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(products)>>;
    tiles.template compute<limited>(products, reinterpret_cast<Step<T>*>(memory), limits);
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

// The bytes of a matrix (batch, K, count), padded and copied where its vectors are not whole and
// aligned; `kept` is what holds them.
Bytes bytes_of(const Tensor& t, int64_t vector, Tensor& kept) {
  const int64_t count = t.size(2), width = (count + vector - 1) / vector * vector;
  const bool aligned =
      (reinterpret_cast<uintptr_t>(t.const_data_ptr()) | t.stride(0) | t.stride(1) | count) %
          vector ==
      0;
  kept = t;
  if (t.stride(2) != 1 || !aligned) {
    kept = torch::stable::new_empty(t, {t.size(0), t.size(1), width});
    Tensor filled = torch::stable::narrow(kept, 2, 0, count);
    torch::stable::copy_(filled, t);
  }
  return {static_cast<const uint8_t*>(kept.const_data_ptr()), kept.stride(0), kept.stride(1), count,
          width};
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
  // The time of the last multiprocessor. The copies for a k take as long as a column of each
  // thread.
  const auto time_of = [&](int64_t down, int64_t across, int64_t columns) {
    const int64_t width = kThreads * columns;
    const int64_t tiles = p.batch * ((down + kRows - 1) / kRows) * ((across + width - 1) / width);
    return (tiles + multiprocessors - 1) / multiprocessors * (columns + 3);
  };
  const auto least_time = [&](int64_t down, int64_t across) {
    return std::min(
        {time_of(down, across, 1), time_of(down, across, 2), time_of(down, across, kMostColumns)});
  };
  const bool transposed = least_time(p.N, p.M) < least_time(p.M, p.N);
  const Tensor left = torch::stable::transpose(a, 1, 2);  // (B, K, M)
  Tensor kept_down, kept_across;
  const Bytes down = bytes_of(transposed ? b : left, kRows, kept_down);
  const Bytes across = bytes_of(transposed ? left : b, kMostColumns, kept_across);
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
    const int64_t blocks = std::min(tiles.count(), kBlocks * multiprocessors);
    const auto kernel = multiply<columns, limited>;
    kernel<<<blocks, kThreads, 0, current.stream>>>(tiles, read, limits.value_or(Limits{}));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  };
  const auto choose_columns = [&](auto limited) {
    const auto time = [&](int64_t columns) { return time_of(down.count, across.count, columns); };
    if (time(kMostColumns) <= std::min(time(2), time(1)))
      launch(std::integral_constant<int, kMostColumns>{}, limited);
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
