// What a multiplier makes of its operands before they meet, and a product of two that are prepared,
// added to a sum: the definition's bits in a few instructions.
//
// For the logarithmic multipliers the bits of the operands, as integers, add up to those of the
// product without its correction: exponents add, a carry of the mantissas increments the exponent,
// signs give their exclusive or. The correction is the same real number whether there was a carry
// or not, so adding it is one multiplication of powers of two and addition, rounded towards zero;
// but where a carry and the correction together overflow the mantissa there is none. This holds
// where no exponent leaves its range.
#pragma once

#include "approx/cuda/view.cuh"

namespace hoconv::approx {

constexpr int kOne = 127 << 23;  // the bits of 1.0

// Exponents of numbers that are not zero: 1 to 254; 255 is infinite or NaN.
struct Range {
  int least = 255, most = 0;
  __device__ void take(float value) {
    const int e = exponent(float_bits(value));
    if (e != 0) least = min(least, e), most = max(most, e);
  }
  __device__ bool special() const { return most == 255; }
};

// Left and Right are what is kept of an operand in shared memory. Products hold of numbers whose
// `strain` is at most kPlain; of others `holds` knows. Where an operand is not `large`, none of its
// products drops the correction.
template <typename Multiplier>
struct Lane;

template <>
struct Lane<Exact> {
  struct Left {
    float value;
  };
  using Right = Left;
  __device__ static Left left(float value) { return {value}; }
  __device__ static Right right(float value) { return {value}; }
  static constexpr uint32_t kPlain = 0x7f7fffff;
  __device__ static uint32_t strain(float value) { return float_bits(value) & 0x7fffffff; }
  __device__ static bool holds(const Range&, const Range&) { return true; }
  __device__ static float original(const Left& a) { return a.value; }
  __device__ static bool large(const Left&) { return false; }
  template <bool is_large>
  __device__ static void add(float& sum, const Left& a, const Right& b) {
    sum = __fadd_rn(sum, __fmul_rn(a.value, b.value));
  }
};

template <int keep, bool corrected>
struct Lane<Logarithmic<keep, corrected>> {
  using Definition = Logarithmic<keep, corrected>;
  static constexpr int kTop = Definition::kMantissa + 1;
  static constexpr int kCorrection = Definition::kCorrection & Definition::kKept;
  static constexpr int kAfterCarry = (Definition::kCorrection >> 1) & Definition::kKept;
  static_assert(kCorrection == 2 * kAfterCarry);

  struct alignas(16) Left {
    int bits;
    float power;  // signed, of two
    int mantissa;
    float exists;  // 1, or 0 for zero
  };
  struct alignas(16) Right {
    int bits, carries;  // less those of 1.0; least mantissa whose product is not corrected
    float power;        // times the correction
    int exists;
  };

  __device__ static int kept(int bits) {
    return (bits & (~Definition::kMantissa | Definition::kKept)) | Definition::kSet;
  }
  __device__ static Left left(float value) {
    const int bits = float_bits(value);
    const bool exists = exponent(bits) != 0;
    return {exists ? kept(bits) : kOne, bits_float(bits & ~Definition::kMantissa),
            kept(bits) & Definition::kMantissa, exists ? 1.0f : 0.0f};
  }
  __device__ static Right right(float value) {
    const int bits = float_bits(value);
    const bool exists = exponent(bits) != 0;
    const float power = exists ? bits_float(bits & ~Definition::kMantissa) : 0.0f;
    return {exists ? kept(bits) - kOne : 0,
            2 * kTop - kAfterCarry - (kept(bits) & Definition::kMantissa),
            power * (float{kCorrection} / kTop), exists};
  }
  // Exponents 64 to 190, and zeros.
  static constexpr uint32_t kPlain = (190 - 64) << 23;
  __device__ static uint32_t strain(float value) {
    const int bits = float_bits(value) & 0x7f800000;
    return (bits == 0 ? kOne : bits) - (64 << 23);
  }
  // Whether no product of such numbers leaves the range of exponents.
  __device__ static bool holds(const Range& a, const Range& b) {
    return a.least + b.least - 127 >= 1 && a.most + b.most - 127 + 1 <= 254;
  }
  // A number that gives the same products, of one that is not special.
  __device__ static float original(const Left& a) {
    return a.exists == 0 ? 0.0f : bits_float(a.bits);
  }
  __device__ static float original(const Right& b) {
    return b.exists == 0 ? 0.0f : bits_float(b.bits + kOne);
  }
  // One in twenty-five, of evenly spread mantissas.
  __device__ static bool large(const Left& a) {
    return kCorrection != 0 && a.mantissa + Definition::kMantissa >= 2 * kTop - kAfterCarry;
  }
  template <bool is_large>
  __device__ static void add(float& sum, const Left& a, const Right& b) {
    float product = bits_float(a.bits * b.exists + b.bits);
    if constexpr (kCorrection != 0 && is_large)  // written out, so that no copy is made
      asm("{\n.reg .pred p;\nsetp.lt.s32 p, %1, %2;\n@p fma.rz.f32 %0, %3, %4, %0;\n}"
          : "+f"(product)
          : "r"(a.mantissa), "r"(b.carries), "f"(a.power), "f"(b.power));
    else if constexpr (kCorrection != 0)
      product = __fmaf_rz(a.power, b.power, product);
    sum = __fmaf_rn(product, a.exists, sum);
  }
};

}  // namespace hoconv::approx
