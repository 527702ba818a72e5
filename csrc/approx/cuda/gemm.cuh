// The matrix product with approximate multiplications. Every convolution and its gradients are
// matrix products of views (view.cuh).
//
// A first kernel packs both operands (lanes.cuh). Then each block computes a tile of the result. It
// copies kDepth k of the packed operands at a time, a stage, to shared memory (stage.cuh) while it
// multiplies the stage before (products.cuh). A thread owns rows and columns of the tile and keeps
// their sums in registers.
//
// The sum over k is cut into chunks, which are added in ascending order (problem.h). Where there
// are few tiles, each chunk has a block of its own, and a second kernel adds the chunks.
//
// Measured on an H200, a product of which a seventh of the left operand is not zero takes two
// thirds of the time of a dense one. A dense one takes 1.2 times as long where its longer operand
// is the left one, whose rows the lanes share.
//
// Each multiplier is instantiated in a source of its own (gemm/), since it takes long to compile.
//
// M, N rows and columns of the result, K what is summed over.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <iterator>

#include "approx/cuda/products.cuh"
#include "approx/problem.h"

namespace hoconv::approx {
namespace {

// What the packing finds, in flags of the device's memory.
struct Flags {
  int* out_of_range;  // one for each of `blocks` blocks that packed: whether some number is
  int blocks;
  int* swapped;  // whether the operands are packed for the swapped product
};
// Of a product and the swapped one, which both are launched, the one that the operands are not
// packed for returns at once.
enum class Runs { always, if_not_swapped, if_swapped };

// blockIdx.x counts the tiles of all matrices. If chunks are divided among blocks, blockIdx.y
// counts those, and each has a result of its own in `parts`.
template <typename Multiplier, typename T>
__global__ void __launch_bounds__(kThreads, T::blocks)
    multiply_matrices(const __grid_constant__ Product p,
                      const typename Lane<Multiplier>::Left* left_words,
                      const typename Lane<Multiplier>::Right* right_words, Flags flags, Runs runs,
                      int64_t row_tiles, int64_t column_tiles, float* parts) {
  if (runs != Runs::always && (*flags.swapped != 0) != (runs == Runs::if_swapped)) return;
  using L = Lane<Multiplier>;
  using S = Stage<Multiplier, T>;
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<Shared<Multiplier, T>*>(memory);
  const int64_t tile = blockIdx.x, matrix = tile / column_tiles / row_tiles;
  const int64_t first_row = tile / column_tiles % row_tiles * T::rows;
  const int64_t first_column = tile % column_tiles * T::columns;
  const auto* left_matrix = left_words + matrix * p.left.batch;
  const auto* right_matrix = right_words + matrix * p.right.batch;
  for (int n = threadIdx.x; n < T::rows; n += kThreads) {
    const int64_t row = first_row + n;
    const bool exists = row < p.M;
    shared.rows[n] = addressed(exists ? p.left.row_coordinate(row) : nowhere(), left_matrix);
    shared.out_rows[n] = exists ? Target::offset(p.out.row_digits, p.out.row, row) : -1;
  }
  for (int n = threadIdx.x; n < T::columns; n += kThreads) {
    const int64_t column = first_column + n;
    const bool exists = column < p.N;
    shared.columns[n] =
        addressed(exists ? p.right.row_coordinate(column) : nowhere(), right_matrix);
    shared.out_columns[n] = exists ? Target::offset(p.out.column_digits, p.out.column, column) : -1;
  }
  const Reader<typename L::Left, T::rows, S::left_pitch> left{p.left, shared.rows,
                                                              shared.depths[0]};
  const Reader<typename L::Right, T::columns, S::right_pitch> right{p.right, shared.columns,
                                                                    shared.depths[1]};

  int my_row = T::first_row(), my_column = T::first_column();
  asm volatile("" : "+r"(my_row), "+r"(my_column));  // kept in registers: threadIdx is slow to read

  // Whether one of the warp's rows exists.
  const bool has_rows = __any_sync(~0u, first_row + my_row < p.M);

  // Computes the coordinates of kPrefetchedDepths columns, one a thread, for the whole block.
  const auto find = [&](int64_t chunk, int first, int depth) {
    const int operand = threadIdx.x / kPrefetchedDepths,
              d = first + threadIdx.x % kPrefetchedDepths;
    if (operand >= 2) return;
    const View& view = operand == 0 ? p.left : p.right;
    const Coordinate coordinate = d < depth ? view.column_coordinate(chunk + d) : nowhere();
    shared.depths[operand][d % (2 * kPrefetchedDepths)] = addressed<typename L::Left>(coordinate);
  };
  const auto load = [&](int d, S& stage) {
    left.copy(d % (2 * kPrefetchedDepths), stage.left),
        right.copy(d % (2 * kPrefetchedDepths), stage.right);
  };
  int flag = 0;
  for (int n = threadIdx.x; n < flags.blocks; n += kThreads) flag |= flags.out_of_range[n];
  // A vote, although all threads have the same value: it tells the compiler that branches on it do
  // not diverge.
  const bool check_range = __any_sync(~0u, __syncthreads_or(flag));
  // Waits for a stage. Returns whether one of its numbers is out of range.
  const auto arrived = [&](const S& stage) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    if (!check_range) return false;
    uint32_t offset = 0;
    const auto look = [&](const auto& word) { offset = max(offset, L::exponent_offset(word)); };
    left.visit(stage.left, look), right.visit(stage.right, look);
    return __any_sync(~0u, __syncthreads_or(offset > L::kInRange)) != 0;
  };

