// Adds the products of a stage (stage.cuh) to a thread's sums: of packed operands (lanes.cuh) where
// exponents allow that, else by the definition, one at a time. Both give the same bits.
//
// M, N rows and columns of the result, K what is summed over.
#pragma once

#include <type_traits>

#include "approx/cuda/lanes.cuh"
#include "approx/cuda/stage.cuh"

namespace hoconv::approx {

// A number of the right operand in registers. It is tested for zero once, not in each product.
template <typename L>
struct Column {
  typename L::Right word;
  bool exists;
  Column() = default;
  __device__ explicit Column(const typename L::Right& word) : word(word), exists(!L::zero(word)) {}
};

// Which groups of rows have a zero, and which a large number. A group has a few bits, one for each
// lane that tests some of its rows; the groups of the first depth come before those of the second.
template <typename T>
struct Groups {
  static constexpr int rows = T::R < 8 ? T::R : 8;
  static constexpr int lanes = 32 / (kDepth * T::R / rows);
  static_assert(T::R % rows == 0 && rows % lanes == 0);
  unsigned zeros = 0, large = 0;

  template <typename L, int pitch>
  __device__ __forceinline__ void find(const typename L::Left* left) {
    if constexpr (!L::kPacked) return;
    const int lane = threadIdx.x % 32, group = lane / lanes;
    const auto* first = left + group * rows / T::R * pitch + T::row(group * rows % T::R);
    bool zero = false, some_large = false;
#pragma unroll
    for (int i = 0; i < rows; i += lanes) {
      const auto row = first[T::row(i + lane % lanes)];
      zero |= L::zero(row), some_large |= L::large(row);
    }
    zeros = __ballot_sync(~0u, zero), large = __ballot_sync(~0u, some_large);
  }
  __device__ __forceinline__ void next_depth() {
    zeros >>= lanes * T::R / rows, large >>= lanes * T::R / rows;
  }
  // The bits of the group that begins with a row.
  __device__ static constexpr unsigned bits(int row) {
    return ((1u << lanes) - 1) << row / rows * lanes;
  }
};

// Adds the products of a stage where a thread has few in a depth: without branches, and all depths
// unrolled, since branches and the loop would take longer than the products.
template <typename Multiplier, typename T>
__device__ __forceinline__ void add_few(float (&sum)[T::R][T::C], const Stage<Multiplier, T>& stage,
                                        int first_row, int first_column) {
  using L = Lane<Multiplier>;
  using S = Stage<Multiplier, T>;
  const typename L::Left* left = stage.left + first_row;
  const typename L::Right* right = stage.right + first_column;
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    Column<L> y[T::C];
#pragma unroll
    for (int j = 0; j < T::C; ++j) y[j] = Column<L>(right[d * S::right_pitch + T::column(j)]);
#pragma unroll
    for (int i = 0; i < T::R; i += 2) {
      const auto x =
          *reinterpret_cast<const Pair<typename L::Left>*>(left + d * S::left_pitch + T::row(i));
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int j = 0; j < T::C; ++j)
          L::template add<true, false>(sum[i + r][j], x.row[r], 1, y[j].word,
                                       y[j].exists && !L::zero(x.row[r]));
    }
  }
}

// Which of the warp's rows are not zero, and which are large: a bit for each row, of as many depths
// as a vote of the lanes covers.
template <typename T>
struct Rows {
  static constexpr int depths = 32 / T::R;
  static constexpr unsigned of_depth = (uint64_t{1} << T::R) - 1;
  unsigned exist, large;

  template <typename L, int pitch>
  __device__ __forceinline__ void find(const typename L::Left* left) {
    const int lane = threadIdx.x % 32;
    const auto row = left[lane / T::R * pitch + T::row(lane % T::R)];
    exist = __ballot_sync(~0u, !L::zero(row)), large = __ballot_sync(~0u, L::large(row));
  }
  __device__ __forceinline__ bool mostly_zero() const { return __popc(exist) <= 16; }
};

