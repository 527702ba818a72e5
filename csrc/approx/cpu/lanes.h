// The inner loop of the approximate matrix products for each kind of multiplier: one number times a
// row of kLanes numbers, added to kLanes sums. No operand is infinite or NaN.
//
// The logarithmic product of normal numbers a and b, without overflow or underflow: let A and B be
// the bits of the numbers after their mantissas are cut and set, and m(a) and m(b) these mantissas.
// The product is
//   base = A + B - (127 << 23)
// read as a float, plus 2^e(a) 2^e(b) times the correction C, rounded toward zero. The sum of the
// mantissas carries into the exponent by itself; this doubles the unit of the mantissa and so
// halves the correction, as the definition does. Only where m(a) + m(b) >= 2^24 - C / 2 does the
// definition drop the correction. With AVX-512, whose multiply-add can round toward zero, a product
// is an integer addition, a multiply-add, and the addition to the sum. Of normally distributed a,
// one in 35 has so large a mantissa that some b drops the correction; there a comparison masks the
// multiply-add.
// Bits below the kept ones are zero without further work: the lowest kept bit is set in both
// operands, so that their sum, and the correction, are even in units of it, even after a halving.
// Without AVX-512 the correction is added to the integer.
#pragma once

#include <algorithm>
#include <cstdint>

#include "approx/multipliers.h"
#include "hoconv/blocks.h"
#include "hoconv/vec.h"

namespace hoconv::approx {

#if defined(__AVX512F__)
constexpr int64_t kVector = 16;  // floats in a register
constexpr int64_t kRegisters = 32;
#else
constexpr int64_t kVector = Vec<float>::size;
constexpr int64_t kRegisters = 16;
#endif
constexpr int64_t kLanes = 128;     // the most lanes of a panel
constexpr int64_t kDepth = 16;      // rows of a panel, which takes 16 KiB
constexpr int64_t kRowsAtOnce = 4;  // rows of the left operand, if none has zeros

// A range of exponents of normal numbers, empty if there are none. 255 is infinity or NaN.
struct Range {
  int32_t least = 255, most = 0;

  bool special() const { return most == 255; }
  void include(int32_t e) {
    least = std::min(least, e == 0 ? 255 : e);
    most = std::max(most, e);
  }
  void include(const Range& other) {
    least = std::min(least, other.least);
    most = std::max(most, other.most);
  }
  static Range of(float value) {
    Range range;
    range.include(exponent(float_bits(value)));
    return range;
  }
};

// Some numbers of a row of the left operand, and for each the row of the panel that it multiplies.
struct Numbers {
  int64_t count;
  alignas(64) float value[kDepth];  // zero after the last
  alignas(64) int32_t depth[kDepth];

  // Lists those of `values` that have a bit of `mask` set. It has no branches, since zeros cannot
  // be predicted.
  void list(const float* values, int32_t mask) {
#if defined(__AVX512F__)
    static_assert(kDepth == 16);
    const __m512i bits = _mm512_load_si512(values);
    const __mmask16 wanted = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(mask));
    const __m512i rows = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    _mm512_store_si512(value, _mm512_maskz_compress_epi32(wanted, bits));
    _mm512_store_si512(depth, _mm512_maskz_compress_epi32(wanted, rows));
    count = __builtin_popcount(wanted);
#else
    count = 0;
    for (int64_t d = 0; d < kDepth; ++d) {
      value[count] = values[d];
      depth[count] = d;
      count += (float_bits(values[d]) & mask) != 0;
    }
    std::fill(value + count, value + kDepth, 0.0f);
#endif
  }
};

inline Range range_of(const float* values, int64_t n) {
  int32_t least = 255, most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t e = exponent(float_bits(values[i]));
    least = std::min(least, e == 0 ? 255 : e);
    most = std::max(most, e);
  }
  return {least, most};
}

// Loads and stores the sums of rows that are kLanes apart. The loops are unrolled so that the sums
// stay in registers.
template <int64_t rows, int64_t vectors, typename V>
void load_sums(V (&sum)[rows][vectors], const float* sums) {
#pragma GCC unroll 16
  for (int64_t r = 0; r < rows; ++r)
#pragma GCC unroll 16
    for (int64_t v = 0; v < vectors; ++v)
      std::memcpy(&sum[r][v], sums + r * kLanes + v * kVector, sizeof(V));
}
template <int64_t rows, int64_t vectors, typename V>
void store_sums(float* sums, const V (&sum)[rows][vectors]) {
#pragma GCC unroll 16
  for (int64_t r = 0; r < rows; ++r)
#pragma GCC unroll 16
    for (int64_t v = 0; v < vectors; ++v)
      std::memcpy(sums + r * kLanes + v * kVector, &sum[r][v], sizeof(V));
}

