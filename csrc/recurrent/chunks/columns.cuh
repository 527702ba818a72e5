// The kernel of the columns of chunks: outputs, and gradients of values.
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
template <int KEYS, int COLUMNS, bool BACKWARD, bool SHARED, bool PREDICTS, bool EARLY>
struct ComputeColumns : Pairs<KEYS, round_up(KEYS, 16), 2> {
  static constexpr int K = round_up(KEYS, 16), V = round_up(COLUMNS, 16);
  using Own = Pairs<KEYS, K, 2>;
  using typename Own::Decays, typename Own::Square;
  static constexpr int THREADS = Own::THREADS, PITCH = Own::PITCH, WIDE = V + WIDE_PAD;
  // The rows of v come in place of the scaled steps.
  static constexpr int ROWS = PITCH > V + PAD || !BACKWARD ? PITCH : V + PAD;
  // With shared decays, the keys come first in place of columns.
  static constexpr int SECOND = SHARED && PITCH > WIDE ? PITCH : WIDE;
  static constexpr int BYTES =
      4 * (CHUNK * (ROWS + SQUARE + SECOND) + SEGMENTS * K + SHARED * CHUNK * (SQUARE + 1));

  const Place place;
  float *const x, *const products, *const columns;
  Decays& decays;
  float *const own_decays, *const products_of;  // if they are shared: of each step, and D_ji
  Square of_decays, of_earlier;                 // the gradients of D_ji, and of D_j,i-1

  template <typename Call>
  __device__ ComputeColumns(const Call& call, Memory memory)
      : Own(call.T, 0),
        place(call),
        x(memory.take(CHUNK * ROWS)),
        products(memory.take(CHUNK * SQUARE)),
        columns(memory.take(CHUNK * SECOND)),
        decays(*reinterpret_cast<Decays*>(memory.take(SEGMENTS * K))),
        own_decays(memory.next),
        products_of(own_decays + CHUNK),
        of_decays(Own::warp),
        of_earlier(Own::warp) {}

  template <typename Call>
  static __device__ __forceinline__ void run(const Call& call, char* shared) {
    ComputeColumns own(call, Memory{reinterpret_cast<float*>(shared)});
    own.load(call, call.q, own.place);
    if constexpr (SHARED) {
      own.put_decays(own.own_decays);
      own.multiply_decays(own.decays);
      multiply_steps(own.products_of, own.own_decays);
    }
    if constexpr (!BACKWARD) {
      own.write_columns(call, call.v, call.states, call.output);
    } else if constexpr (PREDICTS) {
      own.template differentiate<0, EARLY>(call, call.d_output);
      own.load_queries(call.p, own.place);
      __syncthreads();
      own.template differentiate<1, true>(call, call.d_v);
    } else {
      const Square pairs = own.write_columns(call, call.d_output, call.d_states, call.d_v);
      __syncthreads();
      own.template differentiate_products<0, EARLY>(call, pairs);
    }
    if constexpr (BACKWARD && SHARED && Call::DECAYS) own.differentiate_decays(call);
  }

 private:
  // Returns the products of pairs without decays, if these are shared, and else nothing.
  __device__ __forceinline__ Square multiply() {
    Square pairs(Own::warp);
    if constexpr (SHARED)
      Own::template multiply_pairs<BACKWARD, EARLY>(pairs, products, x, columns, products_of);
    else
      Own::template multiply_pairs<BACKWARD, EARLY>(products, x, decays);
    return pairs;
  }

  // Returns the products of pairs, as above.
  template <typename Call, typename Read, typename Written>
  __device__ __forceinline__ Square write_columns(const Call& call, const Read& read, float* states,
                                                  const Written& written) {
    if constexpr (!SHARED) {
      copy_columns<COLUMNS, V, THREADS>(columns, WIDE, read, place, call.T);
      Own::multiply_decays(decays);
    }
    const Square pairs = multiply();
    if constexpr (SHARED) copy_columns<COLUMNS, V, THREADS>(columns, WIDE, read, place, call.T);
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
    return pairs;
  }

  // Computes the gradients of the products of all pairs with the queries, or keys of predictions,
  // that are loaded.
  template <int READ, bool BEFORE, typename Call, typename Read>
  __device__ __forceinline__ void differentiate(const Call& call, const Read& gradients) {
    Square pairs(Own::warp);
    if constexpr (SHARED && Call::DECAYS) pairs = multiply();
    copy_columns<COLUMNS, V, THREADS>(columns, WIDE, gradients, place, call.T);
    differentiate_products<READ, BEFORE>(call, pairs);
  }
  // The same, of gradients that are in `columns`. READ: 0 of queries, 1 of these keys. BEFORE: with
  // D_j,i-1.
  template <int READ, bool BEFORE, typename Call>
  __device__ __forceinline__ void differentiate_products(const Call& call, const Square& pairs) {
    copy_columns<COLUMNS, V, THREADS>(x, V + PAD, call.v, place, call.T);
    __syncthreads();
    Square d_pairs(Own::warp);
    d_pairs.add(V, Along{columns, WIDE}, Along{x, V + PAD});
    d_pairs.each_pair([=](int i, int j, const float (&pair)[2]) {
#pragma unroll
      for (int z = 0; z < 2; ++z) {
        if (i < j + z) continue;
        float number = 0;
        if (i >= j + z + BEFORE)
          number = rounded(SHARED ? pair[z] * products_of[(i - BEFORE) * SQUARE + j + z] : pair[z]);
        products[i * SQUARE + j + z] = products[(j + z) * SQUARE + i] = number;
      }
    });
    __syncthreads();
    const int64_t index = READ * place.count(call) + place.index(call);
    float* const to = call.d_products + index * CHUNK * CHUNK;
    for (int at = threadIdx.x * 4; at < CHUNK * CHUNK; at += THREADS * 4) {
      float numbers[4];
      load(numbers, products + at / CHUNK * SQUARE + at % CHUNK), store(to + at, numbers);
    }
    if constexpr (SHARED && Call::DECAYS)
      (BEFORE ? of_earlier : of_decays).add_each(pairs, d_pairs);
  }

  template <typename Call>
  __device__ __forceinline__ void differentiate_decays(const Call& call) {
    __syncthreads();
    of_decays.each_pair(
        [this](int i, int j, const float (&pair)[2]) { store(products + i * SQUARE + j, pair); });
    __syncthreads();
    if constexpr (PREDICTS || EARLY) {
      of_earlier.each_pair([this](int i, int j, const float (&pair)[2]) {
#pragma unroll
        for (int z = 0; z < 2; ++z)
          if (i > j + z) products[(i - 1) * SQUARE + j + z] += pair[z];
      });
      __syncthreads();
    }
    differentiate_steps(products, products_of, own_decays);
    __syncthreads();
    for (int i = Own::warp; i < CHUNK && Own::begin + i < call.T; i += Own::WARPS) {
      const float* const row = products + i * SQUARE + threadIdx.x % 32;
      const float sum = warp_reduce(row[0] + row[32], [](float a, float b) { return a + b; });
      const auto& rows = call.d_d;
      if (threadIdx.x % 32 == 0)  // before the parts of the blocks that have keys
        rows.store(rows.at(Own::begin + i, place.b, place.head, 0), {sum});
    }
  }
};

}  // namespace hoconv::recurrent
