// The kernel of the keys of chunks whose keys decay each at its own rate: gradients of queries,
// keys and decays.
#pragma once

#include "recurrent/chunks/steps.cuh"

namespace hoconv::recurrent {

// Pairs of steps of one level: products with those of the others are 0.
template <int N>
struct Level : Along {
  __device__ __forceinline__ void left(uint32_t (&a)[2][4], int row, int at) const {
    Along::left(a, row, at);
    if constexpr (N < STEPS)  // else all are
#pragma unroll
      for (int z = 0; z < 8; ++z) {
        const int i = row + lane_row() + z % 2 * 8, j = at + lane_depth() + z / 2 * 4;
        if ((i ^ j) / N != 1) a[z / 4][z % 4] = 0;
      }
  }
};

// Computes the gradients of q, k and d of a chunk, and of p. A block has some keys of a head.
template <int KEYS, int COLUMNS, bool PREDICTS, bool EARLY>
struct ComputeKeys : Pairs<KEYS, count_own(KEYS), 1, WIDE_PAD> {
  static constexpr int K = count_own(KEYS);
  using Own = Pairs<KEYS, K, 1, WIDE_PAD>;
  using Own::d, Own::key, Own::owns, Own::PITCH, Own::q, Own::k, Own::row, Own::segment;
  using Numbers = typename Own::Numbers;
  using Decays = typename Own::Decays;
  static constexpr int V = round_up(COLUMNS, 16), WIDE = V + PAD, THREADS = Own::THREADS;
  // Columns of the chunk come first, then scaled steps and products of pairs.
  static constexpr int FIRST = CHUNK * (WIDE > PITCH + SQUARE ? WIDE : PITCH + SQUARE);
  static constexpr int BYTES = 4 * (FIRST + CHUNK * PITCH + K * WIDE + K + 2 * SEGMENTS * K);

  float *x, *d_x;  // scaled steps and their gradients
  Decays &decays, &carries;
  Numbers d_q = {}, d_k = {}, d_decay = {};

  __device__ ComputeKeys(int64_t T, int first, float* x, float* d_x, Decays& decays,
                         Decays& carries)
      : Own(T, first), x(x), d_x(d_x), decays(decays), carries(carries) {}

  __device__ __forceinline__ float given(int s) const { return d_x[row(s) * PITCH + key]; }

  // Differentiates queries that are scaled by the decays from `from` on, where `scale` is the
  // product of those before; BEFORE: without that of their own step. `carry` is the gradient of the
  // product after the last one.
  template <bool BEFORE>
  __device__ __forceinline__ void take_queries(int from, int count, float scale, float carry) {
    float each[STEPS], product[1] = {scale};
    Own::scale_forward(from, count, product, [&](int s, const float (&f)[1]) { each[s] = f[0]; });
#pragma unroll
    for (int s = STEPS - 1; s >= 0; --s) {
      if (s < from || s >= from + count) continue;
      const float before = s > from ? each[s - 1] : scale;
      d_q[s][0] += given(s) * (BEFORE ? before : each[s]);
      if (!BEFORE) carry += given(s) * q[s][0];
      d_decay[s][0] += carry * before;
      carry *= d[s][0];
      if (BEFORE) carry += given(s) * q[s][0];
    }
  }
  // The same of keys, that are scaled by the decays after them; `scale` is the product of those
  // after the last one, and `carry` the gradient of that before the first one.
  __device__ __forceinline__ void take_keys(int from, int count, float scale, float carry) {
    float each[STEPS], product[1] = {scale};
    Own::scale_backward(from, count, product, [&](int s, const float (&f)[1]) { each[s] = f[0]; });
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      if (s < from || s >= from + count) continue;
      d_k[s][0] += given(s) * each[s];
      d_decay[s][0] += carry * each[s];
      carry = carry * d[s][0] + given(s) * k[s][0];
    }
  }

