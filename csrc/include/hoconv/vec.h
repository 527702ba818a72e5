// A SIMD register of the target machine, and conversions of rows of a tensor to and from the type
// of the arithmetic: float for float16, bfloat16 and float32, double for float64.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "hoconv/accumulate.h"

namespace hoconv {

// 32 bytes with AVX-512 too, which then only doubles the number of registers: an unaligned 64-byte
// load always crosses a cache line, which costs more than the wider register saves.
#if defined(__AVX__)
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

template <typename A>
struct Vec {
  typedef A type __attribute__((vector_size(kVecBytes)));
  // The bits of a lane. A comparison gives all ones or all zeros.
  typedef std::conditional_t<sizeof(A) == 4, int32_t, int64_t> lane_bits;
  typedef lane_bits bits __attribute__((vector_size(kVecBytes)));
  static constexpr int64_t size = kVecBytes / sizeof(A);

  // A mask of the first n lanes.
  static bits first(int64_t n) {
    bits lanes;
    for (int64_t i = 0; i < size; ++i) lanes[i] = i < n ? -1 : 0;
    return lanes;
  }

  static type load(const A* p) {
    type v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(A* p, type v) { std::memcpy(p, &v, sizeof v); }

  // Stores past the caches, for output too large to be read from them again. `p` is aligned to
  // kVecBytes.
  static void stream(A* p, type v) {
#if defined(__AVX__)
    if constexpr (std::is_same_v<A, float>)
      _mm256_stream_ps(p, (__m256)v);
    else
      _mm256_stream_pd(p, (__m256d)v);
#else
    store(p, v);
#endif
  }

  // Transposes a square of lanes: each round lets the lanes of its upper and lower half alternate.
  static void transpose(type (&rows)[size]) {
    constexpr std::make_integer_sequence<lane_bits, size> lanes{};
    for (int64_t round = 1; round < size; round *= 2) {
      type next[size];
      for (int64_t i = 0; i < size / 2; ++i) {
        next[2 * i] = interleave<0>(rows[i], rows[i + size / 2], lanes);
        next[2 * i + 1] = interleave<size / 2>(rows[i], rows[i + size / 2], lanes);
      }
      for (int64_t i = 0; i < size; ++i) rows[i] = next[i];
    }
  }

 private:
  // Lanes of a and of b by turns, from lane First on.
  template <lane_bits First, lane_bits... I>
  static type interleave(type a, type b, std::integer_sequence<lane_bits, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (First + I / 2 + I % 2 * lane_bits{size})...);
#else
    return __builtin_shuffle(a, b, bits{(First + I / 2 + I % 2 * lane_bits{size})...});
#endif
  }
};

inline void stream_fence() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

// dst[i] = src[i * stride]
template <typename T>
void load_row(acc_t<T>* dst, const T* src, int64_t stride, int64_t n) {
  if (stride != 1) {
#pragma GCC unroll 8  // a round of the loop is longer than the copy
    for (int64_t i = 0; i < n; ++i) dst[i] = static_cast<acc_t<T>>(src[i * stride]);
    return;
  }
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    std::memcpy(dst, src, n * sizeof(T));
    return;
  }
  int64_t i = 0;
  if constexpr (std::is_same_v<T, BFloat16>) {
    for (; i < n; ++i) {
      const uint32_t bits = static_cast<uint32_t>(src[i].x) << 16;
      std::memcpy(dst + i, &bits, 4);
    }
    return;
  }
#if defined(__F16C__)
  if constexpr (std::is_same_v<T, Half>) {
    for (; i + 8 <= n; i += 8) {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
      _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(half));
    }
  }
#endif
  for (; i < n; ++i) dst[i] = static_cast<acc_t<T>>(src[i]);
}

// Loads a register of numbers. A copy on the stack, which a conversion needs, is slow: a load of
// what was just stored in smaller parts waits until all of them are in the cache.
template <typename T>
typename Vec<acc_t<T>>::type load_vector(const T* src) {
  using A = acc_t<T>;
  if constexpr (std::is_same_v<T, A>) return Vec<A>::load(src);
  A row[Vec<A>::size];
  load_row<T>(row, src, 1, Vec<A>::size);
  return Vec<A>::load(row);
}

// Calls f(i) with the first of every `size` of n numbers; the last overlap those before them if n
// is no multiple. n is at least `size`.
template <typename F>
void for_each_overlapping(int64_t n, int64_t size, F&& f) {
  int64_t i = 0;
  for (; i + size < n; i += size) f(i);
  f(n - size);
}

