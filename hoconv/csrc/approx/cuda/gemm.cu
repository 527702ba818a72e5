// The matrix product whose multiplications are approximate; every convolution and its gradients are
// one, of views (view.cuh).
//
// A block owns a tile of the result. Of kDepth k at a time, a slab, both operands are copied from
// memory while the ones before are multiplied, and then prepared (lanes.cuh); a thread owns rows
// and columns of the tile and keeps their sums in registers. Where the exponents of a slab do not
// allow the prepared form, the definition is called instead, one product at a time: the same bits.
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

// kDepth rows of each operand, prepared; + 1 spreads depths over the banks.
template <typename Multiplier, typename T>
struct Slab {
  using L = Lane<Multiplier>;
  static constexpr int left_pitch = T::rows + 1, right_pitch = T::columns + 1;
  alignas(16) typename L::Left left[kDepth * left_pitch];
  alignas(16) typename L::Right right[kDepth * right_pitch];
};
template <typename Multiplier, typename T>
struct Shared {
  Slab<Multiplier, T> slabs[2];
  Part rows[T::rows], columns[T::columns];             // of the tile
  Part depths[2][2 * kFound];                          // of the left and the right operand, in turn
  int64_t out_rows[T::rows], out_columns[T::columns];  // in the result; -1: outside of it
  float raw[kDepth * (T::rows + T::columns)];          // on their way from memory
  int range[4];
};

// Of a row or column that does not exist.
__device__ __forceinline__ Part nowhere() { return {0, -(1 << 30), -(1 << 30), 0}; }

// What a thread reads of an operand: kDepth columns k of `count` rows, whichever lie next to each
// other for neighbouring threads. The thread's elements are all in one of its columns, or one of
// its rows.
template <int count>
struct Reader {
  static constexpr int each = (count * kDepth + kThreads - 1) / kThreads;
  static_assert(kThreads % count == 0 && kThreads % kDepth == 0);
  const float* data;
  const View& view;
  const Part *fixed, *moving;   // of the first element
  int fixed_turn, moving_turn;  // 1 where it is a depth
  int step;                     // of `moving`, from element to element
  float* raw;
  int row, depth, row_step, depth_step;

  __device__ Reader(const View& view, int64_t matrix, const Part* rows, const Part* depths,
                    float* raw)
      : data(view.data + matrix * view.batch), view(view), raw(raw + threadIdx.x) {
    const bool along = view.along_columns;
    row = along ? threadIdx.x / kDepth : threadIdx.x % count;
    depth = along ? threadIdx.x % kDepth : threadIdx.x / count;
    row_step = along ? kThreads / kDepth : 0, depth_step = along ? 0 : kThreads / count;
    fixed = along ? depths + depth : rows + row, moving = along ? rows + row : depths + depth;
    fixed_turn = along, moving_turn = !along;
    step = row_step + depth_step;
  }
  // Whether there is an n-th element.
  __device__ static bool has(int n) {
    return n * kThreads + kThreads <= count * kDepth || threadIdx.x < count * kDepth;
  }
  // Starts to. What does not exist is zero; where it matters that it is left out, see add_special.
  __device__ __forceinline__ void load(int first_depth) {
    const Part at = fixed[first_depth * fixed_turn];
    const Part* with = moving + first_depth * moving_turn;
#pragma unroll
    for (int n = 0; n < each; ++n) {
      if (!has(n)) break;
      int64_t offset;
      const bool exists = view.find(at, with[n * step], offset);
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(
                       static_cast<unsigned>(__cvta_generic_to_shared(raw + n * kThreads))),
                   "l"(data + offset), "r"(exists ? 4 : 0));
    }
  }
  // Prepares what has arrived: f(its row, its depth, the value).
  template <typename F>
  __device__ __forceinline__ void prepare(const F& f) const {
#pragma unroll
    for (int n = 0; n < each; ++n)
      if (has(n)) f(row + n * row_step, depth + n * depth_step, raw[n * kThreads]);
  }
};

// The products of a slab as they were prepared.
template <typename Multiplier, typename T>
__device__ __forceinline__ void add_prepared(float (&sum)[T::R][T::C],
                                             const Slab<Multiplier, T>& slab, int first_row,
                                             int first_column) {
  using L = Lane<Multiplier>;
  using S = Slab<Multiplier, T>;
  const typename L::Left* left = slab.left + first_row;
  const typename L::Right* right = slab.right + first_column;
#pragma unroll 1  // the registers hold one depth
  for (int d = 0; d < kDepth; ++d) {
    typename L::Right y[T::C];
#pragma unroll
    for (int j = 0; j < T::C; ++j) y[j] = right[d * S::right_pitch + T::column(j)];
    const auto add_rows = [&](int first, const typename L::Left(&x)[2], auto is_large) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < T::C; ++j)
          L::template add<is_large.value>(sum[first + i][j], x[i], y[j]);
    };
#pragma unroll
    for (int i = 0; i < T::R; i += 2) {
      const auto* at = left + d * S::left_pitch + T::row(i);
      const typename L::Left x[]{at[0], at[1]};
      if (__any_sync(~0u, L::large(x[0]) || L::large(x[1])))
        add_rows(i, x, std::true_type{});
      else
        add_rows(i, x, std::false_type{});
    }
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
    add_prepared<Multiplier, T>(sum, slab, T::first_row(), T::first_column());
  else
    add_defined<Multiplier, T>(sum, slab);
}

