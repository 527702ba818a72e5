// How the backward kernel cuts an image, and the layout of its shared memory.
//
// k kernel size, s kernel size of the generator, N = columns / 8 of the product, Q channels a
// chunk.
#pragma once

#include "high_order/layer/cuda/sm80/generator.cuh"

namespace hoconv::high_order::layer::sm80 {

constexpr int kMostWarps = 4;

// Channels whose sums of the generator's gradient fit the registers of a warp.
template <int k, int s>
constexpr int chunk_of = channels_a_pass(k, s);

struct Strips {
  int warps, across, down;  // strips across an image, segments down a strip
  int columns, rows;        // that a strip and a segment write
  int kept;                 // rows of weights and of the output's gradient in shared memory
  int delayed;  // rows of x's gradient through the generator, in the ring until they are written
  HaloTile halo;
  __host__ __device__ int region() const { return 16 * warps; }
};

// Shared memory, in words.
template <typename P, int N, int Q>
struct BackwardShared {
  int offsets, x, grad, weights, staged, through, total;

  // Odd, so that the weights of neighbouring pixels are in different banks.
  __host__ __device__ static constexpr int weight_words(int taps) {
    return P::elements == 2 ? (taps + 1) / 2 : taps;
  }
  __host__ __device__ static constexpr int staged_words() {
    return 8 * N / P::elements + 8 / P::elements;
  }
  __host__ __device__ static constexpr int through_words(int s) { return (Q * s + 7) / 8 * 8 + 1; }

  __host__ __device__ BackwardShared(const Layer& l, const Strips& p, int steps) {
    int at = 0;
    const auto take = [&at](int words) {
      const int begin = at;
      at += (words + 3) / 4 * 4;
      return begin;
    };
    staged = take(p.warps * 16 * staged_words());
    offsets = take(8 * steps);
    x = take(p.halo.words(l));
    grad = take(l.group_channels * p.kept * p.region());
    weights = take(p.kept * p.region() * weight_words(l.taps));
    through = take(p.delayed * p.region() * through_words(l.s));
    total = at;
  }
};

}  // namespace hoconv::high_order::layer::sm80