// dst[j * pitch + i] = src[i * stride + j] for j < columns, i < n
template <typename T>
void load_columns(acc_t<T>* dst, int64_t pitch, const T* src, int64_t stride, int64_t columns,
                  int64_t n) {
  using A = acc_t<T>;
  using V = Vec<A>;
  // Transposes a square from row i and column j on, of which `wanted` columns are stored.
  const auto square = [&](int64_t i, int64_t j, int64_t wanted) {
    typename V::type lanes[V::size];
    for (int64_t m = 0; m < V::size; ++m) lanes[m] = load_vector<T>(src + (i + m) * stride + j);
    V::transpose(lanes);
#pragma GCC unroll 16
    for (int64_t m = 0; m < V::size; ++m)
      if (m < wanted) V::store(dst + (j + m) * pitch + i, lanes[m]);
  };
  const auto by_column = [&](int64_t i, int64_t count) {
    for (int64_t j = 0; j < columns; ++j)
      load_row<T>(dst + j * pitch + i, src + i * stride + j, stride, count);
  };
  if (n < V::size) return by_column(0, n);
  for_each_overlapping(n, V::size, [&](int64_t i) {
    if (columns >= V::size)
      for_each_overlapping(columns, V::size, [&](int64_t j) { square(i, j, V::size); });
    // Fewer columns are read together with what is behind them, up to the last column of all rows.
    else if ((i + V::size - 1) * stride + V::size <= (n - 1) * stride + columns)
      square(i, 0, columns);
    else
      by_column(i, V::size);
  });
}

// dst[i * stride] = src[i], rounded to nearest even
template <typename T>
void store_row(T* dst, int64_t stride, const acc_t<T>* src, int64_t n) {
  if (stride != 1) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < n; ++i) dst[i * stride] = static_cast<T>(src[i]);
    return;
  }
  int64_t i = 0;
  if constexpr (std::is_same_v<T, BFloat16>) {
    for (; i < n; ++i) {
      uint32_t bits;
      std::memcpy(&bits, src + i, 4);
      const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
      const bool nan = (bits & 0x7fffffff) > 0x7f800000;
      dst[i].x = static_cast<uint16_t>(nan ? 0x7fc0 : rounded);
    }
    return;
  }
#if defined(__F16C__)
  if constexpr (std::is_same_v<T, Half>) {
    for (; i + 8 <= n; i += 8) {
      const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), half);
    }
  }
#endif
  for (; i < n; ++i) dst[i] = static_cast<T>(src[i]);
}

// As store_row, of the numbers of a register.
template <typename T>
void store_vector(T* dst, int64_t stride, typename Vec<acc_t<T>>::type v) {
  using A = acc_t<T>;
  if constexpr (std::is_same_v<T, A>) {
    if (stride == 1) return Vec<A>::store(dst, v);
  }
  A row[Vec<A>::size];
  Vec<A>::store(row, v);
  store_row<T>(dst, stride, row, Vec<A>::size);
}

// dst[i * stride + j] = src[j * pitch + i] for j < columns, i < n
template <typename T>
void store_columns(T* dst, int64_t stride, const acc_t<T>* src, int64_t pitch, int64_t columns,
                   int64_t n) {
  using A = acc_t<T>;
  using V = Vec<A>;
  const auto by_column = [&](int64_t i, int64_t count) {
    for (int64_t j = 0; j < columns; ++j)
      store_row<T>(dst + i * stride + j, stride, src + j * pitch + i, count);
  };
  if (n < V::size) return by_column(0, n);
  for_each_overlapping(n, V::size, [&](int64_t i) {
    if (columns < V::size) return by_column(i, V::size);
    for_each_overlapping(columns, V::size, [&](int64_t j) {
      typename V::type lanes[V::size];
      for (int64_t m = 0; m < V::size; ++m) lanes[m] = V::load(src + (j + m) * pitch + i);
      V::transpose(lanes);
      for (int64_t m = 0; m < V::size; ++m)
        store_vector<T>(dst + (i + m) * stride + j, 1, lanes[m]);
    });
  });
}

// Whether rows of a tensor are copied by lines, each of which has a number of every row.
inline bool by_lines(int64_t row_stride, int64_t stride) { return row_stride == 1 && stride > 1; }

// dst[r * pitch + i] = src[r * row_stride + i * stride] for r < rows, i < n
template <typename T>
void load_rows(acc_t<T>* dst, int64_t pitch, const T* src, int64_t row_stride, int64_t stride,
               int64_t rows, int64_t n) {
  if (by_lines(row_stride, stride)) return load_columns<T>(dst, pitch, src, stride, rows, n);
  for (int64_t r = 0; r < rows; ++r) load_row<T>(dst + r * pitch, src + r * row_stride, stride, n);
}

// dst[r * row_stride + i * stride] = src[r * pitch + i] for r < rows, i < n
template <typename T>
void store_rows(T* dst, int64_t row_stride, int64_t stride, const acc_t<T>* src, int64_t pitch,
                int64_t rows, int64_t n) {
  if (by_lines(row_stride, stride)) return store_columns<T>(dst, stride, src, pitch, rows, n);
  for (int64_t r = 0; r < rows; ++r) store_row<T>(dst + r * row_stride, stride, src + r * pitch, n);
}

// As store_row, but past the caches if the row is aligned.
template <typename T>
void stream_row(T* dst, int64_t stride, const acc_t<T>* src, int64_t n) {
  using A = acc_t<T>;
  using V = Vec<A>;
  if constexpr (std::is_same_v<T, A>) {
    if (stride == 1 && n % V::size == 0 && reinterpret_cast<uintptr_t>(dst) % kVecBytes == 0) {
      for (int64_t i = 0; i < n; i += V::size) V::stream(dst + i, V::load(src + i));
      return;
    }
  }
  store_row<T>(dst, stride, src, n);
}

}  // namespace hoconv
