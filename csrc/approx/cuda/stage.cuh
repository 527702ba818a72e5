// The tiles of the result that blocks own, and the stages of both operands in shared memory: kDepth
// k at a time.
//
// M, N rows and columns of the result, K what is summed over.
#pragma once

#include "approx/cuda/lanes.cuh"

namespace hoconv::approx {

constexpr int kDepth = 16;
constexpr int kPrefetchedDepths = 32;  // depths whose coordinates are computed at a time

constexpr int kThreads = 128;

// A tile of rows x columns. The lanes of a warp share its rows, and each owns every 32nd column. A
// multiprocessor runs several blocks, of which some multiply while others wait.
template <int thread_rows, int thread_columns, int warp_rows, int blocks_at_once>
struct Tile {
  static constexpr int blocks = blocks_at_once;
  // Whether rows that are zero are skipped where most are. With fewer blocks there are too few
  // warps to hide the branches.
  static constexpr bool skips = blocks > 3;
  static constexpr int R = thread_rows, C = thread_columns;
  static constexpr int warp_columns = kThreads / 32 / warp_rows;
  static constexpr int rows = R * warp_rows, columns = 32 * C * warp_columns;

  __device__ static int first_row() { return threadIdx.x / 32 / warp_columns * R; }
  __device__ static int first_column() {
    return threadIdx.x / 32 % warp_columns * 32 * C + threadIdx.x % 32;
  }
  // Offsets from the first row and column.
  static constexpr int row(int i) { return i; }
  static constexpr int column(int j) { return 32 * j; }
};

// Two rows of a left operand, for one load.
template <typename Left>
struct alignas(2 * sizeof(Left)) Pair {
  Left row[2];
};

// kDepth packed rows of each operand. The padding spreads depths over the banks of shared memory.
template <typename Multiplier, typename T>
struct Stage {
  using L = Lane<Multiplier>;
  static constexpr int left_pitch = T::rows + 2, right_pitch = T::columns + 1;
  // One more depth, which is loaded but not used.
  alignas(16) typename L::Left left[(kDepth + 1) * left_pitch];
  alignas(16) typename L::Right right[(kDepth + 1) * right_pitch];
};
constexpr int kStages = 2;  // one is multiplied while the other is copied
template <typename Multiplier, typename T>
struct Shared {
  Stage<Multiplier, T> stages[kStages];
  Coordinate rows[T::rows], columns[T::columns];  // of the tile
  Coordinate depths[2][2 * kPrefetchedDepths];    // of both operands, in two halves that alternate
  int64_t out_rows[T::rows], out_columns[T::columns];  // in the result; -1 if out of range
  int range[4];
};

// The coordinate of a row or column that does not exist.
__device__ __forceinline__ Coordinate nowhere() { return {0, -kFar, -kFar}; }
// The coordinate with its offset in bytes; with `base`, the offset is an address.
template <typename Word>
__device__ __forceinline__ Coordinate addressed(Coordinate coordinate, const Word* base = nullptr) {
  coordinate.offset =
      coordinate.offset * static_cast<int>(sizeof(Word)) + reinterpret_cast<int64_t>(base);
  return coordinate;
}

// Copies kDepth columns k of `count` rows of an operand to shared memory: element (row, depth) to
// depth * pitch + row. Neighbouring threads copy neighbours in memory; the elements of one thread
// are all in one column, or all in one row. Coordinates of rows hold an address, those of columns
// an offset to it.
template <typename Word, int count, int pitch>
struct Reader {
  static constexpr int each = count * kDepth / kThreads;
  static_assert(kThreads % count == 0 && kThreads % kDepth == 0 && count * kDepth % kThreads == 0);
  const View& view;
  const Coordinate *rows, *depths;

  // Starts the copy. An element that does not exist becomes zero; add_special handles those that
  // must be left out.
  __device__ __forceinline__ void copy(int first_depth, Word* to) const {
    if (view.along_columns)
      copy<true>(first_depth, to);
    else
      copy<false>(first_depth, to);
  }
  // Calls f(element) for a part of the elements, each thread another.
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
    constexpr int together = each < 8 ? each : 8;  // as many as the registers allow
    static_assert(each % together == 0);
#pragma unroll
    for (int n = 0; n < each; n += together) {
      // All loads from shared memory come first, since none may move above a copy to it.
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
