// The definition of every multiplier, one product at a time, for the CPU and the GPU.
//
// The ground truth of the kernels; hoconv/ops/approx/multipliers.py is its twin in Python. A new
// multiplier with a kernel of its own is a type with `multiply` and `derivative` and a line in
// with_multiplier; any other is a table of mantissas.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <cstring>
#include <string_view>

#if defined(__CUDACC__)
#define HOCONV_HD __host__ __device__
#else
#define HOCONV_HD
#endif

namespace hoconv::approx {

HOCONV_HD inline int32_t float_bits(float value) {
  int32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
HOCONV_HD inline float bits_float(int32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
HOCONV_HD inline int32_t exponent(int32_t bits) { return (bits >> 23) & 0xff; }

// Keeps the compiler from fusing a product (a float or a register of them) with a later addition,
// which would not round it.
template <typename T>
inline void keep_rounded(T& product) {
#if defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#else
  asm("" : "+m"(product));
#endif
}

// fl32(a * b)
HOCONV_HD inline float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  float product = a * b;
  keep_rounded(product);
  return product;
#endif
}

// IEEE multiplication.
struct Exact {
  HOCONV_HD static float multiply(float a, float b) { return rounded_product(a, b); }
  // The derivative of the product with respect to a.
  HOCONV_HD static float derivative(float, float b) { return b; }
};

// Mitchell's logarithmic multiplication with the `keep` highest mantissa bits, and with
// `corrected` the minimally biased one: Saadat, Bokhari, Parameswaran, IEEE TCAD 2018.
template <int keep, bool corrected>
struct Logarithmic {
  static constexpr int32_t kMantissa = 0x7fffff;
  static constexpr int32_t kKept = kMantissa >> (23 - keep) << (23 - keep);
  // The lowest kept bit, which is set if bits below it are cut off: halfway between the least and
  // the largest value that it and these bits can have.
  static constexpr int32_t kSet = corrected && keep < 23 ? 1 << (23 - keep) : 0;
  static constexpr int32_t kCorrection = corrected ? 0xA0000 : 0;  // 2^-4 + 2^-6

  HOCONV_HD static int32_t mantissa(int32_t bits) { return (bits & kKept) | kSet; }

  HOCONV_HD static float multiply(float a, float b) {
    const int32_t bits_a = float_bits(a), bits_b = float_bits(b);
    const int32_t ea = exponent(bits_a), eb = exponent(bits_b);
    if (ea == 255 || eb == 255) return a * b;  // infinite or NaN: the exact product
    if (ea == 0 || eb == 0) return 0;
    const int32_t sum = mantissa(bits_a) + mantissa(bits_b);
    const int32_t carry = sum >> 23, fraction = sum & kMantissa;
    const int32_t corrected_fraction = fraction + ((kCorrection >> carry) & kKept);
    int32_t e = ea + eb - 127 + carry, m = corrected_fraction;
    if (corrected_fraction > kMantissa) {
      m = carry ? fraction : (corrected_fraction - kMantissa - 1) >> 1;
      e += 1 - carry;
    }
    if (e <= 0) return 0;
    const int32_t sign = (bits_a ^ bits_b) & INT32_MIN;
    return bits_float(sign | (e >= 255 ? 255 << 23 : e << 23 | (m & kKept)));
  }

  // The derivative of the product with respect to a, except where the product jumps: sign(b) 2^e(b)
  // (1 + carry).
  HOCONV_HD static float derivative(float a, float b) {
    const int32_t bits_a = float_bits(a), bits_b = float_bits(b);
    const int32_t ea = exponent(bits_a), eb = exponent(bits_b);
    if (ea == 255 || eb == 255) return b;
    if (eb == 0) return 0;
    const float power = bits_float(bits_b & ~kMantissa);
    return mantissa(bits_a) + mantissa(bits_b) > kMantissa ? 2 * power : power;
  }
};

// A multiplier whose mantissas' products are in a table. An entry has the bits of the product
// of 1.i and 1.j, which is from 0.25 to 8, less those of 1.0: what is added to the sum of the
// exponents, and the mantissa.
struct MantissaTable {
  const int32_t* entries;
  int32_t bits;  // of each mantissa, from the highest, that count
  // Strides of the first and the second operand.
  int32_t rows, columns;

  static constexpr int32_t kMantissa = 0x7fffff;

  HOCONV_HD int32_t index(int32_t bits_of_float) const {
    return (bits_of_float & kMantissa) >> (23 - bits);
  }

  HOCONV_HD float multiply(float a, float b) const {
    const int32_t bits_a = float_bits(a), bits_b = float_bits(b);
    const int32_t ea = exponent(bits_a), eb = exponent(bits_b);
    if (ea == 255 || eb == 255) return rounded_product(a, b);
    if (ea == 0 || eb == 0) return 0;
    const int32_t entry = entries[index(bits_a) * rows + index(bits_b) * columns];
    const int32_t e = ea + eb - 127 + (entry >> 23);
    if (e <= 0) return 0;
    const int32_t sign = (bits_a ^ bits_b) & INT32_MIN;
    return bits_float(sign | (e >= 255 ? 255 << 23 : e << 23 | (entry & kMantissa)));
  }
};

// Calls f with the multiplier of that name.
template <typename F>
void with_multiplier(std::string_view name, F&& f) {
  if (name == "exact") return f(Exact{});
  if (name == "mitchell32") return f(Logarithmic<23, false>{});
  if (name == "mitchell16") return f(Logarithmic<7, false>{});
  if (name == "mbm32") return f(Logarithmic<23, true>{});
  if (name == "mbm16") return f(Logarithmic<7, true>{});
  if (name == "mbm14") return f(Logarithmic<5, true>{});
  if (name == "mbm12") return f(Logarithmic<3, true>{});
  if (name == "mbm10") return f(Logarithmic<1, true>{});
  STD_TORCH_CHECK(false, "multiplier: expected one of those of hoconv.approx.MULTIPLIERS");
}

}  // namespace hoconv::approx
