// The inner loop of the approximate matrix products whose mantissas' products come from a table:
// see lanes.h. No operand is infinite or NaN.
//
// Of normal numbers without overflow or underflow the bits of a product are the sum of the signs
// and exponents, less the exponents' bias, and the entry of the table. The entries of a number of
// the left operand are those of a row, which the columns of the panel index.
#pragma once

#include <algorithm>
#include <cstdint>

#include "approx/cpu/lanes.h"
#include "approx/multipliers.h"

namespace hoconv::approx {

struct MantissaLanes {
  static constexpr int64_t kSums = 16;  // registers of sums
  static constexpr int32_t kMantissa = MantissaTable::kMantissa;
  MantissaTable table;

  struct Panel {
    Range all, rows[kDepth];
    alignas(64) int32_t exponents[kDepth][kLanes];  // and signs
    alignas(64) int32_t column[kDepth][kLanes];     // of the table
    alignas(64) int32_t mask[kDepth][kLanes];       // 0 for a zero, else -1
  };
  using List = Numbers;

  float multiply(float a, float b) const { return table.multiply(a, b); }
  static constexpr int32_t kNonzero = 0x7f800000;  // numbers without a bit of it have zero products
  // No product overflows or underflows, whatever entry is added.
  static bool fast(const Range& a, const Range& b) {
    if (a.special() || b.special()) return false;
    return a.least + b.least > 127 + 2 && a.most + b.most < 127 + 252;
  }
  // Every product is zero.
  static bool underflows(const Range& a, const Range& b) { return a.most + b.most + 2 <= 127; }

  void pack(Panel& panel, const float (*values)[kLanes], int64_t depth, int64_t lanes) const {
    panel.all = {};
    for (int64_t d = 0; d < depth; ++d) {
      for (int64_t n = 0; n < lanes; ++n) {
        const int32_t b = float_bits(values[d][n]);
        panel.exponents[d][n] = b & ~kMantissa;
        panel.column[d][n] = table.index(b) * table.columns;
        panel.mask[d][n] = exponent(b) == 0 ? 0 : -1;
      }
      panel.rows[d] = range_of(values[d], lanes);
      panel.all.include(panel.rows[d]);
    }
  }

  void pack(List&) const {}

#if defined(__AVX512F__)
  template <int64_t rows, int64_t vectors>
  void add_block(float* sums, const Panel& panel, int64_t n, const List* lists, int64_t first,
                 int64_t last) const {
    __m512 sum[rows][vectors];
    load_sums(sum, sums);
    for (int64_t i = first; i < last; ++i) {
      const int64_t d = lists[0].depth[i];
      const int32_t* row[rows];
      __m512i exponents[rows];
#pragma GCC unroll 16
      for (int64_t r = 0; r < rows; ++r) {
        const int32_t a = float_bits(lists[r].value[i]);
        row[r] = table.entries + table.index(a) * table.rows;
        exponents[r] =
            _mm512_sub_epi32(_mm512_set1_epi32(a & ~kMantissa), _mm512_set1_epi32(127 << 23));
      }
#pragma GCC unroll 16
      for (int64_t v = 0; v < vectors; ++v) {
        const __m512i column = _mm512_load_si512(panel.column[d] + n + v * kVector);
        const __m512i other = _mm512_load_si512(panel.exponents[d] + n + v * kVector);
        const __m512i mask = _mm512_load_si512(panel.mask[d] + n + v * kVector);
#pragma GCC unroll 16
        for (int64_t r = 0; r < rows; ++r) {
          const __m512i entry = _mm512_i32gather_epi32(column, row[r], sizeof(int32_t));
          const __m512i bits = _mm512_add_epi32(_mm512_add_epi32(exponents[r], other), entry);
          sum[r][v] = _mm512_add_ps(sum[r][v], _mm512_castsi512_ps(_mm512_and_si512(bits, mask)));
        }
      }
    }
    store_sums(sums, sum);
  }
#else
  template <int64_t rows, int64_t vectors>
  void add_block(float* sums, const Panel& panel, int64_t n, const List* lists, int64_t first,
                 int64_t last) const {
    for (int64_t r = 0; r < rows; ++r) {
      float sum[vectors * kVector];
      std::copy_n(sums + r * kLanes, vectors * kVector, sum);
      for (int64_t i = first; i < last; ++i) {
        const int64_t d = lists[r].depth[i];
        const int32_t a = float_bits(lists[r].value[i]);
        const int32_t* row = table.entries + table.index(a) * table.rows;
        // Unsigned, since signs add up to more than an int has.
        const uint32_t exponents = static_cast<uint32_t>(a & ~kMantissa) - (127u << 23);
        for (int64_t v = 0; v < vectors * kVector; ++v) {
          const uint32_t bits = exponents + static_cast<uint32_t>(panel.exponents[d][n + v]) +
                                static_cast<uint32_t>(row[panel.column[d][n + v]]);
          sum[v] += bits_float(static_cast<int32_t>(bits) & panel.mask[d][n + v]);
        }
      }
      std::copy_n(sum, vectors * kVector, sums + r * kLanes);
    }
  }
#endif
};

}  // namespace hoconv::approx