// Adds the products of a stage, and skips every row that is zero. Since votes tell the compiler
// that the branches do not diverge, a skipped row takes two instructions. Where no row is zero the
// branches take half as long as the products: measured on an H200, as fast as add_dense where about
// half of the rows are zero.
template <typename Multiplier, typename T>
__device__ __forceinline__ void add_sparse(float (&sum)[T::R][T::C],
                                           const Stage<Multiplier, T>& stage, Rows<T> rows,
                                           int first_row, int first_column) {
  using L = Lane<Multiplier>;
  using S = Stage<Multiplier, T>;
  const typename L::Left* left = stage.left + first_row;
  const typename L::Right* right = stage.right + first_column;
#pragma unroll 1
  for (int d = 0; d < kDepth; ++d) {
    if (d % Rows<T>::depths == 0 && d > 0) rows.template find<L, S::left_pitch>(left);
    if (rows.exist & Rows<T>::of_depth) {
      Column<L> y[T::C];
#pragma unroll
      for (int j = 0; j < T::C; ++j) y[j] = Column<L>(right[T::column(j)]);
      Pair<typename L::Left> x[T::R / 2];
#pragma unroll
      for (int i = 0; i < T::R; i += 2)
        x[i / 2] = *reinterpret_cast<const Pair<typename L::Left>*>(left + T::row(i));
      const auto add_rows = [&](auto some_large) {
#pragma unroll
        for (int i = 0; i < T::R; ++i) {
          if (!(rows.exist & 1u << i)) continue;
#pragma unroll
          for (int j = 0; j < T::C; ++j)
            L::template add<some_large.value, false>(sum[i][j], x[i / 2].row[i % 2], 1, y[j].word,
                                                     y[j].exists);
        }
      };
      if (rows.large & Rows<T>::of_depth)
        add_rows(std::true_type());
      else
        add_rows(std::false_type());
    }
    rows.exist >>= T::R, rows.large >>= T::R;
    left += S::left_pitch, right += S::right_pitch;
  }
}

// Adds the products of the first `depths` depths of a stage.
template <typename Multiplier, typename T>
__device__ __forceinline__ void add_dense(float (&sum)[T::R][T::C],
                                          const Stage<Multiplier, T>& stage, int first_row,
                                          int first_column, int depths) {
  using L = Lane<Multiplier>;
  using S = Stage<Multiplier, T>;
  using Two = Pair<typename L::Left>;
  const typename L::Left* left = stage.left + first_row;
  const typename L::Right* right = stage.right + first_column;
  Groups<T> groups;
  groups.template find<L, S::left_pitch>(left);
  // Operands are loaded long before they are needed: those of two rows while the two rows before
  // are multiplied, and the columns of the next depth as soon as the last rows have used the
  // present ones.
  Column<L> y[T::C];
#pragma unroll
  for (int j = 0; j < T::C; ++j) y[j] = Column<L>(right[T::column(j)]);
  Two x = *reinterpret_cast<const Two*>(left);
#pragma unroll 1  // the registers fit one depth
  for (int d = 0; d < depths; ++d) {
    right += S::right_pitch;
#pragma unroll
    for (int group = 0; group < T::R; group += Groups<T>::rows) {
      constexpr int rows = Groups<T>::rows;
      const bool last = group + rows == T::R;
      const auto* following = left + (last ? S::left_pitch : T::row(group + rows));
      const auto add_rows = [&](auto some_zero, auto some_large) {
#pragma unroll
        for (int i = 0; i < rows; i += 2) {
          const bool end = i + 2 == rows;
          const Two next =
              *reinterpret_cast<const Two*>(end ? following : left + T::row(group + i + 2));
          float units[2] = {1, 1};
          if constexpr (some_zero.value) units[0] = L::unit(x.row[0]), units[1] = L::unit(x.row[1]);
#pragma unroll
          for (int j = 0; j < T::C; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r)
              L::template add<some_large.value, some_zero.value>(sum[group + i + r][j], x.row[r],
                                                                 units[r], y[j].word, y[j].exists);
          if (last && end)
#pragma unroll
            for (int j = 0; j < T::C; ++j) y[j] = Column<L>(right[T::column(j)]);
          x = next;
        }
      };
      // All lanes take the same branch.
      const unsigned here = Groups<T>::bits(group);
      const bool some_zero = groups.zeros & here, some_large = groups.large & here;
      constexpr std::true_type yes;
      constexpr std::false_type no;
      if (some_zero)
        some_large ? add_rows(yes, yes) : add_rows(yes, no);
      else
        some_large ? add_rows(no, yes) : add_rows(no, no);
    }
    groups.next_depth();
    left += S::left_pitch;
  }
}