// sums[r, n] += lists[r][i] * panel[depth[i], n] for i from `first` to `last`, in ascending order.
template <int64_t rows, typename Lanes>
void multiply_add(const Lanes& lanes, float* sums, const typename Lanes::Panel& panel,
                  const typename Lanes::List* lists, int64_t first, int64_t last, int64_t columns) {
  constexpr int64_t block = std::min<int64_t>(Lanes::kSums / rows, 8);
  for (int64_t n = 0; n < columns; n += block * kVector)
    with_constant<block>((columns - n + kVector - 1) / kVector, [&](auto vectors) {
      lanes.template add_block<rows, vectors>(sums + n, panel, n, lists, first, last);
    });
}

struct ExactLanes {
  static constexpr int64_t kSums = kRegisters / 2;  // registers of sums
  struct Panel {
    Range all, rows[kDepth];
    alignas(64) float value[kDepth][kLanes];
  };
  using List = Numbers;

  static float multiply(float a, float b) { return Exact::multiply(a, b); }
  static constexpr int32_t kNonzero = INT32_MAX;  // numbers without a bit of it have zero products
  static bool fast(const Range& a, const Range& b) { return !a.special() && !b.special(); }
  static bool underflows(const Range&, const Range&) { return false; }

  void pack(Panel& panel, const float (*values)[kLanes], int64_t depth, int64_t lanes) const {
    panel.all = {};
    for (int64_t d = 0; d < depth; ++d) {
      std::copy(values[d], values[d] + lanes, panel.value[d]);
      panel.rows[d] = range_of(values[d], lanes);
      panel.all.include(panel.rows[d]);
    }
  }

  void pack(List&) const {}

  template <int64_t rows, int64_t vectors>
  void add_block(float* sums, const Panel& panel, int64_t n, const List* lists, int64_t first,
                 int64_t last) const {
    typedef float V __attribute__((vector_size(kVector * sizeof(float))));
    V sum[rows][vectors];
    load_sums(sum, sums);
    for (int64_t i = first; i < last; ++i) {
      const float* row = panel.value[lists[0].depth[i]] + n;
#pragma GCC unroll 16
      for (int64_t v = 0; v < vectors; ++v) {
        V other;
        std::memcpy(&other, row + v * kVector, sizeof other);
#pragma GCC unroll 16
        for (int64_t r = 0; r < rows; ++r) {
          V product = lists[r].value[i] * other;
          keep_rounded(product);
          sum[r][v] += product;
        }
      }
    }
    store_sums(sums, sum);
  }
};

// The lanes of all logarithmic multipliers.
struct LogarithmicLanes {
  static constexpr int64_t kSums = 16;
  static constexpr int32_t kMantissa = 0x7fffff;
  float (*multiply)(float, float);
  int32_t kept, set, correction;

  struct Panel {
    Range all, rows[kDepth];
    bool zeros;                                // whether it has any
    alignas(64) int32_t bits[kDepth][kLanes];  // cut and set; 0 for a zero
    alignas(64) float power[kDepth][kLanes];   // 2^e times the correction; 0 for a zero
  };
  struct List : Numbers {
    alignas(64) int32_t bits[kDepth];   // cut and set, the exponents' bias subtracted
    alignas(64) int32_t limit[kDepth];  // the other mantissa must be below it for a correction
    alignas(64) float power[kDepth];    // +-2^e
  };

  static constexpr int32_t kNonzero = 0x7f800000;  // numbers without a bit of it have zero products
  // No product overflows or underflows, even with a carry and a correction, and no power is
  // subnormal.
  static bool fast(const Range& a, const Range& b) {
    if (a.special() || b.special()) return false;
    return a.least + b.least > 127 && a.most + b.most < 127 + 252 && b.least > 8;
  }
  // Every product is zero.
  static bool underflows(const Range& a, const Range& b) { return a.most + b.most + 2 <= 127; }

  void pack(Panel& panel, const float (*values)[kLanes], int64_t depth, int64_t lanes) const {
    const float unit = correction * 0x1p-23f;
    int32_t all_nonzero = -1;
    panel.all = {};
    for (int64_t d = 0; d < depth; ++d) {
      for (int64_t n = 0; n < lanes; ++n) {
        const int32_t b = float_bits(values[d][n]);
        const int32_t nonzero = exponent(b) == 0 ? 0 : -1;
        panel.bits[d][n] = ((b & (kept | ~kMantissa)) | set) & nonzero;
        panel.power[d][n] = bits_float(b & ~kMantissa & nonzero) * unit;
        all_nonzero &= nonzero;
      }
      panel.rows[d] = range_of(values[d], lanes);
      panel.all.include(panel.rows[d]);
    }
    panel.zeros = all_nonzero == 0;
  }

  void pack(List& list) const {
    for (int64_t i = 0; i < kDepth; ++i) {
      const int32_t b = float_bits(list.value[i]);
      list.bits[i] = static_cast<int32_t>(static_cast<uint32_t>((b & (kept | ~kMantissa)) | set) -
                                          (127u << 23));
      list.limit[i] = (1 << 24) - correction / 2 - ((b & kept) | set);
      list.power[i] = bits_float(b & ~kMantissa);
    }
  }

#if defined(__AVX512F__)
  template <int64_t rows, int64_t vectors>
  void add_block(float* sums, const Panel& panel, int64_t n, const List* lists, int64_t first,
                 int64_t last) const {
    if (panel.zeros)
      add_block<rows, vectors, true>(sums, panel, n, lists, first, last);
    else
      add_block<rows, vectors, false>(sums, panel, n, lists, first, last);
  }

