// The tiles that blocks own, and what a block has of both operands in shared memory: kDepth k at a
// time, a slab.
//
// M, N rows and columns of the result, K what is summed over.
#pragma once

#include "approx/cuda/lanes.cuh"

namespace hoconv::approx {

constexpr int kDepth = 16;
constexpr int kPrefetchedDepths = 32;  // depths whose places are found out at a time

constexpr int kThreads = 128;
constexpr int kBlocks = 3;  // on a multiprocessor, so that some multiply while others wait

// A tile of rows x columns. The lanes of a warp share its rows, and each has every 32nd column.
template <int thread_rows, int thread_columns, int warp_rows>
struct Tile {
  static constexpr int R = thread_rows, C = thread_columns;
  static constexpr int warp_columns = kThreads / 32 / warp_rows;
  static constexpr int rows = R * warp_rows, columns = 32 * C * warp_columns;

  __device__ static int first_row() { return threadIdx.x / 32 / warp_columns * R; }
  __device__ static int first_column() {
    return threadIdx.x / 32 % warp_columns * 32 * C + threadIdx.x % 32;
  }
  // From the first.
  static constexpr int row(int i) { return i; }
  static constexpr int column(int j) { return 32 * j; }
};

// Rows of a left operand that are read at once.
template <typename Left>
struct alignas(2 * sizeof(Left)) Pair {
  Left row[2];
};

// kDepth rows of each operand, prepared; the padding spreads depths over the banks.
template <typename Multiplier, typename T>
struct Stage {
  using L = Lane<Multiplier>;
  static constexpr int left_pitch = T::rows + 2, right_pitch = T::columns + 1;
  // One depth more, which is read but not used.
  alignas(16) typename L::Left left[(kDepth + 1) * left_pitch];
  alignas(16) typename L::Right right[(kDepth + 1) * right_pitch];
};
constexpr int kStages = 2;  // one multiplied, one on its way
template <typename Multiplier, typename T>
struct Shared {
  Stage<Multiplier, T> stages[kStages];
  Coordinate rows[T::rows], columns[T::columns];       // of the tile
  Coordinate depths[2][2 * kPrefetchedDepths];         // of the left and the right operand, in turn
  int64_t out_rows[T::rows], out_columns[T::columns];  // in the result; -1: outside of it
  int range[4];
};

// Of a row or column that does not exist.
__device__ __forceinline__ Coordinate nowhere() { return {0, -kFar, -kFar}; }
// With an offset in bytes, from address 0.
template <typename Word>
__device__ __forceinline__ Coordinate addressed(Coordinate coordinate, const Word* base = nullptr) {
  coordinate.offset =
      coordinate.offset * static_cast<int>(sizeof(Word)) + reinterpret_cast<int64_t>(base);
  return coordinate;
}

// What a thread reads of an operand: kDepth columns k of `count` rows, whichever lie next to each
// other for neighbouring threads. The thread's elements are all in one of its columns, or one of
// its rows. Element (row, depth) goes to depth * pitch + row. Of a row and a column, the row has an
// address, the column adds to it.
template <typename Word, int count, int pitch>
struct Reader {
  static constexpr int each = count * kDepth / kThreads;
  static_assert(kThreads % count == 0 && kThreads % kDepth == 0 && count * kDepth % kThreads == 0);
  const View& view;
  const Coordinate *rows, *depths;

  // Starts to copy. What does not exist is zero; where it matters that it is left out, see
  // add_special.
  __device__ __forceinline__ void copy(int first_depth, Word* to) const {
    if (view.along_columns)
      copy<true>(first_depth, to);
    else
      copy<false>(first_depth, to);
  }
  // f(each that has arrived)
  template <typename F>
  __device__ __forceinline__ void visit(const Word* at, const F& f) const {
    for (int n = threadIdx.x; n < count * kDepth; n += kThreads)
      f(at[n / count * pitch + n % count]);
  }

 private:
  template <bool along>
  __device__ __forceinline__ void copy(int first_depth, Word* to) const {
    const int row = along ? threadIdx.x / kDepth : threadIdx.x % count;
    const int depth = along ? threadIdx.x % kDepth : threadIdx.x / count;
    constexpr int step = along ? kThreads / kDepth : kThreads / count;
    const Coordinate* row_coordinates = rows + row;
    const Coordinate* depth_coordinates = depths + first_depth + depth;
    const Coordinate fixed = loaded(along ? depth_coordinates : row_coordinates);
    const Coordinate* moving = along ? row_coordinates : depth_coordinates;
    const auto first = static_cast<unsigned>(__cvta_generic_to_shared(to + depth * pitch + row));
    constexpr int stride = sizeof(Word) * (along ? step : step * pitch);
    constexpr int together = each < 8 ? each : 8;  // as registers allow
    static_assert(each % together == 0);
#pragma unroll
    for (int n = 0; n < each; n += together) {
      // All that is read of shared memory first: no read may overtake a copy to it.
      int64_t from[together];
      bool exists[together];
#pragma unroll
      for (int i = 0; i < together; ++i)
        exists[i] = view.find(fixed, loaded(moving + (n + i) * step), from[i]);
#pragma unroll
      for (int i = 0; i < together; ++i)
        asm volatile(
            "cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(first + (n + i) * stride),
            "l"(from[i]), "n"(sizeof(Word)), "r"(exists[i] ? int{sizeof(Word)} : 0));
    }
  }
  __device__ static Coordinate loaded(const Coordinate* part) {  // in one access
    const int4 words = *reinterpret_cast<const int4*>(part);
    return {int64_t{words.y} << 32 | static_cast<uint32_t>(words.x), words.z, words.w};
  }
};

}  // namespace hoconv::approx