  // Takes the gradients of the steps of segments `first` to `last`, which are scaled as one: as
  // queries, or as keys. `carry` is that of what scales the first key.
  template <bool BEFORE = false>
  __device__ __forceinline__ void take_segments(bool queries, int first, int last, float carry) {
    float own = 0;
    if (owns()) {
      if (queries)
#pragma unroll
        for (int s = STEPS - 1; s >= 0; --s)
          own = BEFORE ? own * d[s][0] + given(s) * q[s][0] : (own + given(s) * q[s][0]) * d[s][0];
      else
#pragma unroll
        for (int s = 0; s < STEPS; ++s) own = own * d[s][0] + given(s) * k[s][0];
      carries[segment][key] = own;
    }
    __syncthreads();
    if (!owns()) return;
    float scale[1];
    if (queries) {
      for (int s = last; s > segment; --s) carry = carry * decays[s][key] + carries[s][key];
      Own::between(decays, first, segment, scale);
      take_queries<BEFORE>(0, STEPS, scale[0], carry);
    } else {
      for (int s = first; s < segment; ++s) carry = carry * decays[s][key] + carries[s][key];
      Own::between(decays, segment + 1, last + 1, scale);
      take_keys(0, STEPS, scale[0], carry);
    }
  }

  // Takes the gradients of the pairs of level N and those below.
  template <int N, bool BEFORE>
  __device__ __forceinline__ void take_levels(const float* d_products) {
    Own::template put_level<N, BEFORE>(x, decays);
    __syncthreads();
    Part<Own::WARPS, Own::WARPS, CHUNK, K> part(Own::warp);
    // The other steps of the blocks of these 16.
    const int at = part.row;
    const int begin = N == 32 ? 32 - at / 32 * 32 : N == 16 ? at ^ 16 : at;
    add_products(part.sums, at, 0, begin, N == 32 ? 32 : 16, Level<N>{{d_products, SQUARE}},
                 Across{x, PITCH});
    part.each_pair([&](int i, int c, const float (&pair)[2]) { store(d_x + i * PITCH + c, pair); });
    __syncthreads();
    if constexpr (N >= STEPS) {
      constexpr int HALF = N / STEPS;
      const int first = segment / HALF * HALF;
      take_segments<BEFORE>(Own::template is_query<N>(), first, first + HALF - 1, 0);
    } else if (owns() && Own::begin < Own::T) {
      // The second condition always holds: ptxas moves no sums out of a branch, and so spills none.
#pragma unroll
      for (int block = 0; block < STEPS; block += 2 * N) {
        take_keys(block, N, 1, 0);
        take_queries<BEFORE>(block + N, N, 1, 0);
      }
    }
    if constexpr (N > 1) take_levels<N / 2, BEFORE>(d_products);
  }

  // Writes what the state gives the scaled keys, or queries, of rows of columns, to d_x.
  template <typename R, typename Matrix>
  __device__ __forceinline__ void multiply_state(const R& rows, const Matrix& state, float* columns,
                                                 float* own_state, const Place& place) const {
    copy_columns<COLUMNS, V, THREADS>(columns, WIDE, rows, place, Own::T);
#pragma unroll 4
    for (int n = 0; n < K / Own::WARPS; ++n) {
      const int i = n * Own::WARPS + Own::warp, c = threadIdx.x % 32 * 4;
      float numbers[4];
      state.read(numbers, i, c);
#pragma unroll
      for (int z = 0; z < 4; ++z) numbers[z] = rounded(numbers[z]);
      if (c < V) store(own_state + i * WIDE + c, numbers);
    }
    __syncthreads();
    Part<Own::WARPS, Own::WARPS, CHUNK, K> part(Own::warp);
    part.add(V, Along{columns, WIDE}, Along{own_state, WIDE});
    part.each_pair([&](int i, int c, const float (&pair)[2]) { store(d_x + i * PITCH + c, pair); });
    __syncthreads();
  }