 private:
  template <int64_t rows, int64_t vectors, bool zeros>
  static void add_block(float* sums, const Panel& panel, int64_t n, const List* lists,
                        int64_t first, int64_t last) {
    __mmask16 large = 0;
    for (int64_t r = 0; r < rows; ++r)
      large |=
          _mm512_cmple_epi32_mask(_mm512_load_si512(lists[r].limit), _mm512_set1_epi32(kMantissa));
    __m512 sum[rows][vectors];
    load_sums(sum, sums);
    for (int64_t i = first; i < last; ++i)
      if (large >> i & 1)
        add_products<zeros, true>(sum, panel, n, lists, i);
      else
        add_products<zeros, false>(sum, panel, n, lists, i);
    store_sums(sums, sum);
  }

  // Adds the products of number i of each list. `zeros`: the panel may have zeros; `large`: the
  // numbers may be so large that a correction is dropped.
  template <bool zeros, bool large, int64_t rows, int64_t vectors>
  [[gnu::always_inline]] static void add_products(__m512 (&sum)[rows][vectors], const Panel& panel,
                                                  int64_t n, const List* lists, int64_t i) {
    const int64_t d = lists[0].depth[i];
    __m512i bits[rows];
    __m512 power[rows];
#pragma GCC unroll 16
    for (int64_t r = 0; r < rows; ++r) {
      bits[r] = _mm512_set1_epi32(lists[r].bits[i]);
      power[r] = _mm512_set1_ps(lists[r].power[i]);
    }
#pragma GCC unroll 16
    for (int64_t v = 0; v < vectors; ++v) {
      const __m512i other = _mm512_load_si512(panel.bits[d] + n + v * kVector);
      const __m512 other_power = _mm512_load_ps(panel.power[d] + n + v * kVector);
      const __m512i mantissa = _mm512_and_si512(other, _mm512_set1_epi32(kMantissa));
      const __mmask16 nonzero = zeros ? _mm512_test_epi32_mask(other, other) : 0xffff;
#pragma GCC unroll 16
      for (int64_t r = 0; r < rows; ++r) {
        const __m512 base = _mm512_castsi512_ps(_mm512_maskz_add_epi32(nonzero, bits[r], other));
        const __mmask16 corrected =
            large ? _mm512_cmplt_epi32_mask(mantissa, _mm512_set1_epi32(lists[r].limit[i]))
                  : 0xffff;
        const __m512 product = _mm512_mask3_fmadd_round_ps(power[r], other_power, base, corrected,
                                                           _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
        sum[r][v] = _mm512_add_ps(sum[r][v], product);
      }
    }
  }
#else
  // Adds the correction as an integer. With a carry it is halved, or dropped where it would carry
  // again. Without one it is whole, and where it carries, the excess is halved.
  template <int64_t rows, int64_t vectors>
  void add_block(float* sums, const Panel& panel, int64_t n, const List* lists, int64_t first,
                 int64_t last) const {
    using V = Vec<float>;
    using Bits = V::bits;
    const Bits whole = Bits{} + correction, half = Bits{} + correction / 2;
    for (int64_t r = 0; r < rows; ++r) {
      typename V::type sum[vectors];
      for (int64_t v = 0; v < vectors; ++v) sum[v] = V::load(sums + r * kLanes + v * kVector);
      for (int64_t i = first; i < last; ++i) {
        const int64_t d = lists[r].depth[i];
        const int32_t mantissa = (lists[r].bits[i] & kMantissa);
        for (int64_t v = 0; v < vectors; ++v) {
          Bits other;
          std::memcpy(&other, panel.bits[d] + n + v * kVector, sizeof other);
          const Bits total = (other & kMantissa) + mantissa;
          const Bits over = total + whole - (1 << 23);  // of a mantissa's end, if not negative
          const Bits alone = over < 0 ? whole : whole - over + (over >> 1);
          const Bits carried = total < (1 << 24) - half ? half : Bits{};
          const Bits bits = other + lists[r].bits[i] + (total < (1 << 23) ? alone : carried);
          sum[v] += (V::type)(other == 0 ? Bits{} : bits);
        }
      }
      for (int64_t v = 0; v < vectors; ++v) V::store(sums + r * kLanes + v * kVector, sum[v]);
    }
  }
#endif
};

inline ExactLanes lanes_of(Exact) { return {}; }

template <int keep, bool corrected>
LogarithmicLanes lanes_of(Logarithmic<keep, corrected>) {
  using L = Logarithmic<keep, corrected>;
  return {L::multiply, L::kKept, L::kSet, L::kCorrection & L::kKept};
}

}  // namespace hoconv::approx
