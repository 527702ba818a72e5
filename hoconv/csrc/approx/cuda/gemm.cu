// The matrix product whose multiplications are approximate; every convolution and its gradients are
// one, of views (view.cuh).
//
// Both operands are prepared first (lanes.cuh), where they lie. A block owns a tile of the result.
// Of kDepth k at a time, a slab, what was prepared is copied to shared memory (slab.cuh) while the
// slabs before are multiplied (products.cuh); a thread owns rows and columns of the tile and keeps
// their sums in registers.
//
// The sum over k is cut into chunks, which are added in ascending order (problem.h). Where there
// are few tiles, chunks are divided among blocks and added by a second kernel.
//
// M, N rows and columns of the result, K what is summed over.

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <string>
#include <utility>

#include "approx/cuda/products.cuh"
#include "approx/problem.h"

namespace hoconv::approx {
namespace {

// blockIdx.x: tiles, of all matrices after each other; blockIdx.y: chunks, if they are divided:
// then each has a result of its own in `parts`.
template <typename Multiplier, typename T>
__global__ void __launch_bounds__(kThreads, T::blocks)
    multiply_matrices(const __grid_constant__ Product p,
                      const typename Lane<Multiplier>::Left* left_words,
                      const typename Lane<Multiplier>::Right* right_words, int64_t row_tiles,
                      int64_t column_tiles, float* parts) {
  using L = Lane<Multiplier>;
  using S = Slab<Multiplier, T>;
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<Shared<Multiplier, T>*>(memory);
  const int64_t tile = blockIdx.x, matrix = tile / column_tiles / row_tiles;
  const int64_t first_row = tile / column_tiles % row_tiles * T::rows;
  const int64_t first_column = tile % column_tiles * T::columns;
  for (int n = threadIdx.x; n < T::rows; n += kThreads) {
    const int64_t row = first_row + n;
    const bool exists = row < p.M;
    shared.rows[n] = exists ? p.left.row_part(row) : nowhere();
    shared.out_rows[n] = exists ? Target::offset(p.out.row_digits, p.out.row, row) : -1;
  }
  for (int n = threadIdx.x; n < T::columns; n += kThreads) {
    const int64_t column = first_column + n;
    const bool exists = column < p.N;
    shared.columns[n] = exists ? p.right.row_part(column) : nowhere();
    shared.out_columns[n] = exists ? Target::offset(p.out.column_digits, p.out.column, column) : -1;
  }
  const Reader<typename L::Left, T::rows, S::left_pitch> left(p.left, left_words, matrix,
                                                              shared.rows, shared.depths[0]);
  const Reader<typename L::Right, T::columns, S::right_pitch> right(
      p.right, right_words, matrix, shared.columns, shared.depths[1]);

  int my_row = T::first_row(), my_column = T::first_column();
  asm volatile("" : "+r"(my_row), "+r"(my_column));  // kept: threadIdx takes long to read

  // A thread finds out where the elements of a column are, for all.
  const auto find = [&](int64_t chunk, int first, int depth) {
    const int operand = threadIdx.x / kFound, d = first + threadIdx.x % kFound;
    if (operand >= 2) return;
    const View& view = operand == 0 ? p.left : p.right;
    shared.depths[operand][d % (2 * kFound)] = d < depth ? view.column_part(chunk + d) : nowhere();
  };
  const auto load = [&](int d, S& slab) {
    typename decltype(left)::Place of_left[decltype(left)::each];
    typename decltype(right)::Place of_right[decltype(right)::each];
    // All that is read of shared memory first: no read may overtake a copy to it.
    left.find(d % (2 * kFound), of_left), right.find(d % (2 * kFound), of_right);
    left.load(of_left, slab.left), right.load(of_right, slab.right);
    asm volatile("cp.async.commit_group;");
  };
  // Waits for a slab, all but the last that was begun.
  enum Numbers { kPlain, kZeros, kStrained };
  const auto arrived = [&](const S& slab) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    uint32_t strain = 0;
    bool zeros = false;
    left.visit(slab.left, [&](const auto& word) { strain = max(strain, L::strain(word)); });
    right.visit(slab.right, [&](const auto& word) {
      strain = max(strain, L::strain(word)), zeros |= L::zero(word);
    });
    const bool strained = strain > L::kPlain;
    if (!__syncthreads_or(strained || zeros)) return kPlain;
    return __syncthreads_or(strained) ? kStrained : kZeros;
  };

