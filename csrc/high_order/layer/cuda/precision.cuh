// Products on tensor cores, by precision: the layout of an operand, its loads and the
// multiplication.
//
// A word is 32 bits of an operand: two 16-bit elements, or one float. A product is m16n8 with a
// depth of 8 words (PTX ISA, fragments of mma.m16n8k16 and mma.m16n8k8). With g = lane / 4 and t =
// lane % 4 a lane holds
//   A  words t and t + 4 of rows g and g + 8
//   B  words t and t + 4 of column g
//   C  columns 2t and 2t + 1 of rows g and g + 8
// Rows are pixels here: row g is pixel first(g) of 16, and row g + 8 the pixel `apart` after it. In
// 16 bits these are neighbours, which one word holds; floats are 8 pixels apart, so that a load
// touches different banks of shared memory. For the same reason the pitch of a row is `pitch_banks`
// modulo 32 words; the values were found by hand for k = 5.
//
// x is in shared memory as two planes of words, so that one load gives any part of an operand:
//   16 bits  0: (x[w], x[w + 1])   1: (x[w], 0)
//   TF32     0: x[w]               1: x[w] rounded to TF32
//   float32  0: x[w]               1: x[w] less x[w] rounded to TF32
#pragma once

#include <cstring>

#include "high_order/tensor_cores.cuh"

namespace hoconv::high_order::layer {

// Rounds to nearest, ties away from zero. Infinities and NaN stay.
__device__ __forceinline__ uint32_t round_to_tf32(float value) {
  const uint32_t bits = __float_as_uint(value);
  return isfinite(value) ? (bits + 0x1000) & ~0x1fffu : bits;
}

// A value less that value rounded to TF32; zero for infinities and NaN.
__device__ __forceinline__ float tf32_remainder(float value) {
  const float rest = value - __uint_as_float(round_to_tf32(value));
  return isfinite(value) ? rest : 0.0f;
}

__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// float16 and bfloat16, summed in float32.
template <typename Element>
struct HalfPrecision {
  using T = Element;
  static constexpr int elements = 2;  // a word
  static constexpr int terms = 1;     // of an operand
  static constexpr int apart = 1, pitch_banks = 19;
  __device__ static int first(int g) { return 2 * g; }
  struct A {
    uint32_t w[terms][4];
  };
  struct B {
    uint32_t w[terms][2];
  };

  __device__ static uint32_t pack(float low, float high) {
    return uint32_t{bits(narrow<T>(low))} | uint32_t{bits(narrow<T>(high))} << 16;
  }
  // Rounds a value before `split`, if `split` does not round.
  __device__ static float round(float value) { return value; }
  // Splits a word into its terms. Where a word is one element, the second argument is ignored.
  __device__ static void split(float low, float high, uint32_t (&word)[terms]) {
    word[0] = pack(low, high);
  }
  __device__ static void planes(T value, T next, uint32_t& zeroth, uint32_t& first) {
    first = bits(value);
    zeroth = first | uint32_t{bits(next)} << 16;
  }
  // x at the lane's two pixels; `at` is the first one's word in plane 0.
  __device__ static float2 pixels(const uint32_t* at) { return unpack(at[0]); }
  __device__ static float2 unpack(uint32_t word) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
      return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000)};
    else
      return {widen<float>(element(word & 0xffff)), widen<float>(element(word >> 16))};
  }

  // Loads the words at offsets `o0` and `o1` from the lane's two pixels; `at` is the first pixel.
  // If Guarded, a negative offset gives a word of zeros.
  template <bool Guarded>
  __device__ static A load(const uint32_t* at, int o0, int o1, int /*plane*/) {
    A a;
    a.w[0][0] = Guarded && o0 < 0 ? 0 : at[o0];
    a.w[0][1] = Guarded && o0 < 0 ? 0 : at[o0 + apart];
    a.w[0][2] = Guarded && o1 < 0 ? 0 : at[o1];
    a.w[0][3] = Guarded && o1 < 0 ? 0 : at[o1 + apart];
    return a;
  }
  // Loads the transposed operand: its rows are the words at offsets o0 and o1 from the pixels, its
  // depth is 16 pixels from `at` on.
  __device__ static A load_transposed(const uint32_t* at, int o0, int o1, int t, int /*plane*/) {
    A a;
    a.w[0][0] = at[o0 + 2 * t];
    a.w[0][1] = at[o1 + 2 * t];
    a.w[0][2] = at[o0 + 2 * t + 8];
    a.w[0][3] = at[o1 + 2 * t + 8];
    return a;
  }

  __device__ static void multiply(float (&c)[4], const A& a, const B& b) {
    const auto& right = b.w[0];
    high_order::multiply<T>(c, a.w[0], right[0], right[1]);
  }

 private:
  __device__ static uint16_t bits(T value) {
    uint16_t b;
    memcpy(&b, &value, sizeof b);
    return b;
  }
  __device__ static T element(uint32_t low) {
    const uint16_t b = low;
    T value;
    memcpy(&value, &b, sizeof b);
    return value;
  }
};

