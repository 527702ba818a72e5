// The matrix product whose multiplications are approximate; every convolution and its gradients are
// one, of views (view.cuh).
//
// A block owns a tile of the result. Of kDepth k at a time both operands are read, prepared
// (lanes.cuh) and put into shared memory, while the ones before are multiplied; a thread owns rows
// and columns of the tile and keeps their sums in registers. Where the exponents of the operands
// do not allow the prepared form, the definition is called instead, one product at a time: the same
// bits.
//
// The sum over k is cut into chunks, which are added in ascending order (problem.h). Where there
// are few tiles, chunks are divided among blocks and added by a second kernel.
//
// M, N rows and columns of the result, K what is summed over.

#include <torch/csrc/stable/ops.h>

#include <array>
#include <string>
#include <utility>

#include "approx/cuda/lanes.cuh"
#include "approx/problem.h"

namespace hoconv::approx {
namespace {

constexpr int kThreads = 512, kDepth = 16;

// A tile of rows x columns; of a warp's lanes 4 are next to each other in a column, 8 in a row.
template <int thread_rows, int thread_columns, int warp_rows>
struct Tile {
  static constexpr int R = thread_rows, C = thread_columns;
  static constexpr int warps_across = kThreads / 32 / warp_rows;
  static constexpr int rows = 4 * R * warp_rows, columns = 8 * C * warps_across;
};

// What a thread reads of an operand, kDepth columns k of `count` rows: one k of some rows, or some
// k of one row, whichever lie next to each other for neighbouring threads.
template <int count>
struct Reader {
  static constexpr int each = count * kDepth / kThreads;
  static_assert(each * kThreads == count * kDepth);
  const View& view;
  const float* matrix;
  Part part[each];                      // of its rows
  unsigned rows_exist = 0, exists = 0;  // a bit for each element
  float value[each];

