// The functions that generated kernels call, for C++ and CUDA.
//
// On a CPU the exponentials are written out without branches, so that the compiler vectorises loops
// over them; their relative error is a few units in the last place. Philox4x32-10 (Salmon et al.,
// SC 2011) is the generator of hoconv/recurrent/ir/random.py.
#pragma once

#if defined(__CUDACC__)
#define HOCONV_INLINE __device__ __forceinline__
#else
#include <math.h>  // the functions of C for float, too, which C++ has in std alone

#include <cmath>
#include <cstdint>
#include <limits>
#define HOCONV_INLINE inline __attribute__((always_inline))
#endif

namespace hoconv::recurrent {

HOCONV_INLINE uint32_t philox(int64_t seed, int64_t feature, int64_t row, int64_t step,
                              int64_t site) {
  uint32_t c0 = static_cast<uint32_t>(feature), c1 = static_cast<uint32_t>(row);
  uint32_t c2 = static_cast<uint32_t>(step), c3 = static_cast<uint32_t>(site);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return c0;
}

// What a part of a row, of `count` numbers, adds to the sum of the squares of the deviations from
// the mean of the whole row (Chan, Golub and LeVeque 1979), given its own and the sums of numbers.
template <typename A>
HOCONV_INLINE A combine_spread(A own, A part, int count, A whole, int size) {
  const A deviation = count > 0 ? part / A(count) - whole / A(size) : A(0);
  return own + A(count) * deviation * deviation;
}

// As in PyTorch, the result is NaN if an operand is.
template <typename A>
HOCONV_INLINE A minimum(A a, A b) {
  return a < b || a != a ? a : b;
}
template <typename A>
HOCONV_INLINE A maximum(A a, A b) {
  return a > b || a != a ? a : b;
}
template <typename A>
HOCONV_INLINE A relu(A x) {
  return x < A(0) ? A(0) : x;
}

template <typename A>
HOCONV_INLINE A sign_of(A x) {
  return A(x > A(0)) - A(x < A(0));
}

#if defined(__CUDACC__)

template <typename A>
HOCONV_INLINE A infinity() {
  return static_cast<A>(__longlong_as_double(0x7ff0000000000000ll));
}
template <typename A>
HOCONV_INLINE A not_a_number() {
  return static_cast<A>(__longlong_as_double(0x7ff8000000000000ll));
}
HOCONV_INLINE float absolute(float x) { return fabsf(x); }
HOCONV_INLINE double absolute(double x) { return fabs(x); }
HOCONV_INLINE float logarithm(float x) { return logf(x); }
HOCONV_INLINE double logarithm(double x) { return log(x); }
HOCONV_INLINE float square_root(float x) { return sqrtf(x); }
HOCONV_INLINE double square_root(double x) { return sqrt(x); }
HOCONV_INLINE float logarithm_of_one_plus(float x) { return log1pf(x); }
HOCONV_INLINE double logarithm_of_one_plus(double x) { return log1p(x); }
HOCONV_INLINE float exponential_minus_one(float x) { return expm1f(x); }
HOCONV_INLINE double exponential_minus_one(double x) { return expm1(x); }
HOCONV_INLINE float sine(float x) { return sinf(x); }
HOCONV_INLINE double sine(double x) { return sin(x); }
HOCONV_INLINE float cosine(float x) { return cosf(x); }
HOCONV_INLINE double cosine(double x) { return cos(x); }
HOCONV_INLINE float round_down(float x) { return floorf(x); }
HOCONV_INLINE double round_down(double x) { return floor(x); }
HOCONV_INLINE float remainder_toward_zero(float a, float b) { return fmodf(a, b); }
HOCONV_INLINE double remainder_toward_zero(double a, double b) { return fmod(a, b); }
HOCONV_INLINE float exponential(float x) { return expf(x); }
HOCONV_INLINE double exponential(double x) { return exp(x); }
HOCONV_INLINE float hyperbolic_tangent(float x) { return tanhf(x); }
HOCONV_INLINE double hyperbolic_tangent(double x) { return tanh(x); }
HOCONV_INLINE float error_function(float x) { return erff(x); }
HOCONV_INLINE double error_function(double x) { return erf(x); }
HOCONV_INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
HOCONV_INLINE double softplus(double x) { return x > 20.0 ? x : log1p(exp(x)); }

#else

template <typename A>
HOCONV_INLINE A infinity() {
  return std::numeric_limits<A>::infinity();
}
template <typename A>
HOCONV_INLINE A not_a_number() {
  return std::numeric_limits<A>::quiet_NaN();
}
template <typename A>
HOCONV_INLINE A absolute(A x) {
  return std::abs(x);
}
template <typename A>
HOCONV_INLINE A logarithm(A x) {
  return std::log(x);
}
template <typename A>
HOCONV_INLINE A logarithm_of_one_plus(A x) {
  return std::log1p(x);
}
template <typename A>
HOCONV_INLINE A exponential_minus_one(A x) {
  return std::expm1(x);
}
template <typename A>
HOCONV_INLINE A sine(A x) {
  return std::sin(x);
}
template <typename A>
HOCONV_INLINE A cosine(A x) {
  return std::cos(x);
}
template <typename A>
HOCONV_INLINE A round_down(A x) {
  return std::floor(x);
}
template <typename A>
HOCONV_INLINE A remainder_toward_zero(A a, A b) {
  return std::fmod(a, b);
}
template <typename A>
HOCONV_INLINE A square_root(A x) {
  return std::sqrt(x);
}
template <typename A>
HOCONV_INLINE A error_function(A x) {
  return std::erf(x);
}

// exp(x) = 2^n * (1 + rest), of x whose n fits the integer. Polynomials are evaluated in pairs of
// terms, which do not wait for each other: what limits a loop is the latency of an exponential.
template <typename A, typename N>
struct Power {
  N n;
  A rest;
};

HOCONV_INLINE Power<float, int32_t> power(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
  const float shifted = x * 1.44269504f + magic;
  const float k = shifted - magic;
  const float r = (x - k * 0.693359375f) + k * 2.12194440e-4f, r2 = r * r;
  float p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r2 + (r * (1.0f / 120) + 1.0f / 24);
  p = p * r2 + (r * (1.0f / 6) + 0.5f);
  return {__builtin_bit_cast(int32_t, shifted) - 0x4B400000, p * r2 + r};
}

HOCONV_INLINE Power<double, int64_t> power(double x) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52
  const double shifted = x * 1.4426950408889634 + magic;
  const double k = shifted - magic;
  const double r = (x - k * 6.93145751953125e-1) - k * 1.42860682030941723212e-6, r2 = r * r;
  double p = r * (1.0 / 6227020800) + 1.0 / 479001600;
  p = p * r2 + (r * (1.0 / 39916800) + 1.0 / 3628800);
  p = p * r2 + (r * (1.0 / 362880) + 1.0 / 40320);
  p = p * r2 + (r * (1.0 / 5040) + 1.0 / 720);
  p = p * r2 + (r * (1.0 / 120) + 1.0 / 24);
  p = p * r2 + (r * (1.0 / 6) + 0.5);
  return {__builtin_bit_cast(int64_t, shifted) - 0x4338000000000000, p * r2 + r};
}

