// Products of a warpgroup on Hopper whose A is pixels, or values computed from them, in registers:
// the order of the depth, the operands B in shared memory, and the sums.
//
// The depth of a product is cut into steps of 8 words. Steps are multiplied a group at a time:
// while the tensor cores multiply one group, the words of the next are loaded.
//
// N blocks of 8 columns of a product; g = lane / 4, t = lane % 4 (precision.cuh).
#pragma once

#include "high_order/layer/cuda/sm90/layer.cuh"

namespace hoconv::high_order::layer::sm90 {

// The element of A that a depth multiplies with the parameters: the pixel of a tap and channel, or
// 1, which multiplies the bias: once the rounded bias, once the remainder of that rounding.
struct Factor {
  enum Kind { nothing, pixel, one_of_bias, one_of_rest } kind;
  int channel, tap;
};

// In a depth that has the order of the columns: the element that word `word` of a step begins with,
// or ends with if e = 1.
template <typename S>
__host__ __device__ constexpr int depth_element(int step, int word, int e) {
  return S::pairs ? 16 * step + 2 * word + e : 8 * step + 2 * (word % 4) + word / 4;
}

// A depth of every channel's taps in the order of the columns; the columns `high` and `low`, which
// have no tap, take the bias. The words of A are those of Pixels.
template <typename S, typename Columns>
struct ColumnDepth {
  using P = typename S::P;
  static constexpr int channel_steps = Columns::blocks / P::elements;
  static constexpr int steps = S::C * channel_steps;
  static_assert(Columns::high < 8 * Columns::blocks && Columns::low < 8 * Columns::blocks);

  __host__ __device__ static constexpr Factor factor(int step, int word, int e) {
    const int c = step / channel_steps, n = depth_element<S>(step % channel_steps, word, e);
    const int tap = tap_of<S, Columns>(n);
    if (tap >= 0) return {Factor::pixel, c, tap};
    if (c == 0 && n == Columns::high) return {Factor::one_of_bias, c, -1};
    if (c == 0 && n == Columns::low) return {Factor::one_of_rest, c, -1};
    return {Factor::nothing, c, -1};
  }

  uint32_t ones[2];  // for the bias, where the lane has no tap

  __device__ explicit ColumnDepth(const uint32_t* /*shared_x*/) {
    uint32_t one[P::terms];
    P::split(1.0f, 1.0f, one);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int n = threadIdx.x % 4 * 2 + e;
      ones[e] = n == Columns::high % 8 || n == Columns::low % 8 ? one[0] : 0;
    }
  }
  // The number of channels whose pixels the steps before `step` read.
  static constexpr int channels(int step) { return (step + channel_steps - 1) / channel_steps; }
  template <typename Pixels>
  __device__ uint32_t word(const Pixels (&pixels)[S::C], int /*shift*/, int step, int i) const {
    const int c = step / channel_steps, s = step % channel_steps;
    const int j = S::pairs ? 2 * s + i / 2 : s, e = S::pairs ? 0 : i / 2;
    const bool bias = c == 0 && (j == Columns::high / 8 || j == Columns::low / 8);
    return pixels[c].a[s][i] | (bias ? ones[e] : 0);
  }
};

// A depth of floats, for columns in the order Grid. It is cut into halves of a step, of which each
// lane t has a word. First come the first four columns of every row of taps, row by row for every
// channel, which a lane has loaded anyway; then the columns after those, of as many rows as fit a
// half. Free words take the bias.
template <typename S, typename Halo>
struct RowDepth {
  static constexpr int firsts = S::C * S::k;
  static constexpr int more = S::k > 4 ? S::k - 4 : 1;  // columns after the fourth
  static constexpr int rows = 4 / more;                 // rows of them in a half
  static constexpr int rests = S::k > 4 ? (firsts + rows - 1) / rows : 0;
  static constexpr int steps = (firsts + rests + 1) / 2;

  struct Word {
    int row, column;  // rows count through the channels; -1 where there is no tap
  };
  __host__ __device__ static constexpr Word tap(int half, int t) {
    if (half < firsts) return {t < S::k ? half : -1, t};
    const int row = (half - firsts) * rows + t / more;
    return {half < firsts + rests && t / more < rows && row < firsts ? row : -1, 4 + t % more};
  }
  // The first (which = 0) or second (which = 1) word without a tap, as 4 * half + t.
  __host__ __device__ static constexpr int free_word(int which) {
    for (int n = 0; n < 8 * steps; ++n)
      if (tap(n / 4, n % 4).row < 0 && which-- == 0) return n;
    return -1;
  }
  static_assert(free_word(1) >= 0);