// float32 as one term, rounded to TF32.
struct TF32 {
  using T = float;
  static constexpr int elements = 1;
  static constexpr int terms = 1;
  static constexpr int apart = 8, pitch_banks = 12;
  __device__ static int first(int g) { return g; }
  struct A {
    uint32_t w[terms][4];
  };
  struct B {
    uint32_t w[terms][2];
  };

  __device__ static float round(float value) { return __uint_as_float(round_to_tf32(value)); }
  __device__ static void split(float value, float, uint32_t (&word)[terms]) {
    word[0] = __float_as_uint(value);
  }
  __device__ static void planes(float value, float, uint32_t& zeroth, uint32_t& first) {
    zeroth = __float_as_uint(value);
    first = round_to_tf32(value);
  }
  __device__ static float2 pixels(const uint32_t* at) {
    return {__uint_as_float(at[0]), __uint_as_float(at[apart])};
  }
  template <bool Guarded>
  __device__ static A load(const uint32_t* at, int o0, int o1, int plane) {
    at += plane;
    A a;
    a.w[0][0] = Guarded && o0 < 0 ? 0 : at[o0];
    a.w[0][1] = Guarded && o0 < 0 ? 0 : at[o0 + apart];
    a.w[0][2] = Guarded && o1 < 0 ? 0 : at[o1];
    a.w[0][3] = Guarded && o1 < 0 ? 0 : at[o1 + apart];
    return a;
  }
  // The depth is 8 pixels.
  __device__ static A load_transposed(const uint32_t* at, int o0, int o1, int t, int plane) {
    at += plane + t;
    A a;
    a.w[0][0] = at[o0];
    a.w[0][1] = at[o1];
    a.w[0][2] = at[o0 + 4];
    a.w[0][3] = at[o1 + 4];
    return a;
  }
  __device__ static void multiply(float (&c)[4], const A& a, const B& b) {
    mma_tf32(c, a.w[0], b.w[0]);
  }
};

// float32 as two terms of TF32. Three products of terms are summed; the fourth is below the
// precision of float32. Tensor cores truncate when they add to a sum, so each product starts from
// zero and is added in float32.
struct Float32 {
  using T = float;
  static constexpr int elements = 1;
  static constexpr int terms = 2;
  static constexpr int apart = 8, pitch_banks = 12;
  __device__ static int first(int g) { return g; }
  struct A {
    uint32_t w[terms][4];
  };
  struct B {
    uint32_t w[terms][2];
  };

  __device__ static float round(float value) { return value; }
  __device__ static void split(float value, float, uint32_t (&word)[terms]) {
    word[0] = round_to_tf32(value);
    word[1] = __float_as_uint(tf32_remainder(value));
  }
  __device__ static void planes(float value, float, uint32_t& zeroth, uint32_t& first) {
    zeroth = __float_as_uint(value);
    first = __float_as_uint(tf32_remainder(value));
  }
  __device__ static float2 pixels(const uint32_t* at) { return TF32::pixels(at); }
  template <bool Guarded>
  __device__ static A load(const uint32_t* at, int o0, int o1, int plane) {
    A a;
    term<Guarded>(at, o0, plane, a, 0);
    term<Guarded>(at + apart, o0, plane, a, 1);
    term<Guarded>(at, o1, plane, a, 2);
    term<Guarded>(at + apart, o1, plane, a, 3);
    return a;
  }
  __device__ static A load_transposed(const uint32_t* at, int o0, int o1, int t, int plane) {
    A a;
    term<false>(at + t, o0, plane, a, 0);
    term<false>(at + t, o1, plane, a, 1);
    term<false>(at + t + 4, o0, plane, a, 2);
    term<false>(at + t + 4, o1, plane, a, 3);
    return a;
  }
  __device__ static void multiply(float (&c)[4], const A& a, const B& b) {
    float sum[4] = {};
    mma_tf32(sum, a.w[1], b.w[0]);
    mma_tf32(sum, a.w[0], b.w[1]);
    mma_tf32(sum, a.w[0], b.w[0]);
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += sum[i];
  }

 private:
  template <bool Guarded>
  __device__ static void term(const uint32_t* at, int offset, int plane, A& a, int i) {
    const bool zero = Guarded && offset < 0;
    const float value = zero ? 0.0f : __uint_as_float(at[offset]);
    const float rest = zero ? 0.0f : __uint_as_float(at[offset + plane]);
    a.w[0][i] = __float_as_uint(value - rest);
    a.w[1][i] = __float_as_uint(rest);
  }
};

}  // namespace hoconv::high_order::layer
