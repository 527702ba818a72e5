// The inner loops of the high-order layer on the CPU, over rows of registers, with sums in
// registers.
//
// A row is `registers` registers long. Each loop says whether the lanes past the image's last
// column must be zero; otherwise they do not matter.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "hoconv/blocks.h"
#include "hoconv/vec.h"

namespace hoconv::high_order::layer::cpu {

// Sizes of blocks of sums. A loaded register serves several sums, so that wide blocks load less.
// They are as wide as the machine's registers allow: 32 with AVX-512, else 16.
#if defined(__AVX512VL__)
constexpr int64_t kOutputBlock = 6, kRegisterBlock = 4, kTapBlock = 5, kColumnBlock = 5;
#else
constexpr int64_t kOutputBlock = 6, kRegisterBlock = 2, kTapBlock = 4, kColumnBlock = 3;
#endif
constexpr int64_t kChannelBlock = 4;  // channels that share a register of applied weights

// The window of a convolution, which one output reads: `columns` neighbours in each of `lines`
// lines of each of `planes` planes.
struct Window {
  int64_t planes, lines, columns;
  int64_t next_plane, next_line;

  int64_t size() const { return planes * lines * columns; }
};

// Packs the weights of a convolution in the order in which `convolve` reads them; get(output,
// plane, line, column) returns one.
template <typename A, typename Get>
void pack(A* packed, int64_t outputs, const Window& window, Get&& get) {
  for_each_block<kOutputBlock>(outputs, [&](int64_t begin, auto N) {
    for (int64_t plane = 0; plane < window.planes; ++plane)
      for (int64_t line = 0; line < window.lines; ++line)
        for (int64_t column = 0; column < window.columns; ++column)
          for (int64_t n = 0; n < N; ++n) *packed++ = get(begin + n, plane, line, column);
  });
}

template <typename A, int64_t N, int64_t U>
inline void convolve_block(A* out, int64_t next_output, const A* bias, const A* image,
                           const Window& window, const A* packed) {
  using V = Vec<A>;
  typename V::type sum[N][U];
  for (int64_t n = 0; n < N; ++n)
    for (int64_t u = 0; u < U; ++u)
      sum[n][u] =
          bias ? bias[n] + typename V::type{} : V::load(out + n * next_output + u * V::size);
  for (int64_t plane = 0; plane < window.planes; ++plane) {
    for (int64_t line = 0; line < window.lines; ++line) {
      const A* pixels = image + plane * window.next_plane + line * window.next_line;
      for (int64_t column = 0; column < window.columns; ++column, packed += N) {
        typename V::type pixel[U];
        for (int64_t u = 0; u < U; ++u) pixel[u] = V::load(pixels + column + u * V::size);
        for (int64_t n = 0; n < N; ++n)
          for (int64_t u = 0; u < U; ++u) sum[n][u] += packed[n] * pixel[u];
      }
    }
  }
  for (int64_t n = 0; n < N; ++n)
    for (int64_t u = 0; u < U; ++u) V::store(out + n * next_output + u * V::size, sum[n][u]);
}

// out[n, w] = bias[n] + sum over the window of packed[n] * image[plane, line, w + column]. Without
// a bias the sum is added to out[n, w].
template <typename A>
void convolve(A* out, int64_t next_output, int64_t outputs, int64_t registers, const A* bias,
              const A* image, const Window& window, const A* packed) {
  for_each_block<kOutputBlock>(outputs, [&](int64_t n, auto block) {
    constexpr int64_t N = block;
    for_each_block<kRegisterBlock>(registers, [&](int64_t v, auto U) {
      const int64_t w = v * Vec<A>::size;
      convolve_block<A, N, U>(out + n * next_output + w, next_output, bias ? bias + n : nullptr,
                              image + w, window, packed + n * window.size());
    });
  });
}

// The taps of one application: `lines` lines of `columns` taps. From one tap to the next the
// weights advance by next_tap and the image by next_column.
struct Taps {
  int64_t lines, columns;
  int64_t next_tap, next_line, next_column;
};

template <typename A, int64_t N, int64_t U>
inline void apply_block(A* out, int64_t next_output, const A* weights, const A* image,
                        int64_t next_channel, const Taps& taps) {
  using V = Vec<A>;
  typename V::type sum[N][U];
  for (int64_t n = 0; n < N; ++n)
    for (int64_t u = 0; u < U; ++u) sum[n][u] = V::load(out + n * next_output + u * V::size);
  for (int64_t i = 0; i < taps.lines; ++i) {
    const A* pixels = image + i * taps.next_line;
    for (int64_t j = 0; j < taps.columns;
         ++j, weights += taps.next_tap, pixels += taps.next_column) {
      for (int64_t u = 0; u < U; ++u) {
        const auto weight = V::load(weights + u * V::size);
        for (int64_t n = 0; n < N; ++n)
          sum[n][u] += weight * V::load(pixels + n * next_channel + u * V::size);
      }
    }
  }
  for (int64_t n = 0; n < N; ++n)
    for (int64_t u = 0; u < U; ++u) V::store(out + n * next_output + u * V::size, sum[n][u]);
}

// out[c, w] += sum over taps of kernel[tap, w] * image[c, tap, w]
template <typename A>
void apply(A* out, int64_t next_output, int64_t channels, int64_t registers, const A* weights,
           const A* image, int64_t next_channel, const Taps& taps) {
  for_each_block<kChannelBlock>(channels, [&](int64_t c, auto block) {
    constexpr int64_t N = block;
    for_each_block<2>(registers, [&](int64_t v, auto U) {
      const int64_t w = v * Vec<A>::size;
      apply_block<A, N, U>(out + c * next_output + w, next_output, weights + w,
                           image + c * next_channel + w, next_channel, taps);
    });
  });
}

// out[n, w] = sum over c of grad[c, w] * image[c, w + n * step]
template <typename A, int64_t N>
void correlate_pixels(A* out, int64_t next_output, int64_t step, int64_t channels,
                      int64_t registers, const A* grad, int64_t next_grad, const A* image,
                      int64_t next_image) {
  using V = Vec<A>;
  for (int64_t w = 0; w < registers * V::size; w += V::size) {
    typename V::type sum[N] = {};
    const A* factors = grad + w;
    const A* pixels = image + w;
    for (int64_t c = 0; c < channels; ++c, factors += next_grad, pixels += next_image) {
      const auto factor = V::load(factors);
      for (int64_t n = 0; n < N; ++n) sum[n] += factor * V::load(pixels + n * step);
    }
    for (int64_t n = 0; n < N; ++n) V::store(out + n * next_output + w, sum[n]);
  }
}

// Rows of an image that a sum runs over: `rows` rows of W columns, `width` apart.
struct Area {
  int64_t rows, W, width;
};

// sums[n, m] += sum over the area of grad[n] * image[m columns to the right], lane by lane. The
// gradient must be zero past its last column.
template <typename A, int64_t N, int64_t M>
void correlate(typename Vec<A>::type* sums, int64_t next_sum, const A* grad, int64_t next_grad,
               const A* image, int64_t image_width, const Area& area) {
  using V = Vec<A>;
  typename V::type sum[N][M];
  for (int64_t n = 0; n < N; ++n)
    for (int64_t m = 0; m < M; ++m) sum[n][m] = sums[n * next_sum + m];
  const auto add = [&](const A* factors, const A* pixels, auto&& read) {
    typename V::type factor[N];
    for (int64_t n = 0; n < N; ++n) factor[n] = V::load(factors + n * next_grad);
    for (int64_t m = 0; m < M; ++m) {
      const auto pixel = read(pixels + m);
      for (int64_t n = 0; n < N; ++n) sum[n][m] += factor[n] * pixel;
    }
  };
  const int64_t whole = area.W / V::size * V::size;
  const auto valid = V::first(area.W - whole);
  for (int64_t r = 0; r < area.rows; ++r) {
    const A* factors = grad + r * area.width;
    const A* pixels = image + r * image_width;
    for (int64_t w = 0; w < whole; w += V::size)
      add(factors + w, pixels + w, [](const A* p) { return V::load(p); });
    // Past the last column the gradient is zero, but a pixel may be infinite there.
    if (whole < area.W)
      add(factors + whole, pixels + whole,
          [&](const A* p) { return valid ? V::load(p) : typename V::type{}; });
  }
  for (int64_t n = 0; n < N; ++n)
    for (int64_t m = 0; m < M; ++m) sums[n * next_sum + m] = sum[n][m];
}

// exp(x) for x <= 0; zero where the result would be subnormal. With x = n * log(2) + r and |r| <=
// log(2) / 2 it is 2^n times the Taylor polynomial of exp(r).
template <typename A>
inline typename Vec<A>::type exp_of_negative(typename Vec<A>::type x) {
  using V = typename Vec<A>::type;
  using Bits = typename Vec<A>::bits;
  constexpr bool is_float = sizeof(A) == 4;
  constexpr int mantissa = std::numeric_limits<A>::digits - 1;
  constexpr A lowest = is_float ? -87 : -708;
  constexpr A round = A(1.5) * (int64_t(1) << mantissa);  // adding it leaves an integer
  // log(2) in two parts. The upper one ends in zeros, so that n times it is exact.
  constexpr A upper = is_float ? 0.693145751953125 : 6.93147180369123816490e-01;
  constexpr A lower = is_float ? 1.42860682030941723212e-6 : 1.90821492927058770002e-10;

  const V shifted = x * A(1.44269504088896340736) + round;
  const V n = shifted - round;
  const V r = (x - n * upper) - n * lower;
  const V one = V{} + A(1);
  V sum = one;
  for (int degree = is_float ? 7 : 13; degree > 0; --degree) sum = sum * r * (A(1) / degree) + one;
  const V power = (V)(((Bits)shifted << mantissa) + (Bits)one);
  return x < lowest ? V{} : sum * power;
}

// sums[t] += sum over the area of grad[t], lane by lane. The gradient must be zero past its last
// column.
template <typename A>
void add_up(typename Vec<A>::type* sums, int64_t taps, const A* grad, int64_t next_grad,
            const Area& area) {
  using V = Vec<A>;
  for (int64_t t = 0; t < taps; ++t) {
    typename V::type sum = sums[t];
    for (int64_t r = 0; r < area.rows; ++r)
      for (int64_t w = 0; w < area.W; w += V::size)
        sum += V::load(grad + t * next_grad + r * area.width + w);
    sums[t] = sum;
  }
}

// Turns each column of `taps` rows into its softmax.
template <typename A>
void softmax(A* weights, int64_t next_tap, int64_t taps, int64_t registers) {
  using V = Vec<A>;
  for (int64_t v = 0; v < registers; ++v) {
    A* first = weights + v * V::size;
    A* last = first + taps * next_tap;
    auto largest = V::load(first);
    for (A* p = first; p != last; p += next_tap) {
      const auto value = V::load(p);
      largest = value > largest ? value : largest;
    }
    typename V::type sum = {};
    for (A* p = first; p != last; p += next_tap) {
      const auto value = exp_of_negative<A>(V::load(p) - largest);
      sum += value;
      V::store(p, value);
    }
    const auto scale = A(1) / sum;
    for (A* p = first; p != last; p += next_tap) V::store(p, V::load(p) * scale);
  }
}

// Turns the gradient of each column's softmax into the gradient of the softmax's input.
template <typename A>
void softmax_backward(A* grad, int64_t next_grad, const A* weights, int64_t next_tap, int64_t taps,
                      int64_t registers) {
  using V = Vec<A>;
  for (int64_t v = 0; v < registers; ++v) {
    A* g = grad + v * V::size;
    const A* s = weights + v * V::size;
    typename V::type mean = {};
    for (int64_t t = 0; t < taps; ++t)
      mean += V::load(g + t * next_grad) * V::load(s + t * next_tap);
    for (int64_t t = 0; t < taps; ++t) {
      const auto centred = V::load(g + t * next_grad) - mean;
      V::store(g + t * next_grad, centred * V::load(s + t * next_tap));
    }
  }
}

}  // namespace hoconv::high_order::layer::cpu