  const int64_t begin = parts == nullptr ? 0 : blockIdx.y * kChunk;
  const int64_t end = parts == nullptr ? p.K : min(begin + kChunk, p.K);
  for (int64_t chunk = begin; chunk < max(end, int64_t{1}); chunk += kChunk) {
    const int depth = min(kChunk, end - chunk);
    float sum[T::R][T::C] = {};
    __syncthreads();  // until rows and columns are stored and the previous chunk's depths are read
    find(chunk, 0, depth);
    __syncthreads();
    load(0, shared.stages[0]);
    bool out_of_range = arrived(shared.stages[0]);
    for (int d = 0, current = 0; d < depth; d += kDepth, current ^= 1) {
      if (d % kPrefetchedDepths == 0) find(chunk, d + kPrefetchedDepths, depth);
      load(d + kDepth, shared.stages[current ^ 1]);
      if (!out_of_range) {
        if (has_rows)
          add_packed<Multiplier, T>(sum, shared.stages[current], my_row, my_column,
                                    min(kDepth, depth - d));
      } else {
        float copy[T::R][T::C];
#pragma unroll
        for (int i = 0; i < T::R; ++i)
#pragma unroll
          for (int j = 0; j < T::C; ++j) copy[i][j] = sum[i][j];
        add_out_of_range<Multiplier, T>(copy, shared, current, p, matrix, first_row, first_column,
                                        chunk + d, chunk + depth);
#pragma unroll
        for (int i = 0; i < T::R; ++i)
#pragma unroll
          for (int j = 0; j < T::C; ++j) sum[i][j] = copy[i][j];
      }
      out_of_range = arrived(shared.stages[current ^ 1]);
    }
    float* out = parts == nullptr ? p.out.data : parts + blockIdx.y * p.batch * p.M * p.N;
    out += matrix * p.out.batch;
#pragma unroll
    for (int i = 0; i < T::R; ++i) {
      const int64_t row = shared.out_rows[T::first_row() + T::row(i)];
#pragma unroll
      for (int j = 0; j < T::C; ++j) {
        const int64_t column = shared.out_columns[T::first_column() + T::column(j)];
        if (row < 0 || column < 0) continue;
        float* to = out + row + column;
        *to = chunk == begin ? sum[i][j] : __fadd_rn(*to, sum[i][j]);
      }
    }
  }
}

__global__ void add_chunks(const float* parts, int64_t chunks, int64_t size, float* out) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += step) {
    float sum = parts[i];
    for (int64_t chunk = 1; chunk < chunks; ++chunk) sum = __fadd_rn(sum, parts[chunk * size + i]);
    out[i] = sum;
  }
}

// Packs the elements of one operand. Returns the largest exponent offset that this thread packed.
template <typename L, typename Word>
__device__ uint32_t pack_operand(const float* from, int64_t size, Word* to) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  uint32_t offset = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += step) {
    Word word;
    L::pack(word, from[i]);
    offset = max(offset, L::exponent_offset(word));
    if constexpr (L::kPacked) to[i] = word;
  }
  return offset;
}

// Large blocks: each has a flag, which all blocks of the product read.
constexpr int kPackThreads = 1024;

