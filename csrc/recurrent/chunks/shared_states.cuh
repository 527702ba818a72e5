// The kernel that passes states from chunk to chunk, whose decays are those of a head.
#pragma once

#include "recurrent/chunks/products.cuh"
#include "recurrent/chunks/shared_steps.cuh"

namespace hoconv::recurrent {

// As PassStates. Threads multiply the decays of a chunk, each those that scale one step, and rows
// of keys are scaled on their way to shared memory.
template <int KEYS, int COLUMNS, bool BACKWARD, bool EARLY>
struct PassSharedStates {
  static constexpr int K = count_shared(KEYS), V = COLUMNS > 48 ? 64 : round_up(COLUMNS, 16);
  static constexpr int DOWN = (KEYS + K - 1) / K, BLOCKS = DOWN * ((COLUMNS + V - 1) / V);
  static constexpr int GROUPS = K > 32 ? 2 : 1, WARPS = 4 * GROUPS, THREADS = 32 * WARPS;
  static constexpr int PITCH = K + WIDE_PAD, WIDE = V + WIDE_PAD;
  using States = Part<WARPS, GROUPS, K, V>;

  struct Steps {
    float d[CHUNK], factors[CHUNK + 1];  // the last one is the product of all decays
  };
  static constexpr int BYTES = 4 * CHUNK * (PITCH + WIDE) + static_cast<int>(sizeof(Steps));

  template <typename Call>
  static __device__ __forceinline__ void run(const Call& call, char* shared) {
    if constexpr (BACKWARD)
      run(call, call.q, call.d_output, call.d_states, shared);
    else
      run(call, call.k, call.v, call.states, shared);
  }
  template <typename Call, typename OfKeys, typename OfColumns>
  static __device__ __forceinline__ void run(const Call& call, const OfKeys& of_keys,
                                             const OfColumns& of_columns, float* between,
                                             char* shared) {
    Memory memory{reinterpret_cast<float*>(shared)};
    float* const x = memory.take(CHUNK * PITCH);  // a row has a step
    float* const columns = memory.take(CHUNK * WIDE);
    Steps& steps = *reinterpret_cast<Steps*>(memory.next);
    const int64_t b = blockIdx.x, chunks = (call.T + CHUNK - 1) / CHUNK;
    const int head = blockIdx.y / BLOCKS, block = blockIdx.y % BLOCKS, thread = threadIdx.x;
    const int64_t all = call.heads * KEYS * COLUMNS, matrix = b * all + head * Call::HEAD;
    const int first = block % DOWN * K, first_column = block / DOWN * V;
    States states(thread / 32);
    constexpr int WIDTH = States::WIDTH;
    using Matrix = State<KEYS, COLUMNS, Call>;
    const auto write = [&](float* to) {
      states.each([&](int i, int c, const float (&own)[WIDTH]) {
        if (c < V) Matrix::write(to, own, first + i, first_column + c);
      });
    };
    const Matrix initial{call.first + matrix, first};
    states.each([&](int i, int c, float (&own)[WIDTH]) { initial.read(own, i, first_column + c); });
    const auto begin = [=](int64_t n) { return (BACKWARD ? chunks - 1 - n : n) * CHUNK; };
    const auto read_own = [&](int64_t n) {
      return n < chunks && thread < CHUNK ? read_decay(call, begin(n) + thread, b, head) : 1;
    };
    // What the next chunk reads, and of the one after it the decay of the thread's step.
    Coming<OfKeys, KEYS, K, THREADS, CHUNK> keys;
    Coming<OfColumns, COLUMNS, V, THREADS, CHUNK> coming;
    const auto load = [&](int64_t n) {
      keys.load(of_keys, begin(n), call.T, b, head, first);
      coming.load(of_columns, begin(n), call.T, b, head, first_column);
    };
    if (thread < CHUNK) steps.d[thread] = read_own(0);
    float next = read_own(1);
    if (chunks > 0) load(0);
    __syncthreads();
    for (int64_t n = 0; n < chunks; ++n) {
      write(between + begin(n) / CHUNK * call.B * all + matrix);
      coming.store(columns, WIDE);
      multiply_decays(steps);
      __syncthreads();
      keys.store(x, PITCH, [&](int i) { return steps.factors[i]; });
      const float whole = steps.factors[CHUNK];
      if (thread < CHUNK) steps.d[thread] = next;
      __syncthreads();
      next = read_own(n + 2);
      if (n + 1 < chunks) load(n + 1);  // on its way during the products
      if (states.any()) {
        states.each([&](int, int, float (&own)[WIDTH]) {
#pragma unroll
          for (float& state : own) state *= whole;
        });
        states.add(CHUNK, Across{x, PITCH}, WideAcross{columns, WIDE});
      }
      __syncthreads();
    }
    write(call.last + matrix);
  }

 private:
  // Computes the factor of each step: D_jC of keys, D_0i of queries.
  static __device__ __forceinline__ void multiply_decays(Steps& steps) {
    const int i = threadIdx.x;
    if (i > CHUNK) return;
    const bool all = i == CHUNK;
    const int from = all || BACKWARD ? 0 : i + 1, to = all || !BACKWARD ? CHUNK : i + !EARLY;
    steps.factors[i] = multiply_range(steps.d, from, to);
  }
};

}  // namespace hoconv::recurrent