// 2^n, of n for which it is a normal number.
HOCONV_INLINE float power_of_two(int32_t n) {
  return __builtin_bit_cast(float, static_cast<int32_t>((static_cast<uint32_t>(n) + 127u) << 23));
}
HOCONV_INLINE double power_of_two(int64_t n) {
  return __builtin_bit_cast(double, (static_cast<uint64_t>(n) + 1023u) << 52);
}

// x, or what is nearest to it where the exponential of what is further is 0 or infinite. NaN stays.
HOCONV_INLINE float to_range(float x) { return x > 90.0f ? 90.0f : x < -105.0f ? -105.0f : x; }
HOCONV_INLINE double to_range(double x) { return x > 710.0 ? 710.0 : x < -746.0 ? -746.0 : x; }

// n / 2, rounded down. That of 64 bits has no arithmetic shift, which AVX2 does not have.
HOCONV_INLINE int32_t half_of(int32_t n) { return n >> 1; }
HOCONV_INLINE int64_t half_of(int64_t n) {
  return static_cast<int64_t>(static_cast<uint64_t>(n + 4096) >> 1) - 2048;
}

// The scale is a power of two in two factors, neither of which overflows if their product does not.
template <typename A>
HOCONV_INLINE A exponential(A x) {
  const auto e = power(to_range(x));
  const A first = power_of_two(half_of(e.n)), second = power_of_two(e.n - half_of(e.n));
  return (first + first * e.rest) * second;
}

// (exp(2|x|) - 1) / (exp(2|x|) + 1), whose numerator is computed without cancellation.
template <typename A>
HOCONV_INLINE A hyperbolic_tangent(A x) {
  const A y = absolute(x) > A(20) ? A(20) : absolute(x);
  const auto e = power(y + y);
  const A scale = power_of_two(e.n);
  const A above = scale * e.rest + (scale - A(1));
  return std::copysign(above / (above + A(2)), x);
}

template <typename A>
HOCONV_INLINE A softplus(A x) {
  return x > A(20) ? x : std::log1p(exponential(x));
}

#endif

// As in PyTorch, the result is 0 where exp(-x) is infinite: below -88.7 in float32, -709.8 in
// float64.
template <typename A>
HOCONV_INLINE A sigmoid(A x) {
  return A(1) / (A(1) + exponential(-x));
}

// As in Python and PyTorch, the result has the sign of b.
template <typename A>
HOCONV_INLINE A modulo(A a, A b) {
  const A rest = remainder_toward_zero(a, b);
  return rest != A(0) && (rest < A(0)) != (b < A(0)) ? rest + b : rest;
}

}  // namespace hoconv::recurrent