// Whether an operand is so sparse that skipping its zeros saves more than the better tile of the
// swapped product: by a sample, the same for all blocks, at multiples of the golden ratio.
__device__ bool sparse(const float* from, int64_t size) {
  const uint64_t fraction = uint64_t{threadIdx.x * 0x9e3779b9u} << 32;
  const bool zero = size > 0 && from[__umul64hi(fraction, size)] == 0;
  return __syncthreads_count(zero) > kPackThreads * 5 / 8;
}

// blockIdx.y: the left or the right operand. If they `may_swap`, the left one is packed as the
// right one of the swapped product unless it is sparse. Every block sets a flag of its own: a
// memset of one for all would take longer than the packing of a small operand.
template <typename L>
__global__ void __launch_bounds__(kPackThreads)
    pack_operands(const float* left, int64_t left_size, void* left_words, const float* right,
                  int64_t right_size, void* right_words, Flags flags, bool may_swap) {
  const bool swap = may_swap && !sparse(left, left_size);
  const bool is_left = blockIdx.y == 0;
  const float* from = is_left ? left : right;
  const int64_t size = is_left ? left_size : right_size;
  void* to = is_left ? left_words : right_words;
  const uint32_t offset = is_left != swap
                              ? pack_operand<L>(from, size, static_cast<typename L::Left*>(to))
                              : pack_operand<L>(from, size, static_cast<typename L::Right*>(to));
  const int flag = __syncthreads_or(offset > L::kInRange);
  if (threadIdx.x != 0) return;
  flags.out_of_range[blockIdx.y * gridDim.x + blockIdx.x] = flag;
  *flags.swapped = swap;  // all blocks write the same
}

// The most blocks of kernels whose threads loop over elements; more would not fill a GPU better.
constexpr int64_t kMostPackBlocks = 256, kMostAddBlocks = 4096;

int64_t ceil_div(int64_t size, int64_t of) { return (size + of - 1) / of; }

template <typename T>
int64_t tiles_of(const Product& p) {
  return p.batch * ceil_div(p.M, T::rows) * ceil_div(p.N, T::columns);
}
// Whether chunks are divided among blocks: the tiles alone would not fill the GPU twice.
template <typename T>
bool divides(const Product& p, int multiprocessors) {
  const int64_t chunks = ceil_div(p.K, kChunk);
  return chunks > 1 && tiles_of<T>(p) < 2 * T::blocks * multiprocessors && chunks <= kMaxGridYZ;
}

// Instructions of a thread: for a product and its addition; for the loop over one depth, around the
// products of the thread's rows and columns (about); for the copy of an element of an operand
// (about).
constexpr double kProductCost = 3, kLoopCost = 25, kCopyCost = 10;

// What a matrix product costs with a tile: the time of the multiprocessor that has the most to do.
// Blocks start in rounds; those of a last chunk, which is shorter, start where others ended. A
// round of n blocks takes about as long as the instructions of n + 1: they wait for each other and
// for memory, the more of the time the fewer they are (measured on an H200).
template <typename T>
double cost(const Product& p, int multiprocessors) {
  const double of_depth = double(T::rows) * T::columns *
                              (kProductCost + 1.0 / T::R + 1.0 / T::C + kLoopCost / (T::R * T::C)) +
                          kCopyCost * (T::rows + T::columns);
  const bool divided = divides<T>(p, multiprocessors);
  const int64_t blocks = tiles_of<T>(p) * (divided ? p.K / kChunk : 1);
  const int64_t at_once = int64_t{T::blocks} * multiprocessors;
  const int64_t rounds = blocks / at_once, left = ceil_div(blocks % at_once, multiprocessors);
  const int64_t waits = rounds * (T::blocks + 1) + (left == 0 ? 0 : left + 1);
  return of_depth * waits * (divided ? kChunk : p.K);
}

// The packed operands of a product, or of the swapped one, at the offsets of the elements in the
// tensors.
template <typename L>
struct Packed {
  Tensor memory, flag_memory;
  const void *left, *right;  // of the product
  Flags flags;