// Adds the products of a stage from the packed operands. Only its first `depths` depths exist; the
// others hold zeros.
template <typename Multiplier, typename T>
__device__ __forceinline__ void add_packed(float (&sum)[T::R][T::C],
                                           const Stage<Multiplier, T>& stage, int first_row,
                                           int first_column, int depths) {
  if constexpr (T::R * T::C <= 4) {
    add_few<Multiplier, T>(sum, stage, first_row, first_column);
  } else {
    if constexpr (T::skips) {
      Rows<T> rows;
      rows.template find<Lane<Multiplier>, Stage<Multiplier, T>::left_pitch>(stage.left +
                                                                             first_row);
      if (rows.mostly_zero())
        return add_sparse<Multiplier, T>(sum, stage, rows, first_row, first_column);
    }
    add_dense<Multiplier, T>(sum, stage, first_row, first_column, depths);
  }
}

// Adds the products of a stage by the definition, from the packed operands.
template <typename Multiplier, typename T>
__device__ void add_by_definition(float (&sum)[T::R][T::C], const Stage<Multiplier, T>& stage) {
  using L = Lane<Multiplier>;
  using S = Stage<Multiplier, T>;
  for (int d = 0; d < kDepth; ++d)
    for (int i = 0; i < T::R; ++i) {
      const float x = L::original(stage.left[d * S::left_pitch + T::first_row() + T::row(i)]);
      for (int j = 0; j < T::C; ++j) {
        const float y =
            L::original(stage.right[d * S::right_pitch + T::first_column() + T::column(j)]);
        sum[i][j] = __fadd_rn(sum[i][j], Multiplier::multiply(x, y));
      }
    }
}

// Adds the products of a stage by the definition, from the operands in global memory: with
// infinities and NaN, and without the terms that are left out.
template <typename Multiplier, typename T>
__device__ void add_special(float (&sum)[T::R][T::C], const Product& p, int64_t matrix,
                            int64_t first_row, int64_t first_column, int64_t k, int64_t last) {
  for (int d = 0; d < kDepth && k + d < last; ++d) {
    const Coordinate coordinate_a = p.left.column_coordinate(k + d),
                     coordinate_b = p.right.column_coordinate(k + d);
    for (int i = 0; i < T::R; ++i)
      for (int j = 0; j < T::C; ++j) {
        const int64_t m = first_row + T::first_row() + T::row(i);
        const int64_t n = first_column + T::first_column() + T::column(j);
        if (m >= p.M || n >= p.N) continue;
        const float x = p.left(matrix, p.left.row_coordinate(m), coordinate_a);
        const float y = p.right(matrix, p.right.row_coordinate(n), coordinate_b);
        const bool left_out = (p.left.leaves_out && float_bits(x) == INT32_MIN) ||
                              (p.right.leaves_out && float_bits(y) == INT32_MIN);
        if (!left_out) sum[i][j] = __fadd_rn(sum[i][j], Multiplier::multiply(x, y));
      }
  }
}

// Adds the products of a stage that has numbers out of range. It is a function of its own, with its
// sums in memory, so that the caller's other sums stay in registers.
template <typename Multiplier, typename T>
__device__ __noinline__ void add_out_of_range(float (&sum)[T::R][T::C],
                                              Shared<Multiplier, T>& shared, int current,
                                              const Product& p, int64_t matrix, int64_t first_row,
                                              int64_t first_column, int64_t k, int64_t last) {
  using L = Lane<Multiplier>;
  using S = Stage<Multiplier, T>;
  const S& stage = shared.stages[current];
  if (threadIdx.x < 4) shared.range[threadIdx.x] = threadIdx.x % 2 ? 0 : 255;
  __syncthreads();
  Range range[2];
  for (int n = threadIdx.x; n < kDepth * T::rows; n += kThreads)
    range[0].include(L::original(stage.left[n / T::rows * S::left_pitch + n % T::rows]));
  for (int n = threadIdx.x; n < kDepth * T::columns; n += kThreads)
    range[1].include(L::original(stage.right[n / T::columns * S::right_pitch + n % T::columns]));
  for (int n = 0; n < 2; ++n) {
    atomicMin(&shared.range[2 * n], range[n].least);
    atomicMax(&shared.range[2 * n + 1], range[n].most);
  }
  __syncthreads();
  const Range a{shared.range[0], shared.range[1]}, b{shared.range[2], shared.range[3]};
  if (a.special() || b.special())
    add_special<Multiplier, T>(sum, p, matrix, first_row, first_column, k, last);
  else if (L::fast(a, b) || a.most == 0 || b.most == 0)
    add_packed<Multiplier, T>(sum, stage, T::first_row(), T::first_column(), kDepth);
  else
    add_by_definition<Multiplier, T>(sum, stage);
}

}  // namespace hoconv::approx