  const int64_t begin = parts == nullptr ? 0 : blockIdx.y * kChunk;
  const int64_t end = parts == nullptr ? p.K : min(begin + kChunk, p.K);
  for (int64_t chunk = begin; chunk < max(end, int64_t{1}); chunk += kChunk) {
    const int depth = min(kChunk, end - chunk);
    float sum[T::R][T::C] = {};
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();  // the slabs of the chunk before are read and written no longer
    find(chunk, 0, depth);
    __syncthreads();
    load(0, shared.slabs[0]);
    load(kDepth, shared.slabs[1]);
    Numbers numbers = arrived(shared.slabs[0]);
    int turn = 0;
    for (int d = 0; d < depth; d += kDepth) {
      if (d % kFound == 0) find(chunk, d + kFound, depth);
      const int next = turn + 1 == kSlabs ? 0 : turn + 1;
      load(d + 2 * kDepth, shared.slabs[next + 1 == kSlabs ? 0 : next + 1]);
      if (numbers == kPlain) {
        add_prepared<false, Multiplier, T>(sum, shared.slabs[turn], my_row, my_column);
      } else if (numbers == kZeros) {
        add_prepared<true, Multiplier, T>(sum, shared.slabs[turn], my_row, my_column);
      } else {
        float copy[T::R][T::C];
#pragma unroll
        for (int i = 0; i < T::R; ++i)
#pragma unroll
          for (int j = 0; j < T::C; ++j) copy[i][j] = sum[i][j];
        add_strained<Multiplier, T>(copy, shared, turn, p, matrix, first_row, first_column,
                                    chunk + d, chunk + depth);
#pragma unroll
        for (int i = 0; i < T::R; ++i)
#pragma unroll
          for (int j = 0; j < T::C; ++j) sum[i][j] = copy[i][j];
      }
      numbers = arrived(shared.slabs[next]);
      turn = next;
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

template <typename L, typename Word>
__global__ void prepare_operand(const float* from, int64_t size, Word* to) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += step)
    L::prepare(to[i], from[i]);
}

int64_t tiles(int64_t size, int64_t of) { return (size + of - 1) / of; }

template <typename T>
int64_t tiles_of(const Product& p) {
  return p.batch * tiles(p.M, T::rows) * tiles(p.N, T::columns);
}
// Whether chunks are divided among blocks.
template <typename T>
bool divides(const Product& p, int multiprocessors) {
  const int64_t chunks = tiles(p.K, kChunk);
  return chunks > 1 && tiles_of<T>(p) < 2 * T::blocks * multiprocessors && chunks <= 65535;
}

// What a product costs with a tile, in instructions of the multiprocessor that has most to do:
// three for each of its products, those that load operands, and about 20 to copy one. Blocks start
// in rounds; those of a last chunk, which is shorter, where others are done.
template <typename T>
double cost(const Product& p, int multiprocessors) {
  const double of_depth =
      double(T::rows) * T::columns * (3 + 1.0 / T::R + 1.0 / T::C) + 20.0 * (T::rows + T::columns);
  const bool divided = divides<T>(p, multiprocessors);
  const int64_t blocks = tiles_of<T>(p) * (divided ? p.K / kChunk : 1);
  const int64_t together = std::min<int64_t>(T::blocks, tiles(blocks, multiprocessors));
  const int64_t rounds = tiles(blocks, together * multiprocessors);
  const double share = double(tiles_of<T>(p)) * p.K / multiprocessors;
  return of_depth * std::max(share, double(rounds * together * (divided ? kChunk : p.K)));
}

Tensor floats(const Tensor& like, int64_t count) {
  const std::array<int64_t, 1> size{count};
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(size));
}

// An operand as its products take it, at the same places.
template <typename L, typename Word>
struct Prepared {
  Tensor memory;
  const Word* words;

