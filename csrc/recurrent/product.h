// Products of rows by a packed matrix, which generated time loops compute themselves.
//
// A call of a library packs its operands, or a part of them, and starts and joins its threads, in
// every step: for the sizes of a step that is as long as the product. Here the matrix is packed
// once a call of the layer, in the order in which a register tile reads it. A tile sums in the
// order of the inner dimension, whichever rows it has: a row's result does not depend on the other
// rows, or on the number of threads. One core with AVX-512 computes 116 to 143 GFLOP/s (inner
// dimension and columns 128 to 2048, 32 or 64 rows); the least where the level-3 cache alone holds
// the matrix.
#pragma once

#include <cstdint>
#include <type_traits>

#include "recurrent/threads.h"

namespace hoconv::recurrent {

// The tile: rows, and vectors of columns. Its sums, one row of the matrix and a factor fit the
// registers: 32 with AVX-512, else 16.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kTileRows = 8, kTileVectors = 3;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kTileRows = 4, kTileVectors = 3;
#else
constexpr int kVectorBytes = 16, kTileRows = 4, kTileVectors = 3;
#endif

// The type in which products of T are computed and summed.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// A vector register.
template <typename A>
struct Vector {
  typedef A type __attribute__((vector_size(kVectorBytes)));
  typedef A unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(A)), may_alias));
  static constexpr int64_t lanes = kVectorBytes / sizeof(A);
};

// A matrix (inner, columns) and a vector (columns) to add, cut into panels of kTileVectors
// vectors of columns, or of one less. A panel is contiguous: its part of the vector, then those of
// the matrix' rows. Columns are padded with zeros to whole vectors.
template <typename T>
class Packed {
 public:
  using A = Wide<T>;
  static constexpr int64_t lanes = Vector<A>::lanes;

  // `memory` is aligned to vectors and holds (inner + 1) * columns values of A, with the columns
  // rounded up to whole vectors, at least two.
  Packed(void* memory, int64_t inner, int64_t columns)
      : inner(inner), columns(columns), memory_(static_cast<A*>(memory)) {}

  const int64_t inner, columns;

  int64_t panels() const { return (vectors() + kTileVectors - 1) / kTileVectors; }
  // The first vector of a panel.
  int64_t first(int64_t panel) const { return panel * vectors() / panels(); }
  A* at(int64_t panel) const { return memory_ + first(panel) * lanes * (inner + 1); }

  // Packs a matrix of its sizes, on the threads of PyTorch. `added` may be null. Returns whether it
  // succeeded.
  bool pack(const T* matrix, int64_t row_stride, int64_t column_stride, const T* added) const {
    constexpr int64_t kGrain = 1 << 14;  // values that are worth another thread
    const int64_t grain = kGrain / (inner * kTileVectors * lanes) + 1;
    return for_rows(panels(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        const int64_t start = first(panel) * lanes, width = first(panel + 1) * lanes - start;
        const int64_t real = columns - start < width ? columns - start : width;
        A* to = at(panel);
        for (int64_t j = 0; j < width; ++j)
          to[j] = j < real && added != nullptr ? static_cast<A>(added[start + j]) : A(0);
        // Some columns at a time, at most the ways of a level-1 cache: a line of each stays there,
        // also where they are a power of two apart.
        constexpr int64_t kSome = 8;
        for (int64_t first = 0; first < width; first += kSome)
          for (int64_t k = 0; k < inner; ++k) {
            const T* from = matrix + k * row_stride + (start + first) * column_stride;
            A* row = to + (k + 1) * width + first;
            if (first + kSome <= real)
              for (int64_t j = 0; j < kSome; ++j) row[j] = static_cast<A>(from[j * column_stride]);
            else
              for (int64_t j = 0; j < kSome && first + j < width; ++j)
                row[j] = first + j < real ? static_cast<A>(from[j * column_stride]) : A(0);
          }
      }
    });
  }

 private:
  // At least two: then panels have two or three.
  int64_t vectors() const { return columns > lanes ? (columns + lanes - 1) / lanes : 2; }

  A* memory_;
};

