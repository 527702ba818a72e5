// Scans of steps that are affine in K states, for generated CUDA kernels. A lane computes a feature
// of a row. In each round every warp of every block of a cluster takes some steps. It composes
// them, and those of its block's warps before it. Applied to the state before the round, after
// those of the blocks before, these give the state before its own steps. The last warp's last state
// is the one before the next round. Blocks push to each other and count bytes: a barrier of the
// cluster would wait for all that its threads have stored, the output, too.
#pragma once

#include "recurrent/instructions.cuh"

namespace hoconv::recurrent {

constexpr int MOST_BLOCKS = 8;

// Whether a step's next state does not depend on the state, as 0 or 1; nothing where none does.
template <typename A, bool Cuts>
struct Cut {
  A cut;
};
template <typename A>
struct Cut<A, false> {
  static constexpr A cut = 0;
};

// The step from a state to `cut ? offset : factor state + offset`, or several such steps as one.
template <typename A, int K, bool Cuts>
struct AffineStep : Cut<A, Cuts> {
  A factor[K][K], offset[K];

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
    if constexpr (Cuts) this->cut = first.cut;
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
      if (this->cut == 0)
        for (int l = 0; l < K; ++l) next[k] += factor[k][l] * state[l];
    }
    for (int k = 0; k < K; ++k) state[k] = next[k];
  }
};

template <typename A, int K, bool Cuts, int MOST_WARPS>
class Scan {
 public:
  using Step = AffineStep<A, K, Cuts>;
  struct State {
    A values[K];
  };

  // In shared memory. There are two of what is written for a round while some threads still read
  // that of the round before. No thread is two rounds ahead of another: for that it needs the state
  // which the last warp of the last block has after the round between them, and that warp needs the
  // steps of all others.
  struct Memory {
    uint64_t steps_barriers[2], state_barriers[2];
    alignas(16) Step of_warps[2][MOST_WARPS][32], of_blocks[2][MOST_BLOCKS][32];
    State states[2][32];
    A sums[MOST_WARPS][32], block_sums[MOST_BLOCKS][32];
  };

  const int blocks, rank, warps, warp, lane;  // warps: of a block

  // `rounds`: of all steps.
  __device__ Scan(char* shared, int blocks, int64_t rounds)
      : blocks(blocks),
        rank(cluster_rank()),
        warps(blockDim.x / 32),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        rounds_(rounds),
        memory_(*reinterpret_cast<Memory*>(shared)) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) {
        init_barrier(shared_address(&memory_.steps_barriers[i]));
        init_barrier(shared_address(&memory_.state_barriers[i]));
      }
      fence_barrier_init();
    }
    cluster_sync();
  }

  // Finds the state before the steps of this warp, which are `own`. Before the first round `state`
  // is that before all steps; otherwise it is ignored.
  __device__ __forceinline__ void find_state(const Step& own, A (&state)[K]) {
    const int now = round_ % 2, before = (round_ + 1) % 2;
    const uint32_t steps_barrier = shared_address(&memory_.steps_barriers[now]);
    const uint32_t state_barrier = shared_address(&memory_.state_barriers[before]);
    if (threadIdx.x == 0 && rank > 0) expect_bytes(steps_barrier, rank * 32 * sizeof(Step));
    const bool pushed = rank < blocks - 1 && round_ > 0;
    if (threadIdx.x == 0 && pushed) expect_bytes(state_barrier, 32 * sizeof(State));
    memory_.of_warps[now][warp][lane] = own;
    __syncthreads();
    Step in_own = Step::nothing();
    for (int w = 0; w < warp; ++w) in_own.then(memory_.of_warps[now][w][lane]);
    if (warp == warps - 1) {
      Step all = in_own;
      all.then(own);
#pragma unroll 1
      for (int to = rank + 1; to < blocks; ++to)
        send(&memory_.of_blocks[now][rank][lane], steps_barrier, all, to);
    }
    if (rank > 0) wait_for_phase(steps_barrier, round_ / 2 % 2);
    if (pushed) wait_for_phase(state_barrier, (round_ - 1) / 2 % 2);
    if (round_ > 0) {
      for (int k = 0; k < K; ++k) state[k] = memory_.states[before][lane].values[k];
    }
    // One after another: factors of as many steps could overflow where no state does.
    for (int r = 0; r < rank; ++r) memory_.of_blocks[now][r][lane].apply(state);
    in_own.apply(state);
  }

  // Takes the state after the steps of this warp, and ends the round.
  __device__ __forceinline__ void pass_on(const A (&state)[K]) {
    const int now = round_ % 2;
    if (warp == warps - 1 && rank == blocks - 1 && round_ + 1 < rounds_) {
      State& last = memory_.states[now][lane];
      for (int k = 0; k < K; ++k) last.values[k] = state[k];
#pragma unroll 1
      for (int to = 0; to < rank; ++to)  // to the others
        send(&last, shared_address(&memory_.state_barriers[now]), last, to);
    }
    ++round_;
  }

  // The sum over all warps and blocks, in a fixed order; the first block gets it.
  __device__ A sum(A value) {
    memory_.sums[warp][lane] = value;
    __syncthreads();
    value = 0;
    for (int w = 0; w < warps; ++w) value += memory_.sums[w][lane];
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
  // Stores what is sent to the same place in another block, and counts it at its barrier.
  template <typename Sent>
  __device__ __forceinline__ static void send(Sent* place, uint32_t barrier, const Sent& sent,
                                              int to) {
    constexpr int BYTES = sizeof(Sent) % 16 == 0 ? 16 : sizeof(Sent) % 8 == 0 ? 8 : 4;
    const uint32_t there = address_in(shared_address(place), to);
    const uint32_t counted = address_in(barrier, to);
    for (int i = 0; i < int{sizeof(Sent)}; i += BYTES)
      push<BYTES>(there + i, counted, reinterpret_cast<const char*>(&sent) + i);
  }

  const int64_t rounds_;
  Memory& memory_;
  int64_t round_ = 0;
};

}  // namespace hoconv::recurrent
