// The matrix product whose multiplications are approximate; every convolution and its gradients are
// one, of views (view.cuh).
//
// Both operands are prepared first (lanes.cuh), where they lie. A block owns a tile of the result.
// Of kDepth k at a time, a slab, what was prepared is copied to shared memory while the slabs
// before are multiplied; a thread owns rows and columns of the tile and keeps their sums in
// registers. Where the exponents of a slab do not allow the prepared form, the definition is called
// instead, one product at a time: the same bits.
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

#include "approx/cuda/lanes.cuh"
#include "approx/problem.h"

namespace hoconv::approx {
namespace {

constexpr int kDepth = 8;
constexpr int kFound = 64;  // depths whose places are found out at a time

constexpr int kThreads = 256;

// A tile of rows x columns. The lanes of a warp share its rows, and each has every 32nd column.
template <int thread_rows, int thread_columns, int warp_rows>
struct Tile {
  static constexpr int R = thread_rows, C = thread_columns;
  static constexpr int warp_columns = kThreads / 32 / warp_rows;
  static constexpr int rows = R * warp_rows, columns = 32 * C * warp_columns;
  static constexpr int group = R * C > 64 ? 4 : 2;
  // On a multiprocessor, of as many registers as the sums and a depth of operands need.
  static constexpr int blocks = R * C > 64 ? 1 : 2;

  __device__ static int first_row() { return threadIdx.x / 32 / warp_columns * R; }
  __device__ static int first_column() {
    return threadIdx.x / 32 % warp_columns * 32 * C + threadIdx.x % 32;
  }
  // From the first.
  static constexpr int row(int i) { return i; }
  static constexpr int column(int j) { return 32 * j; }
};

// Rows of a left operand that are read, and looked at, at once.
template <typename Left, int n>
struct alignas(2 * sizeof(Left)) Group {
  Left row[n];
};

// kDepth rows of each operand, prepared; the padding spreads depths over the banks.
template <typename Multiplier, typename T>
struct Slab {
  using L = Lane<Multiplier>;
  static constexpr int left_pitch = T::rows + 2, right_pitch = T::columns + 1;
  // One depth more, which is read but not used.
  alignas(16) typename L::Left left[(kDepth + 1) * left_pitch];
  alignas(16) typename L::Right right[(kDepth + 1) * right_pitch];
};
constexpr int kSlabs = 3;  // one multiplied, one there, one on its way
template <typename Multiplier, typename T>
struct Shared {
  Slab<Multiplier, T> slabs[kSlabs];
  Part rows[T::rows], columns[T::columns];             // of the tile
  Part depths[2][2 * kFound];                          // of the left and the right operand, in turn
  int64_t out_rows[T::rows], out_columns[T::columns];  // in the result; -1: outside of it
  int range[4];
};

// Of a row or column that does not exist.
__device__ __forceinline__ Part nowhere() { return {0, -(1 << 30), -(1 << 30), 0}; }

// What a thread reads of an operand: kDepth columns k of `count` rows, whichever lie next to each
// other for neighbouring threads. The thread's elements are all in one of its columns, or one of
// its rows. Element (row, depth) goes to depth * pitch + row.
template <typename Word, int count, int pitch>
struct Reader {
  static constexpr int each = (count * kDepth + kThreads - 1) / kThreads;
  static_assert(kThreads % count == 0 && kThreads % kDepth == 0);
  const Word* data;
  const View& view;
  const Part *fixed, *moving;   // of the first element
  int fixed_turn, moving_turn;  // 1 where it is a depth
  int step;                     // of `moving`, from element to element
  int first, stride;            // where they go

