// The operands of the backward kernel on Hopper, and the layout of its shared memory.
//
// C channels, k kernel size and that of the generator, N blocks of 8 columns of a product.
#pragma once

#include "high_order/layer/cuda/sm90/products.cuh"

namespace hoconv::high_order::layer::sm90 {

// The parameters as B of dW times parameters. For every channel, the depth is taps and the columns
// are displacements.
template <typename S>
struct TransposedOperand {
  using P = typename S::P;
  using T = typename S::T;
  using Columns = Grid<S>;
  static constexpr int N = Columns::N;
  static constexpr int channel_steps = Columns::blocks / P::elements, steps = S::C * channel_steps;
  static constexpr int words = steps * P::terms * N * 64;
  const T* weight;
  ImageStrides strides;

  __device__ float element(int step, int column, int word, int e) const {
    const int c = step / channel_steps;
    const int tap = tap_of<S, Columns>(depth_element<S>(step % channel_steps, word, e));
    const int at = tap_of<S, Columns>(column);
    if (tap < 0 || at < 0) return 0.0f;
    return P::round(widen<float>(
        weight[tap * strides.b + c * strides.c + at / S::k * strides.h + at % S::k * strides.w]));
  }
};

// dW of all pixels of a row as B of a product whose depth is pixels. Column n is tap n.
template <typename S>
struct Staged {
  static constexpr int N = (S::taps + 7) / 8;
  static constexpr int depth_stride =
      32 * N + (S::pairs ? 4 : 16);  // in words; spreads stores over the banks
  static constexpr int groups = kRegion / S::P::elements / 4;
  static constexpr int term = groups * depth_stride;
  static constexpr int words = S::P::terms * term;
};

// Shared memory, in words.
template <typename S>
struct BackwardShared {
  using Columns = Grid<S>;
  static constexpr int slots = S::k + 1;  // rows of x in the ring; each is stored twice
  using Halo = HaloTile<S, 2 * slots>;
  using Depth = std::conditional_t<S::pairs, ColumnDepth<S, Columns>, RowDepth<S, Halo>>;
  using Operand = GeneratorOperand<S, Columns, Depth>;
  using Transposed = TransposedOperand<S>;
  static constexpr int rows =
      S::C * S::taps + 1;  // of the parameters' gradient; the last is the bias's
  static constexpr int through_pitch = kRegion + (S::pairs ? 4 : 8);
  static constexpr int operand = 0, transposed = operand + Operand::words;
  static constexpr int staged = transposed + Transposed::words;
  static constexpr int x = staged + Staged<S>::words;
  static constexpr int ones = x + (Halo::words + 3) / 4 * 4;
  static constexpr int grad = ones + slots * Halo::pitch + kRegion;
  static constexpr int through = grad + S::C * kRegion;
  static constexpr int totals = through + S::C * S::k * through_pitch;
  static constexpr int words = totals + (rows + 15) / 16 * Staged<S>::N * 4 * 32;
  static_assert(4 * words <= kSharedOfMultiprocessor / 2 - kReservedShared,
                "two blocks share a multiprocessor");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// dW of the lane's pixels as A of a product whose depth is taps.
template <typename S>
struct GradientOperand : Words<typename S::P, Grid<S>::blocks / S::P::elements> {
  using P = typename S::P;
  static constexpr int steps = Grid<S>::blocks / P::elements;

  __device__ explicit GradientOperand(const float (&dw)[S::k][4]) {
#pragma unroll
    for (int step = 0; step < steps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = S::pairs ? 2 * step + i / 2 : step;
        const auto& row = dw[j < S::k ? j : 0];
        if constexpr (!S::pairs)
          this->set(step, i, __float_as_uint(roundable(row[2 * (i % 2) + i / 2])));
        else
          this->set(step, i, j < S::k ? P::pack(row[2 * (i % 2)], row[2 * (i % 2) + 1]) : 0);
      }
  }

  // Stores dW for the other warps. `to` is the word of the lane's first pixel and column; `mine` is
  // all ones where a pixel counts, else zero.
  __device__ void stage(uint32_t* to, const float (&dw)[S::k][4], const uint32_t (&mine)[2]) const {
#pragma unroll
    for (int j = 0; j < S::k; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!is_tap<S, Grid<S>>(j, threadIdx.x % 4, e)) continue;
        uint32_t* word = to + 4 * (j * S::k + (S::pairs ? e : 4 * e));
        if constexpr (S::pairs) {
          word[0] = P::pack(dw[j][e], dw[j][e + 2]) & mine[0];
        } else {
#pragma unroll
          for (int term = 0; term < P::terms; ++term)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              word[term * Staged<S>::term + 2 * i * Staged<S>::depth_stride] =
                  this->a[term][j][2 * e + i] & mine[i];
        }
      }
  }
};

#endif

}  // namespace hoconv::high_order::layer::sm90
