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
  __device__ void include(float value) {
    const int e = exponent(float_bits(value));
    if (e != 0) least = min(least, e), most = max(most, e);
  }
  __device__ bool special() const { return most == 255; }
};

// Left and Right are what an operand is prepared into, once and for all of its products. Those hold
// of numbers whose `strain` is at most kPlain; of others `holds` knows. Where an operand is not
// `large`, none of its products drops the correction.
template <typename Multiplier>
struct Lane;

template <>
struct Lane<Exact> {
  struct Left {
    float value;
  };
  using Right = Left;
  static constexpr bool kPacked = false;  // operands are what they came as
  __device__ static void pack(Left& a, float value) { a.value = value; }
  static constexpr uint32_t kInRange = 0x7f7fffff;
  __device__ static uint32_t exponent_offset(const Left& a) {
    return float_bits(a.value) & 0x7fffffff;
  }
  __device__ static bool zero(const Left&) { return false; }
  __device__ static bool large(const Left&) { return false; }
  __device__ static bool fast(const Range&, const Range&) { return true; }
  __device__ static float original(const Left& a) { return a.value; }
  template <bool>
  __device__ static void add(float& sum, const Left& a, const Right& b, bool) {
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

  // Bits of a product are those of its operands, less those of 1.0: kLess is taken off a right
  // operand's, kOff off each sum. A sum of three is the integer units' work; one of two would be
  // that of the units which multiply.
  static constexpr int kOff = 1 << 23, kLess = kOne - kOff;

  // Nothing but zeros in memory, too, is a zero.
  struct alignas(8) Left {
    int bits;  // the kept ones
    // Of two, signed; 0 of a zero. Its last bit says that the number is large; what that adds to a
    // correction is less than the last bit of any product, and cut off.
    float power;
  };
  struct alignas(8) Right {
    int bits;     // the kept ones, less kLess
    float power;  // times the correction, if there is one
  };

  __device__ static int kept(int bits) {
    return (bits & (~kMantissa | Definition::kKept)) | Definition::kSet;
  }
  __device__ static void pack(Left& a, float value) {
    const int bits = float_bits(value);
    // One in twenty-five, of evenly spread mantissas.
    const bool large = kCorrection != 0 && (kept(bits) & kMantissa) >= kTop - kAfterCarry + 1;
    a = {kept(bits), exponent(bits) == 0 ? 0.0f : bits_float((bits & ~kMantissa) | int{large})};
  }
  __device__ static void pack(Right& b, float value) {
    const int bits = float_bits(value);
    const float unit = kCorrection == 0 ? 1.0f : float{kCorrection} / kTop;
    b = {0, 0.0f};
    if (exponent(bits) != 0) b = {kept(bits) - kLess, bits_float(bits & ~kMantissa) * unit};
  }
  // Exponents 64 to 190, and zeros.
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
  // Whether no product of such numbers leaves the range of exponents.
  __device__ static bool fast(const Range& a, const Range& b) {
    return a.least + b.least - 127 >= 1 && a.most + b.most - 127 + 1 <= 254;
  }
  // A number that gives the same products, of one that is not special.
  __device__ static float original(const Left& a) { return zero(a) ? 0.0f : bits_float(a.bits); }
  __device__ static float original(const Right& b) {
    return zero(b) ? 0.0f : bits_float(b.bits + kLess);
  }
  __device__ static bool large(const Left& a) {
    return kCorrection != 0 && (float_bits(a.power) & 1);
  }
  // Adds the product of a number that is not zero, and large only where `may_be_large`. b does not
  // exist where it is zero; nothing is added then.
  template <bool may_be_large>
  __device__ static void add(float& sum, const Left& a, const Right& b, bool exists) {
    int bits;
    asm("{\n.reg .s32 t;\nadd.s32 t, %1, %2;\nadd.s32 %0, t, %3;\n}"  // in this order: see kOff
        : "=r"(bits)
        : "r"(a.bits), "r"(b.bits), "n"(-kOff));
    float product = bits_float(bits);
    if constexpr (kCorrection != 0 && may_be_large) {  // written out, so that no copy is made
      const int below = 2 * kTop - kAfterCarry - (a.bits & kMantissa);
      asm("{\n.reg .pred p;\nsetp.lt.s32 p, %1, %2;\n@p fma.rz.f32 %0, %3, %4, %0;\n}"
          : "+f"(product)
          : "r"(b.bits & kMantissa), "r"(below), "f"(a.power), "f"(b.power));
    } else if constexpr (kCorrection != 0) {
      product = __fmaf_rz(a.power, b.power, product);
    }
    if (exists) sum = __fadd_rn(sum, product);
  }
};

}  // namespace hoconv::approx
