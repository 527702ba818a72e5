// Adds the products of a slab (slab.cuh) to a thread's sums: as they were prepared (lanes.cuh), or
// where the exponents do not allow that, by the definition, one at a time: the same bits.
//
// M, N rows and columns of the result, K what is summed over.
#pragma once

#include <type_traits>

#include "approx/cuda/lanes.cuh"
#include "approx/cuda/slab.cuh"

namespace hoconv::approx {

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

}  // namespace hoconv::approx