  Prepared(const View& view, const Tensor& like, cudaStream_t stream)
      : memory(floats(like, L::kPrepared ? view.span * 2 : 0)),
        words(reinterpret_cast<const Word*>(view.data)) {
    if constexpr (L::kPrepared) {
      static_assert(sizeof(Word) == 2 * sizeof(float));
      auto* to = reinterpret_cast<Word*>(memory.mutable_data_ptr());
      words = to;
      if (view.span == 0) return;
      prepare_operand<L>
          <<<std::min<int64_t>(tiles(view.span, kThreads), 4096), kThreads, 0, stream>>>(
              view.data, view.span, to);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
  }
};

template <typename Multiplier, typename T>
void launch(const Product& p, const Tensor& like, int multiprocessors, cudaStream_t stream) {
  using L = Lane<Multiplier>;
  const auto kernel = multiply_matrices<Multiplier, T>;
  constexpr int bytes = sizeof(Shared<Multiplier, T>);
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const int64_t row_tiles = tiles(p.M, T::rows), column_tiles = tiles(p.N, T::columns);
  const int64_t blocks = tiles_of<T>(p), chunks = tiles(p.K, kChunk);
  STD_TORCH_CHECK(blocks < (int64_t{1} << 31), "the result: too large");
  const Prepared<L, typename L::Left> left(p.left, like, stream);
  const Prepared<L, typename L::Right> right(p.right, like, stream);
  const bool divided = divides<T>(p, multiprocessors);
  const int64_t size = p.batch * p.M * p.N;
  Tensor parts = floats(like, divided ? chunks * size : 0);
  auto* data = divided ? static_cast<float*>(parts.mutable_data_ptr()) : nullptr;
  kernel<<<dim3(blocks, divided ? chunks : 1), kThreads, bytes, stream>>>(
      p, left.words, right.words, row_tiles, column_tiles, data);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (!divided) return;
  add_chunks<<<std::min<int64_t>(tiles(size, kThreads), 4096), kThreads, 0, stream>>>(
      data, chunks, size, p.out.data);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Calls f with the tile that costs least.
template <typename... Tiles, typename F>
void with_tile(const Product& p, int multiprocessors, const F& f) {
  const double costs[]{cost<Tiles>(p, multiprocessors)...};
  const auto least = std::min_element(std::begin(costs), std::end(costs)) - std::begin(costs);
  int n = 0;
  ((n++ == least ? f(Tiles{}) : void()), ...);
}

}  // namespace

void gemm(const std::string& multiplier, Product p, const Tensor& like, cudaStream_t stream) {
  if (p.batch * p.M * p.N == 0) return;
  STD_TORCH_CHECK(p.M < (int64_t{1} << 31) && p.N < (int64_t{1} << 31) && p.K < (int64_t{1} << 31),
                  "a product's rows, columns and depth: expected less than 2^31 each");
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  // Fewer rows than columns; products of these multipliers do not depend on the operands' order.
  if (p.M > p.N) {
    std::swap(p.left, p.right);
    std::swap(p.M, p.N);
    std::swap(p.out.row, p.out.column);
    std::swap(p.out.row_digits, p.out.column_digits);
  }
  with_multiplier(multiplier, [&](auto definition) {
    with_tile<Tile<16, 8, 8>, Tile<8, 8, 8>, Tile<8, 4, 4>, Tile<4, 4, 4>>(
        p, multiprocessors, [&](auto tile) {
          launch<decltype(definition), decltype(tile)>(p, like, multiprocessors, stream);
        });
  });
}

}  // namespace hoconv::approx