  Packed(const Product& p, bool may_swap, const Tensor& like, cudaStream_t stream)
      : memory(make_tensor(like, {L::kPacked ? (p.left.span + p.right.span) * 2 : 0})),
        flag_memory(make_tensor(like, {2 * kMostPackBlocks + 1})),
        left(p.left.data),
        right(p.right.data) {
    const int64_t blocks = std::min<int64_t>(
        ceil_div(std::max(p.left.span, p.right.span), kPackThreads), kMostPackBlocks);
    auto* data = static_cast<int*>(flag_memory.mutable_data_ptr());
    flags = {data + 1, static_cast<int>(2 * blocks), data};
    float *left_words = nullptr, *right_words = nullptr;
    if constexpr (L::kPacked) {
      static_assert(sizeof(typename L::Left) == 2 * sizeof(float) &&
                    sizeof(typename L::Right) == 2 * sizeof(float));
      left = left_words = static_cast<float*>(memory.mutable_data_ptr());
      right = right_words = left_words + 2 * p.left.span;
    }
    if (blocks == 0) return;
    pack_operands<L><<<dim3(blocks, 2), kPackThreads, 0, stream>>>(
        p.left.data, p.left.span, left_words, p.right.data, p.right.span, right_words, flags,
        may_swap);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

// Multiplies packed operands. `parts` is not null if the chunks are divided among blocks.
template <typename Multiplier, typename T>
void multiply(const Product& p, const Packed<Lane<Multiplier>>& operands, Runs runs, float* parts,
              cudaStream_t stream) {
  using L = Lane<Multiplier>;
  const auto kernel = multiply_matrices<Multiplier, T>;
  constexpr int bytes = sizeof(Shared<Multiplier, T>);
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const int64_t row_tiles = ceil_div(p.M, T::rows), column_tiles = ceil_div(p.N, T::columns);
  const int64_t blocks = tiles_of<T>(p), chunks = ceil_div(p.K, kChunk);
  STD_TORCH_CHECK(blocks < (int64_t{1} << 31), "the result: too large");
  const void *left = operands.left, *right = operands.right;
  if (runs == Runs::if_swapped) std::swap(left, right);
  kernel<<<dim3(blocks, parts == nullptr ? 1 : chunks), kThreads, bytes, stream>>>(
      p, static_cast<const typename L::Left*>(left), static_cast<const typename L::Right*>(right),
      operands.flags, runs, row_tiles, column_tiles, parts);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Calls f with the tile of the least cost.
template <typename... Tiles, typename F>
void with_tile(const Product& p, int multiprocessors, const F& f) {
  const double costs[]{cost<Tiles>(p, multiprocessors)...};
  const auto least = std::min_element(std::begin(costs), std::end(costs)) - std::begin(costs);
  int n = 0;
  ((n++ == least ? f(Tiles{}) : void()), ...);
}

}  // namespace

template <typename Multiplier>
void Gemm<Multiplier>::run(const Product& p, const Tensor& like, cudaStream_t stream) {
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  // Tiles have more columns than rows, but only rows that are zero can be skipped. Whether a left
  // operand with more rows than the right one is sparse, the kernel that packs it finds out.
  const bool swap = p.M > p.N;
  const bool may_swap = swap && p.left_may_be_sparse && p.N % 64 == 0 && Lane<Multiplier>::kPacked;
  const Product usual = swap ? p.swapped() : p;
  const Packed<Lane<Multiplier>> operands(may_swap ? p : usual, may_swap, like, stream);
  with_tile<Tile<16, 4, 4, 3>, Tile<8, 4, 4, 3>, Tile<8, 4, 4, 4>, Tile<4, 4, 4, 3>,
            Tile<2, 1, 4, 4>>(usual, multiprocessors, [&](auto tile) {
    const int64_t chunks = ceil_div(p.K, kChunk), size = p.batch * p.M * p.N;
    const bool divided = divides<decltype(tile)>(usual, multiprocessors);
    Tensor memory = make_tensor(like, {divided ? chunks * size : 0});
    auto* parts = divided ? static_cast<float*>(memory.mutable_data_ptr()) : nullptr;
    multiply<Multiplier, decltype(tile)>(usual, operands,
                                         may_swap ? Runs::if_swapped : Runs::always, parts, stream);
    if (may_swap)
      with_tile<Tile<8, 4, 4, 4>, Tile<8, 2, 4, 6>>(p, multiprocessors, [&](auto skipping) {
        multiply<Multiplier, decltype(skipping)>(p, operands, Runs::if_not_swapped, parts, stream);
      });
    if (!divided) return;
    add_chunks<<<std::min<int64_t>(ceil_div(size, kThreads), kMostAddBlocks), kThreads, 0,
                 stream>>>(parts, chunks, size, p.out.data);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace hoconv::approx