// out (R rows of stride `columns`) = x (R, inner) times a panel of C vectors; `valid` columns of
// the panel are real.
template <int R, int C, typename T, typename A = Wide<T>>
void multiply_tile(T* out, int64_t columns, const A* x, int64_t inner, const A* panel,
                   int64_t valid) {
  using V = typename Vector<A>::type;
  constexpr int64_t lanes = Vector<A>::lanes;
  const V* from = reinterpret_cast<const V*>(panel);
  V sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      sum[r][c] = from[c];
      // The line is there when the sums are: a store to one that is not waits for the memory.
      __builtin_prefetch(out + r * columns + c * lanes, 1);
    }
  for (int64_t k = 0; k < inner; ++k) {
    from += C;
    V row[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) row[c] = from[c];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const A factor = x[r * inner + k];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] += factor * row[c];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      T* to = out + r * columns + c * lanes;
      const V found = sum[r][c];
      const int64_t n = valid - c * lanes;
      if constexpr (std::is_same_v<T, A>) {
        if (n >= lanes) {
          *reinterpret_cast<typename Vector<A>::unaligned*>(to) = found;
          continue;
        }
      }
      A parts[lanes];
      __builtin_memcpy(parts, &found, sizeof(parts));
      for (int64_t j = 0; j < (n < lanes ? n : lanes); ++j) to[j] = static_cast<T>(parts[j]);
    }
}

// `rows` rows of out (rows, columns) = those of x (rows, inner) times a panel of C vectors.
template <int C, typename T, typename A = Wide<T>>
void multiply_panel(T* out, const A* x, const Packed<T>& by, int64_t panel, int64_t rows) {
  const int64_t start = by.first(panel) * Packed<T>::lanes, valid = by.columns - start;
  int64_t row = 0;
  const auto tiles = [&](auto height) {
    constexpr int R = decltype(height)::value;
    for (; row + R <= rows; row += R)
      multiply_tile<R, C, T>(out + row * by.columns + start, by.columns, x + row * by.inner,
                             by.inner, by.at(panel), valid);
  };
  if constexpr (kTileRows == 8) tiles(std::integral_constant<int, 8>());
  tiles(std::integral_constant<int, 4>());
  tiles(std::integral_constant<int, 2>());
  tiles(std::integral_constant<int, 1>());
}

// `rows` rows of out (rows, columns) = those of x (rows, inner) times a packed matrix, which is
// read once. `scratch` holds rows * inner floats if T is not the type in which products are
// computed.
template <typename T, typename A = Wide<T>>
void multiply(T* out, const T* x, const Packed<T>& by, int64_t rows,
              [[maybe_unused]] void* scratch) {
  const A* operand;
  if constexpr (std::is_same_v<T, A>) {
    operand = x;
  } else {
    A* wide = static_cast<A*>(scratch);
    for (int64_t i = 0; i < rows * by.inner; ++i) wide[i] = static_cast<A>(x[i]);
    operand = wide;
  }
  constexpr int64_t kBlock = 64;  // rows that stay in the level-2 cache while panels pass
  for (int64_t row = 0; row < rows; row += kBlock)
    for (int64_t panel = 0; panel < by.panels(); ++panel) {
      const int64_t count = rows - row < kBlock ? rows - row : kBlock;
      T* to = out + row * by.columns;
      const A* from = operand + row * by.inner;
      if (by.first(panel + 1) - by.first(panel) == 2)
        multiply_panel<2, T>(to, from, by, panel, count);
      else
        multiply_panel<3, T>(to, from, by, panel, count);
    }
}

// out (rows, columns) = x (rows, inner) times a matrix, plus `added` (columns) unless it is null,
// on the threads of PyTorch. `memory` is that of a packed matrix. Returns whether it succeeded.
template <typename A>
bool multiply_all(A* out, const A* x, const A* matrix, int64_t row_stride, int64_t column_stride,
                  const A* added, int64_t rows, int64_t inner, int64_t columns, void* memory) {
  constexpr int64_t kGrain = 1 << 16;  // multiplications that are worth another thread
  const Packed<A> by(memory, inner, columns);
  if (!by.pack(matrix, row_stride, column_stride, added)) return false;
  return for_rows(rows, kGrain / (inner * columns) + 1, [&](int64_t begin, int64_t end) {
    multiply(out + begin * columns, x + begin * inner, by, end - begin, nullptr);
  });
}

}  // namespace hoconv::recurrent
