// The tiles that blocks own, and what a block has of both operands in shared memory: kDepth k at a
// time, a slab.
//
// M, N rows and columns of the result, K what is summed over.
#pragma once

#include "approx/cuda/lanes.cuh"

namespace hoconv::approx {

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

}  // namespace hoconv::approx