  // Takes the gradients of the queries that are loaded, or BEFORE: keys of predictions. They read
  // the state before the chunk, scaled from its beginning, and steps of the chunk, in pairs.
  template <bool BEFORE, typename R, typename Matrix>
  __device__ __forceinline__ void take_reads(const R& gradients, const Matrix& state,
                                             const float* pairs, float* columns, float* own_state,
                                             const Place& place) {
    float* const d_products = x + CHUNK * PITCH;  // in place of columns
    multiply_state(gradients, state, columns, own_state, place);
#pragma unroll
    for (int n = 0; n < CHUNK * CHUNK / 4 / THREADS; ++n) {
      const int at = (n * THREADS + threadIdx.x) * 4;
      float numbers[4];
      load(numbers, pairs + at), store(d_products + at / CHUNK * SQUARE + at % CHUNK, numbers);
    }
    take_segments<BEFORE>(true, 0, SEGMENTS - 1, 0);
    take_levels<CHUNK / 2, BEFORE>(d_products);
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {  // the pairs of a step with itself
      const float product = d_products[row(s) * (SQUARE + 1)];
      d_q[s][0] += product * k[s][0], d_k[s][0] += product * q[s][0];
    }
  }

  template <typename Call>
  static __device__ __forceinline__ void run(const Call& call, char* shared) {
    Memory memory{reinterpret_cast<float*>(shared)};
    float* const columns = memory.take(FIRST);
    float* const d_x = memory.take(CHUNK * PITCH);
    float* const own_state = memory.take(K * WIDE);
    float* const d_all = memory.take(K);  // of the product of all decays
    auto& decays = *reinterpret_cast<Decays*>(memory.take(SEGMENTS * K));
    auto& carries = *reinterpret_cast<Decays*>(memory.take(SEGMENTS * K));
    const Place place(call, count_blocks(KEYS));
    const int64_t matrix = place.template state<KEYS, COLUMNS>(call);
    const float *const state = call.states + matrix, *const d_state = call.d_states + matrix;
    ComputeKeys own(call.T, place.block * K, columns, d_x, decays, carries);
    own.load(call, call.q, place);
    const State<KEYS, COLUMNS, Call> before{state, own.first}, after{d_state, own.first};
#pragma unroll
    for (int n = 0; n < K / Own::WARPS; ++n) {
      const int i = n * Own::WARPS + own.warp, c = threadIdx.x % 32 * 4;
      float own_state[4], own_d_state[4], sum = 0;
      before.read(own_state, i, c), after.read(own_d_state, i, c);
#pragma unroll
      for (int z = 0; z < 4; ++z) sum += c < COLUMNS ? own_state[z] * own_d_state[z] : 0;
      sum = warp_reduce(sum, [](float a, float b) { return a + b; });
      if (threadIdx.x % 32 == 0) d_all[i] = sum;
    }
    own.multiply_decays(decays);

    // Keys scaled to the end of the chunk, which the state takes.
    own.multiply_state(call.v, after, columns, own_state, place);
    own.take_segments(false, 0, SEGMENTS - 1, own.owns() ? d_all[own.key] : 0);
    __syncthreads();
    const float* const pairs = call.d_products + place.index(call) * CHUNK * CHUNK;
    own.template take_reads<EARLY>(call.d_output, before, pairs, columns, own_state, place);
    own.write(call.d_q, own.d_q, place.b, place.head);
    if constexpr (PREDICTS) {
      own.load_queries(call.p, place);
#pragma unroll
      for (int s = 0; s < STEPS; ++s) own.d_q[s][0] = 0;
      __syncthreads();
      own.template take_reads<true>(call.d_v, before, pairs + place.count(call) * CHUNK * CHUNK,
                                    columns, own_state, place);
      own.write(call.d_p, own.d_q, place.b, place.head);
    }
    own.write(call.d_k, own.d_k, place.b, place.head);
    if constexpr (Call::DECAYS) own.write(call.d_d, own.d_decay, place.b, place.head);
  }
};

}  // namespace hoconv::recurrent