  __host__ __device__ static constexpr Factor factor(int step, int word, int /*e*/) {
    const int half = 2 * step + word / 4, t = word % 4;
    const Word at = tap(half, t);
    if (at.row >= 0) return {Factor::pixel, at.row / S::k, at.row % S::k * S::k + at.column};
    if (4 * half + t == free_word(0)) return {Factor::one_of_bias, 0, -1};
    if (4 * half + t == free_word(1)) return {Factor::one_of_rest, 0, -1};
    return {Factor::nothing, 0, -1};
  }

  const uint32_t* rest[rests + 1];  // the lane's words in those halves, for its first pixel

  __device__ explicit RowDepth(const uint32_t* shared_x) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < rests; ++n) {
      const Word at = tap(firsts + n, t);
      const int row = at.row < 0 ? 0 : at.row;
      rest[n] = shared_x + row / S::k * Halo::channel + Halo::of({row % S::k, at.column}) + g;
    }
  }
  static constexpr int channels(int step) {
    return 2 * step >= firsts ? S::C : (2 * step + S::k - 1) / S::k;
  }
  template <typename Pixels>
  __device__ uint32_t word(const Pixels (&pixels)[S::C], int shift, int step, int i) const {
    const int half = 2 * step + i / 2, t = threadIdx.x % 4;
    uint32_t word = 0;
    if (half < firsts)
      word = pixels[half / S::k].a[half % S::k][i % 2];
    else if (half < firsts + rests && (tap(half, 3).row >= 0 || tap(half, t).row >= 0))
      word = rest[half - firsts][shift + i % 2 * Halo::second];
    if (4 * half + t == free_word(0) || 4 * half + t == free_word(1)) word = __float_as_uint(1.0f);
    return word;
  }
};

// The generator's parameters as B of the product that generates the weights.
template <typename S, typename Columns_, typename Depth>
struct GeneratorOperand {
  using P = typename S::P;
  using T = typename S::T;
  using Columns = Columns_;
  static constexpr int N = Columns::N, steps = Depth::steps;
  static constexpr int words = steps * P::terms * N * 64;
  const T* weight;
  ImageStrides strides;
  const T* bias;
  int64_t bias_stride;

  __device__ float element(int step, int column, int word, int e) const {
    const int tap = tap_of<S, Columns>(column);
    const Factor f = Depth::factor(step, word, e);
    if (tap < 0 || f.kind == Factor::nothing) return 0.0f;
    if (f.kind == Factor::pixel)
      return P::round(widen<float>(weight[tap * strides.b + f.channel * strides.c +
                                          f.tap / S::k * strides.h + f.tap % S::k * strides.w]));
    const float value = bias == nullptr ? 0.0f : widen<float>(bias[tap * bias_stride]);
    const float rest = value - P::round(value);  // NaN for an infinite bias
    return f.kind == Factor::one_of_bias ? P::round(value) : isfinite(rest) ? rest : 0.0f;
  }
};

template <typename Operand>
Operand generator_operand(const Tensor& weight, const std::optional<Tensor>& bias) {
  using T = typename Operand::T;
  return {static_cast<const T*>(weight.const_data_ptr()), image_strides(weight),
          bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr,
          bias ? bias->stride(0) : 0};
}

// Writes an operand in the order in which a product reads it: step by step, term by term, and in
// blocks of 8 columns, first their first and then their last 4 words.
template <typename Operand>
__device__ __forceinline__ void write_operand(const Operand& operand, uint32_t* out) {
  using P = typename Operand::P;
  constexpr int N = Operand::N;
  for (int n = blockIdx.x * blockDim.x + threadIdx.x; n < Operand::words / P::terms;
       n += gridDim.x * blockDim.x) {
    const int step = n / (64 * N), block = n / 64 % N, inner = n % 64;
    const int column = 8 * block + inner / 4 % 8, word = inner / 32 * 4 + inner % 4;
    uint32_t terms[P::terms];
    P::split(operand.element(step, column, word, 0),
             P::elements == 2 ? operand.element(step, column, word, 1) : 0.0f, terms);
    for (int term = 0; term < P::terms; ++term)
      out[(step * P::terms + term) * 64 * N + n % (64 * N)] = terms[term];
  }
}

template <typename Operand>
__global__ void arrange_operand(Operand operand, uint32_t* out) {
  write_operand(operand, out);
}

template <typename First, typename Second>
__global__ void arrange_operands(First first, Second second, uint32_t* out) {
  if (blockIdx.y == 0)
    write_operand(first, out);
  else
    write_operand(second, out + First::words);
}