  __device__ Reader(const View& view, const Word* words, int64_t matrix, const Part* rows,
                    const Part* depths)
      : data(words + matrix * view.batch), view(view) {
    const bool along = view.along_columns;
    const int row = along ? threadIdx.x / kDepth : threadIdx.x % count;
    const int depth = along ? threadIdx.x % kDepth : threadIdx.x / count;
    fixed = along ? depths + depth : rows + row, moving = along ? rows + row : depths + depth;
    fixed_turn = along, moving_turn = !along;
    step = along ? kThreads / kDepth : kThreads / count;
    first = depth * pitch + row, stride = along ? step : step * pitch;
  }
  // Whether there is an n-th element.
  __device__ static bool has(int n) {
    return n * kThreads + kThreads <= count * kDepth || threadIdx.x < count * kDepth;
  }
  struct Place {
    const Word* from;
    int bytes;  // 0 where there is no element
  };
  __device__ __forceinline__ void find(int first_depth, Place (&places)[each]) const {
    const Part at = fixed[first_depth * fixed_turn];
    const Part* with = moving + first_depth * moving_turn;
#pragma unroll
    for (int n = 0; n < each; ++n) {
      if (!has(n)) break;
      int64_t offset;
      const bool exists = view.find(at, with[n * step], offset);
      places[n] = {data + offset, exists ? int{sizeof(Word)} : 0};
    }
  }
  // Starts to. What does not exist is zero; where it matters that it is left out, see add_special.
  __device__ __forceinline__ void load(const Place (&places)[each], Word* to) const {
#pragma unroll
    for (int n = 0; n < each; ++n) {
      if (!has(n)) break;
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(
                       static_cast<unsigned>(__cvta_generic_to_shared(to + first + n * stride))),
                   "l"(places[n].from), "n"(sizeof(Word)), "r"(places[n].bytes));
    }
  }
  // f(each that has arrived)
  template <typename F>
  __device__ __forceinline__ void visit(const Word* at, const F& f) const {
#pragma unroll
    for (int n = 0; n < each; ++n)
      if (has(n)) f(at[first + n * stride]);
  }
};

// A column as a thread multiplies it; `zeros`: where it may be a zero, it is said once a number and
// not once a product.
template <bool zeros, typename L>
struct Column {
  typename L::Right word;
  float exists;
  Column() = default;
  __device__ explicit Column(const typename L::Right& word) : word(word) {
    if constexpr (zeros) {
      exists = L::zero(word) ? 0.0f : 1.0f;
      asm volatile("" : "+f"(exists));
    }
  }
};

// Which groups of rows need care, a bit each: of the first depth's groups, then the second's. A
// lane looks at a group, for its warp.
template <typename L, typename T, int pitch>
__device__ __forceinline__ unsigned careful_groups(const typename L::Left* left) {
  if constexpr (!L::kPrepared) return 0;
  constexpr int groups = T::R / T::group;
  static_assert(groups * kDepth <= 32);
  const int lane = threadIdx.x % 32, depth = lane / groups % kDepth;
  const auto& rows = *reinterpret_cast<const Group<typename L::Left, T::group>*>(
      left + depth * pitch + T::row(lane % groups * T::group));
  bool careful = false;
#pragma unroll
  for (int r = 0; r < T::group; ++r) careful |= L::zero(rows.row[r]) || L::large(rows.row[r]);
  return __ballot_sync(~0u, careful);
}

// The products of a slab as they were prepared; `zeros`: some of the right operand may be.
template <bool zeros, typename Multiplier, typename T>
__device__ __forceinline__ void add_prepared(float (&sum)[T::R][T::C],
                                             const Slab<Multiplier, T>& slab, int first_row,
                                             int first_column) {
  using L = Lane<Multiplier>;
  using S = Slab<Multiplier, T>;
  using Rows = Group<typename L::Left, T::group>;
  constexpr int G = T::group;
  const typename L::Left* left = slab.left + first_row;
  const typename L::Right* right = slab.right + first_column;
  unsigned careful = careful_groups<L, T, S::left_pitch>(left);
  // Operands are read long before they are needed: those of a group of rows while the group before
  // is multiplied, and the next depth's columns as soon as the last group is done with the present
  // ones.
  Column<zeros, L> y[T::C];
#pragma unroll
  for (int j = 0; j < T::C; ++j) y[j] = Column<zeros, L>(right[T::column(j)]);
  Rows x = *reinterpret_cast<const Rows*>(left);
#pragma unroll 1  // the registers hold one depth
  for (int d = 0; d < kDepth; ++d) {
    right += S::right_pitch;
#pragma unroll
    for (int i = 0; i < T::R; i += G) {
      const bool last = i + G == T::R;
      if (last) left += S::left_pitch;
      const Rows next = *reinterpret_cast<const Rows*>(left + T::row(last ? 0 : i + G));
      if (__builtin_expect(careful & 1u << i / G, 0)) {
#pragma unroll
        for (int r = 0; r < G; ++r) {
          const auto add_row = [&](auto is_large) {
#pragma unroll
            for (int j = 0; j < T::C; ++j)
              L::template add<is_large.value, zeros>(sum[i + r][j], x.row[r], y[j].word,
                                                     y[j].exists);
          };
          if (L::zero(x.row[r])) continue;  // for all lanes, as the rest
          if (L::large(x.row[r]))
            add_row(std::true_type{});
          else
            add_row(std::false_type{});
        }
        if (last)
#pragma unroll
          for (int j = 0; j < T::C; ++j) y[j] = Column<zeros, L>(right[T::column(j)]);
      } else {
#pragma unroll
        for (int j = 0; j < T::C; ++j) {
#pragma unroll
          for (int r = 0; r < G; ++r)
            L::template add<false, zeros>(sum[i + r][j], x.row[r], y[j].word, y[j].exists);
          if (last) y[j] = Column<zeros, L>(right[T::column(j)]);
        }
      }
      x = next;
    }
    careful >>= T::R / G;
  }
}

// By the definition, of what was prepared.
template <typename Multiplier, typename T>
__device__ void add_defined(float (&sum)[T::R][T::C], const Slab<Multiplier, T>& slab) {
  using L = Lane<Multiplier>;
  using S = Slab<Multiplier, T>;
  for (int d = 0; d < kDepth; ++d)
    for (int i = 0; i < T::R; ++i) {
      const float x = L::original(slab.left[d * S::left_pitch + T::first_row() + T::row(i)]);
      for (int j = 0; j < T::C; ++j) {
        const float y =
            L::original(slab.right[d * S::right_pitch + T::first_column() + T::column(j)]);
        sum[i][j] = __fadd_rn(sum[i][j], Multiplier::multiply(x, y));
      }
    }
}

// By the definition, of the operands as they came: with infinities and NaN, and without what is
// left out.
template <typename Multiplier, typename T>
__device__ void add_special(float (&sum)[T::R][T::C], const Product& p, int64_t matrix,
                            int64_t first_row, int64_t first_column, int64_t k, int64_t last) {
  for (int d = 0; d < kDepth && k + d < last; ++d) {
    const Part part_a = p.left.column_part(k + d), part_b = p.right.column_part(k + d);
    for (int i = 0; i < T::R; ++i)
      for (int j = 0; j < T::C; ++j) {
        const int64_t m = first_row + T::first_row() + T::row(i);
        const int64_t n = first_column + T::first_column() + T::column(j);
        if (m >= p.M || n >= p.N) continue;
        const float x = p.left(matrix, p.left.row_part(m), part_a);
        const float y = p.right(matrix, p.right.row_part(n), part_b);
        const bool left_out = (p.left.leaves_out && float_bits(x) == INT32_MIN) ||
                              (p.right.leaves_out && float_bits(y) == INT32_MIN);
        if (!left_out) sum[i][j] = __fadd_rn(sum[i][j], Multiplier::multiply(x, y));
      }
  }
}

// Adds a slab whose numbers are not all plain. By a call: its sums are in memory, so that they can
// stay in registers elsewhere.
template <typename Multiplier, typename T>
__device__ __noinline__ void add_strained(float (&sum)[T::R][T::C], Shared<Multiplier, T>& shared,
                                          int turn, const Product& p, int64_t matrix,
                                          int64_t first_row, int64_t first_column, int64_t k,
                                          int64_t last) {
  using L = Lane<Multiplier>;
  using S = Slab<Multiplier, T>;
  const S& slab = shared.slabs[turn];
  if (threadIdx.x < 4) shared.range[threadIdx.x] = threadIdx.x % 2 ? 0 : 255;
  __syncthreads();
  Range range[2];
  for (int n = threadIdx.x; n < kDepth * T::rows; n += kThreads)
    range[0].take(L::original(slab.left[n / T::rows * S::left_pitch + n % T::rows]));
  for (int n = threadIdx.x; n < kDepth * T::columns; n += kThreads)
    range[1].take(L::original(slab.right[n / T::columns * S::right_pitch + n % T::columns]));
  for (int n = 0; n < 2; ++n) {
    atomicMin(&shared.range[2 * n], range[n].least);
    atomicMax(&shared.range[2 * n + 1], range[n].most);
  }
  __syncthreads();
  const Range a{shared.range[0], shared.range[1]}, b{shared.range[2], shared.range[3]};
  if (a.special() || b.special())
    add_special<Multiplier, T>(sum, p, matrix, first_row, first_column, k, last);
  else if (L::holds(a, b) || a.most == 0 || b.most == 0)
    add_prepared<true, Multiplier, T>(sum, slab, T::first_row(), T::first_column());
  else
    add_defined<Multiplier, T>(sum, slab);
}

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
