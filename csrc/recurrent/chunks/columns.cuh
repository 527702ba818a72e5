// The kernel of the columns of chunks whose keys decay each at its own rate: outputs, and gradients
// of values.
#pragma once

#include "recurrent/chunks/steps.cuh"

namespace hoconv::recurrent {

// Computes what the columns of a chunk get: the outputs; BACKWARD: the gradients of v, which are
// alike, with the roles of keys and queries exchanged,
//
//   S'ᵀ (D_jC k_j) + Σ_{i≥j} ((D_ji k_j)ᵀ q_i) o'_i,
//
// where C is the last step, and those of the products of pairs, o'_i v_j, in both orders. Where
// steps predict (PREDICTS), other kernels have computed the gradients of v: there are products of
// pairs with p_i, too, j < i, whose gradients are v'_i v_j. EARLY: outputs read the state before
// the step, so that the pairs are those with D_j,i-1, j < i.
template <int KEYS, int COLUMNS, bool BACKWARD, bool PREDICTS, bool EARLY>
struct ComputeColumns : Pairs<KEYS, round_up(KEYS, 16), 2> {
  static constexpr int K = round_up(KEYS, 16), V = round_up(COLUMNS, 16);
  using Own = Pairs<KEYS, K, 2>;
  using typename Own::Decays, typename Own::Square;
  static constexpr int THREADS = Own::THREADS, PITCH = Own::PITCH, WIDE = V + WIDE_PAD;
  // The rows of v come in place of the scaled steps.
  static constexpr int ROWS = PITCH > V + PAD || !BACKWARD ? PITCH : V + PAD;
  static constexpr int BYTES = 4 * (CHUNK * (ROWS + SQUARE + WIDE) + SEGMENTS * K);

  const Place place;
  float *const x, *const products, *const columns;
  Decays& decays;

  template <typename Call>
  __device__ ComputeColumns(const Call& call, Memory memory)
      : Own(call.T, 0),
        place(call),
        x(memory.take(CHUNK * ROWS)),
        products(memory.take(CHUNK * SQUARE)),
        columns(memory.take(CHUNK * WIDE)),
        decays(*reinterpret_cast<Decays*>(memory.next)) {}

  template <typename Call>
  static __device__ __forceinline__ void run(const Call& call, char* shared) {
    ComputeColumns own(call, Memory{reinterpret_cast<float*>(shared)});
    if constexpr (!BACKWARD) {
      own.write_columns(call, call.v, call.states, call.output);
    } else {
      if constexpr (!PREDICTS) {
        own.write_columns(call, call.d_output, call.d_states, call.d_v);
        __syncthreads();
      } else {
        copy_columns<COLUMNS, V, THREADS>(own.columns, WIDE, call.d_output, own.place, call.T);
      }
      copy_columns<COLUMNS, V, THREADS>(own.x, V + PAD, call.v, own.place, call.T);
      own.template differentiate_products<0, EARLY>(call);
      if constexpr (PREDICTS) {
        copy_columns<COLUMNS, V, THREADS>(own.columns, WIDE, call.d_v, own.place, call.T);
        own.template differentiate_products<1, true>(call);
      }
    }
  }

 private:
  template <typename Call, typename Read, typename Written>
  __device__ __forceinline__ void write_columns(const Call& call, const Read& read, float* states,
                                                const Written& written) {
    Own::load(call, call.q, place);
    copy_columns<COLUMNS, V, THREADS>(columns, WIDE, read, place, call.T);
    Own::multiply_decays(decays);
    Own::template multiply_pairs<BACKWARD, EARLY>(products, x, decays);
    if constexpr (BACKWARD)
      Own::put_keys(x, decays);
    else
      Own::template put_queries<EARLY>(x, decays);
    __syncthreads();
    if (Part<Own::WARPS, 2, CHUNK, V> part(Own::warp); part.any()) {
      part.add(K, Along{x, PITCH},
               DeepKeys<KEYS, COLUMNS, Call>{states + place.template state<KEYS, COLUMNS>(call)});
      part.add(CHUNK, Triangle<BACKWARD>{{products, SQUARE}}, WideAcross{columns, WIDE});
      recurrent::write_columns<COLUMNS>(written, part, place.begin, call.T, place.b, place.head);
    }
  }

  // Computes the gradients of the products of all pairs with what has gradients in `columns`; v is
  // in x. READ: 0 of queries, 1 of keys of predictions. BEFORE: without the pairs of a step with
  // itself.
  template <int READ, bool BEFORE, typename Call>
  __device__ __forceinline__ void differentiate_products(const Call& call) {
    __syncthreads();
    Square d_pairs(Own::warp);
    d_pairs.add(V, Along{columns, WIDE}, Along{x, V + PAD});
    d_pairs.each_pair([this](int i, int j, const float (&pair)[2]) {
#pragma unroll
      for (int z = 0; z < 2; ++z) {
        if (i < j + z) continue;
        const float number = i < j + z + BEFORE ? 0 : rounded(pair[z]);
        products[i * SQUARE + j + z] = products[(j + z) * SQUARE + i] = number;
      }
    });
    __syncthreads();
    const int64_t index = READ * place.count(call) + place.index(call);
    float* const to = call.d_products + index * CHUNK * CHUNK;
    for (int at = threadIdx.x * 4; at < CHUNK * CHUNK; at += THREADS * 4) {
      float numbers[4];
      load(numbers, products + at / CHUNK * SQUARE + at % CHUNK), write_numbers(to + at, numbers);
    }
  }
};

}  // namespace hoconv::recurrent