template <typename Operand>
void arrange(const Operand& operand, uint32_t* out, cudaStream_t stream) {
  arrange_operand<<<blocks_for(Operand::words / Operand::P::terms), kThreads, 0, stream>>>(operand,
                                                                                           out);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Arranges two operands, one after the other in memory.
template <typename First, typename Second>
void arrange(const First& first, const Second& second, uint32_t* out, cudaStream_t stream) {
  constexpr int most = std::max(First::words, Second::words) / First::P::terms;
  arrange_operands<<<dim3(blocks_for(most), 2), kThreads, 0, stream>>>(first, second, out);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Copies a whole operand from global to shared memory.
template <int words>
__device__ __forceinline__ void copy_operand(uint32_t* to, const uint32_t* from) {
  for (int n = 4 * threadIdx.x; n < words; n += 4 * blockDim.x)
    *reinterpret_cast<uint4*>(to + n) = __ldg(reinterpret_cast<const uint4*>(from + n));
  publish_operands();
}

// The descriptors of the steps of an operand B; `step_words` and `term_words` are the distances of
// steps and of terms.
template <int step_words, int term_words>
struct Steps {
  uint64_t first;  // a descriptor
  __device__ uint64_t at(int step, int term = 0) const {
    return first + (step * step_words + term * term_words) / 4;
  }
  __device__ Steps from(int step) const { return {at(step)}; }
};
// The steps of an operand that arrange_operand wrote.
template <typename P, int N>
using ArrangedSteps = Steps<P::terms * 64 * N, 64 * N>;

// Steps of A: the lane's words, split into terms.
template <typename P, int steps>
struct Words {
  uint32_t a[P::terms][steps][4];

  // Rounds a float to TF32 by adding half of the last place (see `roundable`); the remainder is the
  // second term.
  __device__ void set(int step, int i, uint32_t word) {
    if constexpr (P::terms == 2) {
      const uint32_t high = (word + kHalfOfTF32) & ~0x1fffu;
      a[0][step][i] = high;
      a[1][step][i] = __float_as_uint(__uint_as_float(word) - __uint_as_float(high));
    } else {
      a[0][step][i] = P::elements == 1 ? word + kHalfOfTF32 : word;
    }
#pragma unroll
    for (int term = 0; term < P::terms; ++term)
      asm volatile("" : "+r"(a[term][step][i])::"memory");  // keeps the write before the products
  }
};

template <int N>
__device__ __forceinline__ void fence_sums(float (&c)[N][4]) {
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(c[j][i])::"memory");
}

// Starts the products of a group. The smallest terms come first.
template <typename P, int N, int steps, typename B>
__device__ __forceinline__ void multiply_group(float (&sums)[N][4], const Words<P, steps>& words,
                                               const B& b, int count, bool add) {
#pragma unroll
  for (int term = P::terms - 1; term > 0; --term)
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      if (step >= count) continue;
      multiply<P, N>(sums, words.a[term][step], b.at(step), add || step > 0);
      multiply<P, N>(sums, words.a[0][step], b.at(step, term), true);
    }
#pragma unroll
  for (int step = 0; step < steps; ++step)
    if (step < count)
      multiply<P, N>(sums, words.a[0][step], b.at(step), add || P::terms > 1 || step > 0);
}

// Computes products, each `depth` steps deep, in groups of `steps`, and adds them to their sums;
// `Fresh` sums are overwritten instead. Groups count through all products: b(n) are the steps of B
// of group n, load(n) returns its words of A, which must stay unchanged until load(n + 2).
// `meanwhile` runs before the last wait.
//
// Tensor cores truncate when they add to a sum. For float32, where that would show, each group
// starts from zero and is added in float32.
template <typename P, int depth, int steps, bool Fresh, int Products, int N, typename Load,
          typename B, typename Meanwhile>
__device__ __forceinline__ void sum_products(float (&sums)[Products][N][4], const Load& load,
                                             const B& b, const Meanwhile& meanwhile) {
  constexpr int a_product = (depth + steps - 1) / steps, groups = Products * a_product;
  constexpr bool apart = P::terms > 1;
  float partial[apart ? 2 : 1][N][4];
  const auto is_set = [](int n) { return Fresh && n % a_product == 0; };
  const auto finish = [&](int n) {
    if constexpr (apart) {
      fence_sums(partial[n % 2]);
#pragma unroll
      for (int j = 0; j < N; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& sum = sums[n / a_product][j][i];
          sum = is_set(n) ? partial[n % 2][j][i] : sum + partial[n % 2][j][i];
        }
    } else {
      fence_sums(sums[n / a_product]);
    }
  };
#pragma unroll
  for (int n = 0; n < groups; ++n) {
    const auto& words = load(n);
    if constexpr (!apart)
      if (!is_set(n)) fence_sums(sums[n / a_product]);
    products_begin();
    const bool last = n % a_product + 1 == a_product;
    multiply_group<P, N>(apart ? partial[n % 2] : sums[n / a_product], words, b(n),
                         last ? depth - steps * (a_product - 1) : steps, !apart && !is_set(n));
    products_end();
    if (n > 0) {
      products_wait<1>();
      if constexpr (apart) finish(n - 1);
    }
  }
  meanwhile();
  products_wait<0>();
#pragma unroll
  for (int n = apart ? groups - 1 : 0; n < groups; ++n) finish(n);
}

#endif

}  // namespace hoconv::high_order::layer::sm90
