// The kernel of the columns of chunks: outputs, and gradients of values.
#pragma once

#include "recurrent/chunks/steps.cuh"

namespace hoconv::recurrent {

// Computes what the columns of a chunk get: the outputs; BACKWARD: the gradients of v, which are
// alike, with the roles of keys and queries exchanged,
//
//   S'ᵀ (D_jC k_j) + Σ_{i≥j} ((D_ji k_j)ᵀ q_i) o'_i,
//
// where C is the last step, and those of the products of pairs, o'_i v_j, in both orders.
template <int KEYS, int COLUMNS, bool BACKWARD, bool SHARED>
struct ComputeColumns {
  static constexpr int K = round_up(KEYS, 16), V = round_up(COLUMNS, 16);
  using Own = Pairs<KEYS, K, 2>;
  static constexpr int THREADS = Own::THREADS, PITCH = Own::PITCH, WIDE = V + WIDE_PAD;
  // The rows of v come in place of the scaled steps.
  static constexpr int ROWS = PITCH > V + PAD || !BACKWARD ? PITCH : V + PAD;
  // With shared decays, the keys come first in place of columns.
  static constexpr int SECOND = SHARED && PITCH > WIDE ? PITCH : WIDE;
  static constexpr int BYTES =
      4 * (CHUNK * (ROWS + SQUARE + SECOND) + SEGMENTS * K + SHARED * CHUNK * (SQUARE + 1));
  using Square = Part<Own::WARPS, 2, CHUNK, CHUNK>;

