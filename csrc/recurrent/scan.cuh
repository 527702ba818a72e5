// Scans of steps that are affine in K states, for generated CUDA kernels. A lane computes a feature
// of a row. In each round every warp of every block of a cluster takes some steps. It composes
// them, and applies the composed steps of the warps before it to the state before the round: that
// gives the state before its own steps. The last warp's last state is the one before the next
// round.
#pragma once

#include "recurrent/instructions.cuh"

namespace hoconv::recurrent {

constexpr int MOST_BLOCKS = 8;

// The step from a state to `cut ? offset : factor state + offset`, or several such steps as one.
template <typename A, int K>
struct AffineStep {
  A factor[K][K], offset[K], cut;  // `cut` is 0 or 1

  __device__ static AffineStep nothing() {
    AffineStep step{};
    for (int k = 0; k < K; ++k) step.factor[k][k] = 1;
    return step;
  }

  // Adds the step that follows.
  __device__ __forceinline__ void then(const AffineStep& next) {
    const AffineStep first = *this;
    *this = next;
    if (next.cut != 0) return;
    cut = first.cut;
    for (int k = 0; k < K; ++k)
      for (int l = 0; l < K; ++l) {
        offset[k] += next.factor[k][l] * first.offset[l];
        factor[k][l] = 0;
        for (int m = 0; m < K; ++m) factor[k][l] += next.factor[k][m] * first.factor[m][l];
      }
  }

  __device__ __forceinline__ void apply(A (&state)[K]) const {
    A next[K];
    for (int k = 0; k < K; ++k) {
      next[k] = offset[k];
      if (cut == 0)
        for (int l = 0; l < K; ++l) next[k] += factor[k][l] * state[l];
    }
    for (int k = 0; k < K; ++k) state[k] = next[k];
  }
};

template <typename A, int K, int WARPS>
class Scan {
 public:
  // In shared memory. There are two of what some write while others read that of the round before.
  struct Memory {
    AffineStep<A, K> warps[2][WARPS][32], blocks[2][MOST_BLOCKS][32];
    A state[2][K][32], sums[WARPS][32], block_sums[MOST_BLOCKS][32];
  };

  const int blocks, rank, warp, lane;

  // `state`: before the first step.
  __device__ Scan(char* shared, int blocks, const A (&state)[K])
      : blocks(blocks),
        rank(cluster_rank()),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        memory_(*reinterpret_cast<Memory*>(shared)) {
    if (warp == 0)
      for (int k = 0; k < K; ++k) memory_.state[0][k][lane] = state[k];
    if (blocks > 1) cluster_sync();  // before they write to each other
  }

  // Finds the state before the steps of this warp, which are `own`.
  __device__ __forceinline__ void find_state(const AffineStep<A, K>& own, A (&state)[K]) {
    auto& warps = memory_.warps[parity_];
    warps[warp][lane] = own;
    __syncthreads();
    if (blocks > 1) {
      for (int to = rank + 1 + warp; to < blocks; to += WARPS) {
        AffineStep<A, K> all = warps[0][lane];
        for (int w = 1; w < WARPS; ++w) all.then(warps[w][lane]);
        in_block(&memory_, to)->blocks[parity_][rank][lane] = all;
      }
      cluster_sync();
    }
    for (int k = 0; k < K; ++k) state[k] = memory_.state[parity_][k][lane];
    for (int r = 0; r < rank; ++r) memory_.blocks[parity_][r][lane].apply(state);
    for (int w = 0; w < warp; ++w) warps[w][lane].apply(state);
    parity_ ^= 1;
  }

  // Takes the state after the steps of this warp.
  __device__ __forceinline__ void pass_on(const A (&state)[K]) {
    if (warp == WARPS - 1 && rank == blocks - 1)
      for (int to = 0; to < blocks; ++to)
        for (int k = 0; k < K; ++k) in_block(&memory_, to)->state[parity_][k][lane] = state[k];
  }

  // Ends the use of other blocks' memory.
  __device__ void end() {
    if (blocks > 1) cluster_sync();
  }

  // The sum over all warps and blocks, in a fixed order; the first block gets it.
  __device__ A sum(A value) {
    memory_.sums[warp][lane] = value;
    __syncthreads();
    value = 0;
    for (int w = 0; w < WARPS; ++w) value += memory_.sums[w][lane];
    if (blocks > 1) {
      if (warp == 0) in_block(&memory_, 0)->block_sums[rank][lane] = value;
      cluster_sync();
      value = 0;
      for (int r = 0; r < blocks; ++r) value += memory_.block_sums[r][lane];
      cluster_sync();  // until it is read, since the next call writes it
    }
    __syncthreads();
    return value;
  }

 private:
  Memory& memory_;
  int parity_ = 0;
};

}  // namespace hoconv::recurrent
