// The kernel that passes states from chunk to chunk.
#pragma once

#include "recurrent/chunks/steps.cuh"

namespace hoconv::recurrent {

// Computes the state before each chunk and that after the last one; BACKWARD: the gradient of the
// state after each chunk, and of that before the first one. A block has some keys and columns of a
// head, few, for it takes the chunks one by one.
template <int KEYS, int COLUMNS, bool BACKWARD, bool EARLY>
struct PassStates {
  static constexpr int K = count_own(KEYS), V = COLUMNS > 48 ? 64 : round_up(COLUMNS, 16);
  static constexpr int DOWN = count_blocks(KEYS), BLOCKS = DOWN * ((COLUMNS + V - 1) / V);
  static constexpr int PITCH = V + WIDE_PAD;
  using Own = Segment<KEYS, K, 1>;
  static constexpr int THREADS = Own::THREADS;
  static constexpr int BYTES = 4 * (K * SQUARE + CHUNK * PITCH + SEGMENTS * K);

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
    float* const x = memory.take(K * SQUARE);  // scaled numbers: a row has a key
    float* const columns = memory.take(CHUNK * PITCH);
    auto& decays = *reinterpret_cast<typename Own::Decays*>(memory.next);
    const int64_t b = blockIdx.x, chunks = (call.T + CHUNK - 1) / CHUNK;
    const int head = blockIdx.y / BLOCKS, block = blockIdx.y % BLOCKS;
    const int64_t all = call.heads * KEYS * COLUMNS, matrix = b * all + head * Call::HEAD;
    const int first = block % DOWN * K, first_column = block / DOWN * V;
    Own own(call.T, first);
    Part<Own::WARPS, 1, K, V> states(own.warp);
    constexpr int WIDTH = decltype(states)::WIDTH;
    using Matrix = State<KEYS, COLUMNS, Call>;
    const auto write = [&](float* to) {
      states.each([&](int i, int c, const float (&own)[WIDTH]) {
        if (c < V) Matrix::write(to, own, first + i, first_column + c);
      });
    };
    const Matrix initial{call.first + matrix, first};
    states.each([&](int i, int c, float (&own)[WIDTH]) { initial.read(own, i, first_column + c); });
    // What the next chunk reads.
    typename Own::template Loading<decltype(call.d)> of_d;
    typename Own::template Loading<OfKeys> of_numbers;
    Coming<OfColumns, COLUMNS, V, THREADS, CHUNK> coming;
    const auto load = [&](int64_t n) {
      own.begin = (BACKWARD ? chunks - 1 - n : n) * CHUNK;
      of_d.load(own, call.d, b, head);
      of_numbers.load(own, of_keys, b, head);
      coming.load(of_columns, own.begin, call.T, b, head, first_column);
    };
    if (chunks > 0) load(0);
    for (int64_t n = 0; n < chunks; ++n) {
      write(between + own.begin / CHUNK * call.B * all + matrix);
      typename Own::Numbers numbers;
      of_d.get(own, own.d, 1), of_numbers.get(own, numbers, 0);
      own.multiply_decays(decays);
      float scale[1], scaled[STEPS];
      const auto put = [&](int s, const float (&scale)[1]) {
        scaled[s] = rounded(numbers[s][0] * scale[0]);
      };
      if constexpr (BACKWARD) {
        own.between(decays, 0, own.segment, scale);
        own.template scale_forward<EARLY>(0, STEPS, scale, put);
      } else {
        own.between(decays, own.segment + 1, SEGMENTS, scale);
        own.scale_backward(0, STEPS, scale, put);
      }
      if (own.owns())
#pragma unroll
        for (int s = 0; s < STEPS; s += 4)
          store(x + own.key * SQUARE + own.row(s), reinterpret_cast<float (&)[4]>(scaled[s]));
      coming.store(columns, PITCH);
      __syncthreads();
      if (n + 1 < chunks) load(n + 1);  // on its way during the products
      if (states.any()) {
        states.each([&](int i, int, float (&own)[WIDTH]) {
          const float whole = decays[0][i] * decays[1][i] * decays[2][i] * decays[3][i];
#pragma unroll
          for (float& state : own) state *= whole;
        });
        states.add(CHUNK, Along{x, SQUARE}, WideAcross{columns, PITCH});
      }
      __syncthreads();
    }
    write(call.last + matrix);
  }
};

}  // namespace hoconv::recurrent