  template <typename Call>
  static __device__ __forceinline__ void run(const Call& call, char* shared) {
    if constexpr (BACKWARD)
      run(call, call.d_output, call.d_states, call.d_v, shared);
    else
      run(call, call.v, call.states, call.output, shared);
  }
  template <typename Call, typename Read, typename Written>
  static __device__ __forceinline__ void run(const Call& call, const Read& read, float* states,
                                             const Written& written, char* shared) {
    Memory memory{reinterpret_cast<float*>(shared)};
    float* const x = memory.take(CHUNK * ROWS);
    float* const products = memory.take(CHUNK * SQUARE);
    float* const columns = memory.take(CHUNK * SECOND);
    auto& decays = *reinterpret_cast<typename Own::Decays*>(memory.take(SEGMENTS * K));
    float* const own_decays = memory.next;          // of each step, if they are shared
    float* const products_of = own_decays + CHUNK;  // D_ji, in row i
    const Place place(call);
    Own own(call.T, 0);
    own.load(call, place);
    Square pairs(own.warp);
    if constexpr (SHARED) {
      own.put_all(x, own.q), own.put_all(columns, own.k);
      if (own.key == 0)
#pragma unroll
        for (int s = 0; s < STEPS; ++s) own_decays[own.row(s)] = own.d[s][0];
      own.multiply_decays(decays);
      multiply_steps(products_of, own_decays);
      pairs.add(K, Along{x, PITCH}, Along{columns, PITCH});
      __syncthreads();
      pairs.each_pair([=](int i, int j, const float (&pair)[2]) {
#pragma unroll
        for (int z = 0; z < 2; ++z)
          if (i >= j + z)
            products[BACKWARD ? (j + z) * SQUARE + i : i * SQUARE + j + z] =
                rounded(pair[z] * products_of[i * SQUARE + j + z]);
      });
      copy_columns<COLUMNS, V, THREADS>(columns, WIDE, read, place, call.T);
    } else {
      copy_columns<COLUMNS, V, THREADS>(columns, WIDE, read, place, call.T);
      own.multiply_decays(decays);
      own.template multiply_pairs<BACKWARD>(products, x, decays);
    }
    float scale[2];
    if (own.owns()) {
      if constexpr (BACKWARD) {
        own.between(decays, own.segment + 1, SEGMENTS, scale);
        own.scale_backward(0, STEPS, scale,
                           [&](int s, const float (&f)[2]) { own.put_scaled(x, s, own.k, f); });
      } else {
        own.between(decays, 0, own.segment, scale);
        own.scale_forward(0, STEPS, scale,
                          [&](int s, const float (&f)[2]) { own.put_scaled(x, s, own.q, f); });
      }
    }
    __syncthreads();
    if (Part<Own::WARPS, 2, CHUNK, V> part(own.warp); part.any()) {
      part.add(K, Along{x, PITCH},
               DeepKeys<KEYS, COLUMNS, Call>{states + place.template state<KEYS, COLUMNS>(call)});
      part.add(CHUNK, Triangle<BACKWARD>{{products, SQUARE}}, WideAcross{columns, WIDE});
      write_columns<COLUMNS>(written, part, place, call.T);
    }
    if constexpr (BACKWARD) {
      __syncthreads();
      copy_columns<COLUMNS, V, THREADS>(x, V + PAD, call.v, place, call.T);
      __syncthreads();
      Square d_pairs(own.warp);
      d_pairs.add(V, Along{columns, WIDE}, Along{x, V + PAD});
      d_pairs.each_pair([=](int i, int j, const float (&pair)[2]) {
#pragma unroll
        for (int z = 0; z < 2; ++z) {
          if (i < j + z) continue;
          const float number = SHARED ? pair[z] * products_of[i * SQUARE + j + z] : pair[z];
          products[i * SQUARE + j + z] = products[(j + z) * SQUARE + i] = rounded(number);
        }
      });
      __syncthreads();
      float* const to = call.d_products + place.index(call) * CHUNK * CHUNK;
      for (int at = threadIdx.x * 4; at < CHUNK * CHUNK; at += THREADS * 4) {
        float numbers[4];
        load(numbers, products + at / CHUNK * SQUARE + at % CHUNK), store(to + at, numbers);
      }
      if constexpr (SHARED && Call::DECAYS == 1) {
        __syncthreads();
        pairs.multiply(d_pairs);
        pairs.each_pair(
            [=](int i, int j, const float (&pair)[2]) { store(products + i * SQUARE + j, pair); });
        __syncthreads();
        differentiate_steps(products, products_of, own_decays);
        __syncthreads();
        for (int i = own.warp; i < CHUNK && own.begin + i < call.T; i += Own::WARPS) {
          const float* const row = products + i * SQUARE + threadIdx.x % 32;
          const float sum = warp_reduce(row[0] + row[32], [](float a, float b) { return a + b; });
          const auto& rows = call.d_d;
          if (threadIdx.x % 32 == 0)  // after the parts of the blocks that have keys
            rows.store(
                rows.at(own.begin + i, place.b, place.head, 0) + count_blocks(KEYS) * call.part,
                {sum});
        }
      }
    }
  }

 private:
  // Computes D_ji for i >= j; a thread has a j.
  static __device__ __forceinline__ void multiply_steps(float* products, const float* decays) {
    const int j = threadIdx.x;
    if (j >= CHUNK) return;
    float product = 1;
#pragma unroll 8
    for (int i = 0; i < CHUNK; ++i) {
      if (i > j) product *= decays[i];
      if (i >= j) products[i * SQUARE + j] = product;
    }
  }
  // Replaces the gradient of each D_ji by what it adds to that of d_i and those before.
  static __device__ __forceinline__ void differentiate_steps(float* gradients,
                                                             const float* products,
                                                             const float* decays) {
    const int j = threadIdx.x;
    if (j >= CHUNK) return;
    float carry = 0;
#pragma unroll 8
    for (int i = CHUNK - 1; i >= 0; --i) {
      float& gradient = gradients[i * SQUARE + j];
      carry += i > j ? gradient : 0;
      gradient = i > j ? carry * products[(i - 1) * SQUARE + j] : 0;
      if (i > j) carry *= decays[i];
    }
  }
};

}  // namespace hoconv::recurrent