// blockIdx.x: tiles, of all matrices after each other; blockIdx.y: chunks, if they are divided:
// then each has a result of its own in `parts`.
template <typename Multiplier, typename T>
__global__ void __launch_bounds__(kThreads, T::blocks)
    multiply_matrices(const __grid_constant__ Product p, int64_t row_tiles, int64_t column_tiles,
                      float* parts) {
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
  Reader<T::rows> left(p.left, matrix, shared.rows, shared.depths[0], shared.raw);
  Reader<T::columns> right(p.right, matrix, shared.columns, shared.depths[1],
                           shared.raw + kDepth * T::rows);

  int my_row = T::first_row(), my_column = T::first_column();
  asm volatile("" : "+r"(my_row), "+r"(my_column));  // kept: threadIdx takes long to read

  // A thread finds out where the elements of a column are, for all.
  const auto find = [&](int64_t chunk, int first, int depth) {
    const int operand = threadIdx.x / kFound, d = first + threadIdx.x % kFound;
    if (operand >= 2) return;
    const View& view = operand == 0 ? p.left : p.right;
    shared.depths[operand][d % (2 * kFound)] = d < depth ? view.column_part(chunk + d) : nowhere();
  };
  const auto load = [&](int d) { left.load(d % (2 * kFound)), right.load(d % (2 * kFound)); };
  // Whether all numbers are plain.
  const auto store = [&](S& slab) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    uint32_t strain = 0;
    left.prepare([&](int row, int depth, float value) {
      slab.left[depth * S::left_pitch + row] = L::left(value);
      strain = max(strain, L::strain(value));
    });
    right.prepare([&](int row, int depth, float value) {
      slab.right[depth * S::right_pitch + row] = L::right(value);
      strain = max(strain, L::strain(value));
    });
    return strain <= L::kPlain;
  };

  const int64_t begin = parts == nullptr ? 0 : blockIdx.y * kChunk;
  const int64_t end = parts == nullptr ? p.K : min(begin + kChunk, p.K);
  for (int64_t chunk = begin; chunk < max(end, int64_t{1}); chunk += kChunk) {
    const int depth = min(kChunk, end - chunk);
    float sum[T::R][T::C] = {};
    find(chunk, 0, depth);
    __syncthreads();
    load(0);
    bool strained = __syncthreads_or(!store(shared.slabs[0]));
    int turn = 0;
    for (int d = 0; d < depth; d += kDepth, turn ^= 1) {
      if (d % kFound == 0) find(chunk, d + kFound, depth);
      load(d + kDepth);
      if (strained) {
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
      } else {
        add_prepared<Multiplier, T>(sum, shared.slabs[turn], my_row, my_column);
      }
      strained = __syncthreads_or(!store(shared.slabs[turn ^ 1]));
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

int64_t tiles(int64_t size, int64_t of) { return (size + of - 1) / of; }

// What a product costs with a tile, in instructions: three for each of its products, those that
// load operands, and about 45 to prepare one. A multiprocessor's share, and half a block for what
// is uneven.
template <typename T>
double cost(const Product& p, int multiprocessors, bool divided) {
  const double blocks = double(p.batch) * tiles(p.M, T::rows) * tiles(p.N, T::columns);
  const double of_depth =
      double(T::rows) * T::columns * (3 + 1.0 / T::R + 1.0 / T::C) + 45.0 * (T::rows + T::columns);
  const double share = std::max(blocks * tiles(p.K, kDepth) / multiprocessors, 1.0);
  return of_depth * (share + 0.5 * tiles(divided ? std::min(p.K, kChunk) : p.K, kDepth));
}
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

template <typename Multiplier, typename T>
void launch(const Product& p, const Tensor& like, int multiprocessors, cudaStream_t stream) {
  const auto kernel = multiply_matrices<Multiplier, T>;
  constexpr int bytes = sizeof(Shared<Multiplier, T>);
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const int64_t row_tiles = tiles(p.M, T::rows), column_tiles = tiles(p.N, T::columns);
  const int64_t blocks = tiles_of<T>(p), chunks = tiles(p.K, kChunk);
  STD_TORCH_CHECK(blocks < (int64_t{1} << 31), "the result: too large");
  if (!divides<T>(p, multiprocessors)) {
    kernel<<<blocks, kThreads, bytes, stream>>>(p, row_tiles, column_tiles, nullptr);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
  const int64_t size = p.batch * p.M * p.N;
  const std::array<int64_t, 1> floats{chunks * size};
  Tensor parts = torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(floats));
  auto* data = static_cast<float*>(parts.mutable_data_ptr());
  kernel<<<dim3(blocks, chunks), kThreads, bytes, stream>>>(p, row_tiles, column_tiles, data);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  add_chunks<<<std::min<int64_t>(tiles(size, kThreads), 4096), kThreads, 0, stream>>>(
      data, chunks, size, p.out.data);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Calls f with the tile that costs least.
template <typename... Tiles, typename F>
void with_tile(const Product& p, int multiprocessors, const F& f) {
  const double costs[]{cost<Tiles>(p, multiprocessors, divides<Tiles>(p, multiprocessors))...};
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