  __device__ Reader(const View& view, int64_t n, int64_t first_row, int64_t row_count)
      : view(view), matrix(view.data + n * view.batch) {
#pragma unroll
    for (int n = 0; n < each; ++n) {
      const int64_t at = first_row + row(n);
      rows_exist |= (at < row_count) << n;
      part[n] = view.part(view.row, min(at, row_count - 1));
    }
  }
  // Of the n-th element.
  __device__ int row(int n) const {
    return view.along_columns ? threadIdx.x / kDepth + n * (kThreads / kDepth)
                              : threadIdx.x % count;
  }
  __device__ int depth(int n) const {
    return view.along_columns ? threadIdx.x % kDepth : threadIdx.x / count + n * (kThreads / count);
  }
  __device__ void load(int64_t k, int64_t last) {
    exists = 0;
#pragma unroll
    for (int n = 0; n < each; ++n) value[n] = 0;
    if (view.along_columns) {
      const int64_t at = k + depth(0);
      const Part column = view.part(view.column, at);
#pragma unroll
      for (int n = 0; n < each; ++n)
        if (at < last && rows_exist & 1u << n)
          exists |= view.load(matrix, part[n], column, value[n]) << n;
    } else if (rows_exist) {
#pragma unroll
      for (int n = 0; n < each; ++n) {
        const int64_t at = k + depth(n);
        if (at < last)
          exists |= view.load(matrix, part[0], view.part(view.column, at), value[n]) << n;
      }
    }
  }
  // Rows and k past the last are zeros.
  __device__ float operator[](int n) const { return view.element(value[n], exists & 1u << n); }
};

template <typename Multiplier, typename T>
struct Slab {
  using L = Lane<Multiplier>;
  typename L::Left left[kDepth][T::rows + 1];  // + 1: spreads depths over the banks
  typename L::Right right[kDepth][T::columns + 1];
  int least[2], most[2];  // exponents of left and right
};

// One chunk of the sums of a tile.
template <typename Multiplier, typename T>
__device__ void sum_chunk(float (&sum)[T::R][T::C], const Product& p,
                          Slab<Multiplier, T> (&slabs)[2], Reader<T::rows>& left,
                          Reader<T::columns>& right, int64_t matrix, int64_t first_row,
                          int64_t first_column, int64_t k, int64_t last) {
  using L = Lane<Multiplier>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / T::warps_across * 4 * T::R + lane / 8;
  const int column = warp % T::warps_across * 8 * T::C + lane % 8;
  const auto clear = [&](Slab<Multiplier, T>& slab) {
    if (threadIdx.x < 2) slab.least[threadIdx.x] = 255, slab.most[threadIdx.x] = 0;
  };
  const auto store = [&](Slab<Multiplier, T>& slab) {
    Range range[2];
#pragma unroll
    for (int n = 0; n < left.each; ++n) {
      range[0].take(left[n]);
      slab.left[left.depth(n)][left.row(n)] = L::left(left[n]);
    }
#pragma unroll
    for (int n = 0; n < right.each; ++n) {
      range[1].take(right[n]);
      slab.right[right.depth(n)][right.row(n)] = L::right(right[n]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int least = __reduce_min_sync(~0u, range[i].least);
      const int most = __reduce_max_sync(~0u, range[i].most);
      if (lane == 0) atomicMin(&slab.least[i], least), atomicMax(&slab.most[i], most);
    }
  };

  left.load(k, last), right.load(k, last);
  __syncthreads();
  clear(slabs[0]), clear(slabs[1]);
  __syncthreads();
  store(slabs[0]);
  __syncthreads();
  for (int turn = 0; k < last; k += kDepth, turn ^= 1) {
    const bool more = k + kDepth < last;
    if (more) left.load(k + kDepth, last), right.load(k + kDepth, last);
    Slab<Multiplier, T>& slab = slabs[turn];
    const Range a{slab.least[0], slab.most[0]}, b{slab.least[1], slab.most[1]};
    if (a.special() || b.special()) {
      // As they came.
      for (int d = 0; d < kDepth && k + d < last; ++d) {
        const Part part_a = p.left.part(p.left.column, k + d);
        const Part part_b = p.right.part(p.right.column, k + d);
        for (int i = 0; i < T::R; ++i)
          for (int j = 0; j < T::C; ++j) {
            const int64_t m = first_row + row + 4 * i, n = first_column + column + 8 * j;
            if (m >= p.M || n >= p.N) continue;
            const float x = p.left(matrix, p.left.part(p.left.row, m), part_a);
            const float y = p.right(matrix, p.right.part(p.right.row, n), part_b);
            const bool left_out = (p.left.leaves_out && float_bits(x) == INT32_MIN) ||
                                  (p.right.leaves_out && float_bits(y) == INT32_MIN);
            if (!left_out) {
              const float term = Multiplier::multiply(x, y);
#pragma unroll
              for (int u = 0; u < T::R; ++u)
#pragma unroll
                for (int v = 0; v < T::C; ++v)
                  if (u == i && v == j) sum[u][v] = __fadd_rn(sum[u][v], term);
            }
          }
      }
    } else if (L::holds(a, b) || a.most == 0 || b.most == 0) {
#pragma unroll 2
      for (int d = 0; d < kDepth; ++d) {
        typename L::Left x[T::R];
#pragma unroll
        for (int i = 0; i < T::R; ++i) x[i] = slab.left[d][row + 4 * i];
#pragma unroll
        for (int j = 0; j < T::C; ++j) {
          const typename L::Right y = slab.right[d][column + 8 * j];
#pragma unroll
          for (int i = 0; i < T::R; ++i) L::add(sum[i][j], x[i], y);
        }
      }
    } else {
#pragma unroll 1
      for (int d = 0; d < kDepth; ++d)
#pragma unroll
        for (int i = 0; i < T::R; ++i) {
          const float x = L::original(slab.left[d][row + 4 * i]);
#pragma unroll
          for (int j = 0; j < T::C; ++j)
            sum[i][j] = __fadd_rn(
                sum[i][j], Multiplier::multiply(x, L::original(slab.right[d][column + 8 * j])));
        }
    }
    if (more) store(slabs[turn ^ 1]);
    __syncthreads();
    clear(slab);  // for the slab after the next
    __syncthreads();
  }
}

// blockIdx.x: tiles, of all matrices after each other; blockIdx.y: chunks, if they are divided, of
// which each has a result of its own in `parts`.
template <typename Multiplier, typename T>
__global__ void __launch_bounds__(kThreads, 1)
    multiply_matrices(Product p, int64_t row_tiles, int64_t column_tiles, float* parts) {
  extern __shared__ __align__(16) char shared[];
  auto& slabs = *reinterpret_cast<Slab<Multiplier, T>(*)[2]>(shared);
  const int64_t tile = blockIdx.x, matrix = tile / column_tiles / row_tiles;
  const int64_t first_row = tile / column_tiles % row_tiles * T::rows;
  const int64_t first_column = tile % column_tiles * T::columns;
  Reader<T::rows> left(p.left, matrix, first_row, p.M);
  Reader<T::columns> right(p.right, matrix, first_column, p.N);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = first_row + warp / T::warps_across * 4 * T::R + lane / 8;
  const int64_t column = first_column + warp % T::warps_across * 8 * T::C + lane % 8;

  const int64_t begin = parts == nullptr ? 0 : blockIdx.y * kChunk;
  const int64_t end = parts == nullptr ? p.K : min(begin + kChunk, p.K);
  for (int64_t k = begin; k < max(end, int64_t{1}); k += kChunk) {
    float sum[T::R][T::C] = {};
    if (k < end)
      sum_chunk<Multiplier, T>(sum, p, slabs, left, right, matrix, first_row, first_column, k,
                               min(k + kChunk, end));
#pragma unroll
    for (int i = 0; i < T::R; ++i)
#pragma unroll
      for (int j = 0; j < T::C; ++j) {
        const int64_t m = row + 4 * i, n = column + 8 * j;
        if (m >= p.M || n >= p.N) continue;
        if (parts != nullptr) {
          parts[((blockIdx.y * p.batch + matrix) * p.M + m) * p.N + n] = sum[i][j];
        } else {
          float* to = p.out.data + matrix * p.out.batch +
                      Target::offset(p.out.row_digits, p.out.row, m) +
                      Target::offset(p.out.column_digits, p.out.column, n);
          *to = k == 0 ? sum[i][j] : __fadd_rn(*to, sum[i][j]);
        }
      }
  }
}

__global__ void add_chunks(const float* parts, int64_t chunks, Product p) {
  const int64_t size = p.batch * p.M * p.N, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += step) {
    float sum = parts[i];
    for (int64_t chunk = 1; chunk < chunks; ++chunk) sum = __fadd_rn(sum, parts[chunk * size + i]);
    const int64_t n = i % p.N, m = i / p.N % p.M, matrix = i / p.N / p.M;
    p.out.data[matrix * p.out.batch + Target::offset(p.out.row_digits, p.out.row, m) +
               Target::offset(p.out.column_digits, p.out.column, n)] = sum;
  }
}

int64_t tiles(int64_t size, int64_t of) { return (size + of - 1) / of; }

template <typename Multiplier, typename T>
void launch(const Product& p, const Tensor& like, int multiprocessors, cudaStream_t stream) {
  const auto kernel = multiply_matrices<Multiplier, T>;
  constexpr int bytes = sizeof(Slab<Multiplier, T>[2]);
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const int64_t row_tiles = tiles(p.M, T::rows), column_tiles = tiles(p.N, T::columns);
  const int64_t blocks = p.batch * row_tiles * column_tiles, chunks = tiles(p.K, kChunk);
  STD_TORCH_CHECK(blocks < (int64_t{1} << 31), "the result: too large");
  if (chunks <= 1 || blocks >= 2 * multiprocessors || chunks > 65535) {
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
  add_chunks<<<std::min<int64_t>(tiles(size, kThreads), 4096), kThreads, 0, stream>>>(data, chunks,
                                                                                      p);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void gemm(const std::string& multiplier, Product p, const Tensor& like, cudaStream_t stream) {
  if (p.batch * p.M * p.N == 0) return;
  STD_TORCH_CHECK(p.M < (int64_t{1} << 31) && p.N < (int64_t{1} << 31) && p.K < (int64_t{1} << 31),
                  "a product's rows, columns and depth: expected less than 2^31 each");
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  // Fewer columns than rows; products of these multipliers do not depend on the operands' order.
  if (p.N > p.M) {
    std::swap(p.left, p.right);
    std::swap(p.M, p.N);
    std::swap(p.out.row, p.out.column);
    std::swap(p.out.row_digits, p.out.column_digits);
  }
  with_multiplier(multiplier, [&](auto definition) {
    using Multiplier = decltype(definition);
    if (p.N > 64)
      launch<Multiplier, Tile<8, 4, 4>>(p, like, multiprocessors, stream);
    else if (p.N > 32)
      launch<Multiplier, Tile<8, 2, 4>>(p, like, multiprocessors, stream);
    else
      launch<Multiplier, Tile<4, 2, 8>>(p, like, multiprocessors, stream);
  });
}

}  // namespace hoconv::approx
