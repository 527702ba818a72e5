// How a multiplier packs its operands, and the product of two packed operands added to a sum: the
// bits of the definition in a few instructions.
//
// For the logarithmic multipliers the bits of the operands, added as integers, are those of the
// product without its correction: exponents add, a carry of the mantissas increments the exponent,
// and signs give their exclusive or. The correction is the same real number with and without a
// carry, so that one fused multiply-add of powers of two, rounded towards zero, adds it. Only where
// a carry and the correction together overflow the mantissa is there no correction. All this holds
// while no exponent leaves its range.
#pragma once

#include "approx/cuda/view.cuh"

namespace hoconv::approx {

constexpr int kOne = 127 << 23;  // the bits of 1.0

// The range of the exponents of numbers that are not zero: 1 to 254, and 255 for infinity and NaN.
struct Range {
  int least = 255, most = 0;
  __device__ void include(float value) {
    const int e = exponent(float_bits(value));
    if (e != 0) least = min(least, e), most = max(most, e);
  }
  __device__ bool special() const { return most == 255; }
};

// Left and Right are the packed operands; each is packed once for all of its products. Numbers
// whose `exponent_offset` is at most kInRange may always be multiplied packed. If there are others,
// `fast` tells from the ranges of both operands whether these may. A left operand that is not
// `large` has no product that drops the correction.
template <typename Multiplier>
struct Lane;

template <>
struct Lane<Exact> {
  struct Left {
    float value;
  };
  using Right = Left;
  static constexpr bool kPacked = false;  // operands stay as they are
  __device__ static void pack(Left& a, float value) { a.value = value; }
  // All but infinity and NaN are in range.
  static constexpr uint32_t kInRange = 0x7f7fffff;
  __device__ static uint32_t exponent_offset(const Left& a) {
    return float_bits(a.value) & 0x7fffffff;
  }
  __device__ static bool zero(const Left&) { return false; }
  __device__ static bool large(const Left&) { return false; }
  __device__ static bool fast(const Range&, const Range&) { return true; }
  __device__ static float original(const Left& a) { return a.value; }
  __device__ static float unit(Left&) { return 1; }
  template <bool, bool>
  __device__ static void add(float& sum, const Left& a, float, const Right& b, bool) {
    sum = __fadd_rn(sum, __fmul_rn(a.value, b.value));
  }
};

template <int keep, bool corrected>
struct Lane<Logarithmic<keep, corrected>> {
  using Definition = Logarithmic<keep, corrected>;
  static constexpr bool kPacked = true;
  static constexpr int kMantissa = Definition::kMantissa, kTop = kMantissa + 1;
  static constexpr int kCorrection = Definition::kCorrection & Definition::kKept;
  static constexpr int kAfterCarry = (Definition::kCorrection >> 1) & Definition::kKept;
  static_assert(kCorrection == 2 * kAfterCarry);

  // The bits of a product are the sum of its operands' bits less the bits of 1.0: kLess is
  // subtracted when a right operand is packed, kOff in each product. An addition of three terms
  // runs on the integer units; one of two would take the units that multiply.
  static constexpr int kOff = 1 << 23, kLess = kOne - kOff;

  // Memory filled with zeros is a zero too.
  struct alignas(8) Left {
    int bits;  // the kept ones
    // A signed power of two; 0 for a zero. Its last bit marks a large number. What that bit adds to
    // a correction is less than the last bit of any product and is cut off.
    float power;
  };
  struct alignas(8) Right {
    int bits;     // the kept ones, less kLess
    float power;  // a power of two times the correction, if there is one
  };

  __device__ static int kept(int bits) {
    return (bits & (~kMantissa | Definition::kKept)) | Definition::kSet;
  }
  __device__ static void pack(Left& a, float value) {
    const int bits = float_bits(value);
    // One in twenty-five of evenly distributed mantissas.
    const bool large = kCorrection != 0 && (kept(bits) & kMantissa) >= kTop - kAfterCarry + 1;
    a = {kept(bits), exponent(bits) == 0 ? 0.0f : bits_float((bits & ~kMantissa) | int{large})};
  }
  __device__ static void pack(Right& b, float value) {
    const int bits = float_bits(value);
    const float unit = kCorrection == 0 ? 1.0f : float{kCorrection} / kTop;
    b = {0, 0.0f};
    if (exponent(bits) != 0) b = {kept(bits) - kLess, bits_float(bits & ~kMantissa) * unit};
  }
  // In range are exponents 64 to 190, of which two add up to a normal product, and zeros.
  static constexpr uint32_t kInRange = (190 - 64) << 23;
  __device__ static uint32_t exponent_offset(const Left& a) {
    return zero(a) ? 0 : exponent_offset(a.bits);
  }
  __device__ static uint32_t exponent_offset(const Right& b) {
    return zero(b) ? 0 : exponent_offset(b.bits + kLess);
  }
  __device__ static uint32_t exponent_offset(int bits) { return (bits & 0x7f800000) - (64 << 23); }
  template <typename T>
  __device__ static bool zero(const T& operand) {
    return operand.power == 0;
  }
  // Whether every product of numbers in these ranges is normal.
  __device__ static bool fast(const Range& a, const Range& b) {
    return a.least + b.least - 127 >= 1 && a.most + b.most - 127 + 1 <= 254;
  }
  // A number, not infinite or NaN, that gives the same products as the packed one.
  __device__ static float original(const Left& a) { return zero(a) ? 0.0f : bits_float(a.bits); }
  __device__ static float original(const Right& b) {
    return zero(b) ? 0.0f : bits_float(b.bits + kLess);
  }
  __device__ static bool large(const Left& a) {
    return kCorrection != 0 && (float_bits(a.power) & 1);
  }
  // Returns 0 for a zero, which is replaced by 1.0 so that its products are finite; else 1.
  __device__ static float unit(Left& a) {
    const bool none = zero(a);
    a.bits = none ? kOne : a.bits;
    return none ? 0 : 1;
  }
  // Adds a product, times `unit`, to the sum. `a` is large only if `may_be_large`, and its unit is
  // 0 only if `may_be_zero`: a fused multiply-add costs what an addition costs, a branch more.
  // `exists` is false where b is zero; then nothing is added.
  template <bool may_be_large, bool may_be_zero>
  __device__ static void add(float& sum, const Left& a, float unit, const Right& b, bool exists) {
    int bits;
    asm("{\n.reg .s32 t;\nadd.s32 t, %1, %2;\nadd.s32 %0, t, %3;\n}"  // of three terms, see kOff
        : "=r"(bits)
        : "r"(a.bits), "r"(b.bits), "n"(-kOff));
    float product = bits_float(bits);
    if constexpr (kCorrection != 0 && may_be_large) {  // in assembly, which avoids a copy
      const int below = 2 * kTop - kAfterCarry - (a.bits & kMantissa);
      asm("{\n.reg .pred p;\nsetp.lt.s32 p, %1, %2;\n@p fma.rz.f32 %0, %3, %4, %0;\n}"
          : "+f"(product)
          : "r"(b.bits & kMantissa), "r"(below), "f"(a.power), "f"(b.power));
    } else if constexpr (kCorrection != 0) {
      product = __fmaf_rz(a.power, b.power, product);
    }
    if (exists) sum = may_be_zero ? __fmaf_rn(product, unit, sum) : __fadd_rn(sum, product);
  }
};

}  // namespace hoconv::approx
