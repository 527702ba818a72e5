// Copies of images between contiguous and channels-last memory, and of weights likewise, for calls
// that are so much faster in the other that they are worth copies. They run at three quarters of
// the memory's rate on an H200, PyTorch's at a fifth.
//
// B batch, C channels.
#pragma once

#include "high_order/conv2d/cuda/stage.cuh"

namespace hoconv::high_order::conv2d {

constexpr int kTransposing = 256;  // threads of a block
constexpr int kTileSide = 64;      // elements; where there are fewer rows, a tile has more columns

// A tile of a matrix that is transposed; the host computes it. Matrices of many rows have constants
// for it.
template <bool Many>
struct Tile {
  int rows, columns;
  Divisor by_rows, by_columns;  // in units of what a thread moves at once

  Tile(int64_t matrix_rows, int U)
      : rows(std::min<int64_t>(matrix_rows, kTileSide)),
        columns(kTileSide * (kTileSide / rows)),
        by_rows(rows / U),
        by_columns(columns / U) {}

  __device__ int height() const { return Many ? kTileSide : rows; }
  __device__ int width() const { return Many ? kTileSide : columns; }
  // The row, or the column, of the nth unit, row by row or column by column.
  template <int U>
  __device__ int row(int n) const {
    return Many ? n / (kTileSide / U) : by_columns.quotient(n);
  }
  template <int U>
  __device__ int column(int n) const {
    return Many ? n / (kTileSide / U) : by_rows.quotient(n);
  }
};

// Transposes a matrix for each blockIdx.z, tile by tile through shared memory. A thread moves U
// neighbouring elements at once.
template <typename T, int U, bool Many>
__global__ void __launch_bounds__(kTransposing)
    transpose(const T* from, T* to, int64_t rows, int64_t columns, Tile<Many> tile) {
  constexpr int kMoves = kTileSide * kTileSide / U / kTransposing;
  const int pitch = tile.width() + U;  // lanes read words of many banks
  extern __shared__ uint4 shared[];
  T* staged = reinterpret_cast<T*>(shared);
  const int64_t top = int64_t{blockIdx.y} * tile.height();
  const int64_t left = int64_t{blockIdx.x} * tile.width();
  from += blockIdx.z * rows * columns + top * columns + left;
  to += blockIdx.z * rows * columns + left * rows + top;
  const int height = min(rows - top, int64_t{tile.height()});
  const int width = min(columns - left, int64_t{tile.width()});
  Pack<T, U> held[kMoves];
#pragma unroll
  for (int i = 0; i < kMoves; ++i) {
    const int n = i * kTransposing + threadIdx.x, r = tile.template row<U>(n);
    const int c = n * U - r * tile.width();
    if (r < height && c < width) held[i] = load<U>(from + r * columns + c);
  }
#pragma unroll
  for (int i = 0; i < kMoves; ++i) {
    const int n = i * kTransposing + threadIdx.x, r = tile.template row<U>(n);
    const int c = n * U - r * tile.width();
    if (r < height && c < width) *reinterpret_cast<Pack<T, U>*>(staged + r * pitch + c) = held[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kMoves; ++i) {
    const int n = i * kTransposing + threadIdx.x, c = tile.template column<U>(n);
    const int r = n * U - c * tile.height();
    if (r >= height || c >= width) continue;
    Pack<T, U> pack;
#pragma unroll
    for (int u = 0; u < U; ++u) pack.e[u] = staged[(r + u) * pitch + c];
    *reinterpret_cast<Pack<T, U>*>(to + c * rows + r) = pack;
  }
}

// Whether `transpose` can be launched for matrices.
inline bool is_transposable(int64_t matrices, int64_t rows) {
  return matrices <= kMaxGridYZ && rows <= kMaxGridYZ * kTileSide;
}
// Transposes matrices that follow each other in memory, of the elements of two tensors.
inline void transpose_all(const Tensor& from, Tensor& to, int64_t matrices, int64_t rows,
                          int64_t columns, cudaStream_t stream) {
  dispatch_cuda(from, [&](auto zero) {
    using T = decltype(zero);
    const auto launch = [&](auto U, auto many) {
      const Tile<many> tile(rows, U);
      const int bytes = tile.rows * (tile.columns + U) * sizeof(T);
      const dim3 grid((columns + tile.columns - 1) / tile.columns,
                      (rows + tile.rows - 1) / tile.rows, matrices);
      transpose<T, U, many><<<grid, kTransposing, bytes, stream>>>(
          static_cast<const T*>(from.const_data_ptr()), static_cast<T*>(to.mutable_data_ptr()),
          rows, columns, tile);
    };
    const auto dispatch = [&](auto U) {
      rows < kTileSide ? launch(U, std::false_type{}) : launch(U, std::true_type{});
    };
    constexpr int U = sizeof(T) <= 4 ? 2 : 1;
    const auto fits = [](const Tensor& t) {
      return reinterpret_cast<uintptr_t>(t.data_ptr()) % (U * sizeof(T)) == 0;
    };
    if (rows % U == 0 && columns % U == 0 && fits(from) && fits(to))
      dispatch(std::integral_constant<int, U>{});
    else
      dispatch(std::integral_constant<int, 1>{});
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Copies an image to another of its shape.
inline void copy_image(Tensor& to, const Tensor& from, cudaStream_t stream) {
  const int64_t B = from.size(0), C = from.size(1), W = from.size(3), pixels = from.size(2) * W;
  const auto is = [&](const Tensor& t, int64_t channel, int64_t pixel) {
    return t.stride(0) == C * pixels && t.stride(1) == channel && t.stride(2) == W * pixel &&
           t.stride(3) == pixel;
  };
  if (is(from, pixels, 1) && is(to, 1, C) && is_transposable(B, C))
    transpose_all(from, to, B, C, pixels, stream);
  else if (is(from, 1, C) && is(to, pixels, 1) && is_transposable(B, pixels))
    transpose_all(from, to, B, pixels, C, stream);
  else
    torch::stable::copy_(to, from);
}

inline Tensor copy_channels_last(const Tensor& t, cudaStream_t stream) {
  if (channels_last(t)) return t;
  Tensor copy = make_channels_last(t, {t.sizes().begin(), t.sizes().end()});
  copy_image(copy, t, stream);
  return copy;
}

// Whether a load of 16 bytes has channels of one group, where channels are last.
inline bool fills_loads(const Tensor& t, const Problem& p) {
  return p.group_channels() * t.element_size() % 16 == 0;
}

}  // namespace hoconv::high_order::conv2d
