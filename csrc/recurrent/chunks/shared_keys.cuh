// The kernel of the keys of chunks whose decays are those of a head: gradients of queries, keys and
// decays.
#pragma once

#include "recurrent/chunks/products.cuh"
#include "recurrent/chunks/shared_steps.cuh"

namespace hoconv::recurrent {

// Computes the gradients of q, k and d of a chunk, and of p. A block has some keys of a head. With
// D_0i and D_jC, which scale queries and keys,
//
//   d_q_i = D_0i S_0 o'_i + Σ_{j≤i} (q_iᵀ k_j)' k_j,
//   d_k_j = D_jC S'_C v_j + Σ_{i≥j} (q_iᵀ k_j)' q_i,
//
// where the gradients of products of pairs, with their decays, are those of shared_columns.cuh.
template <int KEYS, int COLUMNS, bool PREDICTS, bool EARLY>
struct ComputeSharedKeys {
  static constexpr int K = count_shared(KEYS), BLOCKS = (KEYS + K - 1) / K;
  static constexpr int WARPS = 8, THREADS = 32 * WARPS, ACROSS = 2;
  static constexpr int V = round_up(COLUMNS, 16), WIDE = V + PAD, PITCH = K + WIDE_PAD;
  using Sums = Part<WARPS, WARPS / ACROSS, CHUNK, K>;

  // Numbers of each step: its decay, and the products of those before and after it in the chunk;
  // the gradients of what scales queries and keys, in the parts of lanes.
  struct Steps {
    static constexpr int PARTS = 4 * ACROSS;
    float d[CHUNK], before[CHUNK], after[CHUNK], of_queries[PARTS][CHUNK], of_keys[PARTS][CHUNK];
    float whole[WARPS];  // of the product of all decays
  };
  // Products of pairs come in place of columns.
  static constexpr int FIRST = CHUNK * (WIDE > SQUARE ? WIDE : SQUARE);
  static constexpr int BYTES =
      4 * (FIRST + K * WIDE + 2 * CHUNK * PITCH) + static_cast<int>(sizeof(Steps));

  const Place place;
  const int64_t T;
  const int first, warp, lane;
  float *const columns, *const state, *const queries, *const keys;
  Steps& steps;

  template <typename Call>
  __device__ ComputeSharedKeys(const Call& call, Memory memory)
      : place(call, BLOCKS),
        T(call.T),
        first(place.block * K),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        columns(memory.take(FIRST)),
        state(memory.take(K * WIDE)),
        queries(memory.take(CHUNK * PITCH)),
        keys(memory.take(CHUNK * PITCH)),
        steps(*reinterpret_cast<Steps*>(memory.next)) {}

  // Rows of the keys of the block on their way from a state.
  struct Slab {
    static constexpr int COUNT = K / WARPS;
    float numbers[COUNT][4];

    template <typename Matrix>
    __device__ __forceinline__ void load(const Matrix& matrix, int warp, int lane) {
#pragma unroll
      for (int n = 0; n < COUNT; ++n) matrix.read(numbers[n], n * WARPS + warp, 4 * lane);
    }
    __device__ __forceinline__ void store(float* to, int warp, int lane) const {
      if (4 * lane >= V) return;
#pragma unroll
      for (int n = 0; n < COUNT; ++n)
        store_rounded(to + (n * WARPS + warp) * WIDE + 4 * lane, numbers[n]);
    }
  };

  template <typename R>
  using Columns = Coming<R, COLUMNS, V, THREADS, CHUNK>;

  template <typename Call>
  static __device__ __forceinline__ void run(const Call& call, char* shared) {
    ComputeSharedKeys own(call, Memory{reinterpret_cast<float*>(shared)});
    const Place& place = own.place;
    using Matrix = State<KEYS, COLUMNS, Call>;
    const int64_t matrix = place.template state<KEYS, COLUMNS>(call);
    Slab before, after;
    before.load(Matrix{call.states + matrix, own.first}, own.warp, own.lane);
    after.load(Matrix{call.d_states + matrix, own.first}, own.warp, own.lane);
    own.put_steps(call);
    own.put_rows(own.queries, call.q), own.put_rows(own.keys, call.k);
    own.put_columns(call.v);
    float whole = 0;
#pragma unroll
    for (int n = 0; n < Slab::COUNT; ++n)
#pragma unroll
      for (int z = 0; z < 4; ++z)
        if (4 * own.lane + z < COLUMNS) whole += before.numbers[n][z] * after.numbers[n][z];
    whole = warp_reduce(whole, [](float a, float b) { return a + b; });
    if (own.lane == 0) own.steps.whole[own.warp] = whole;
    after.store(own.state, own.warp, own.lane);
    Columns<decltype(call.d_output)> d_outputs;  // on their way during the product
    d_outputs.load(call.d_output, place.begin, call.T, place.b, place.head);
    __syncthreads();

    own.multiply_decays();
    Sums d_k(own.warp);
    d_k.add(V, Along{own.columns, WIDE}, Along{own.state, WIDE});
    __syncthreads();
    before.store(own.state, own.warp, own.lane);
    d_outputs.store(own.columns, WIDE);
    own.take_factors(d_k, own.keys, own.steps.of_keys, 0);
    d_k.scale_rows([&](int i) { return own.steps.after[i]; });
    const float* const pairs = call.d_products + place.index(call) * CHUNK * CHUNK;
    own.template take_reads<EARLY>(call.d_q, d_k, pairs);
    if constexpr (PREDICTS) {
      __syncthreads();
      own.put_rows(own.queries, call.p), own.put_columns(call.d_v);
      own.template take_reads<true>(call.d_p, d_k, pairs + place.count(call) * CHUNK * CHUNK);
    }
    own.write(call.d_k, d_k);
    if constexpr (Call::DECAYS) own.differentiate_decays(call);
  }

 private:
  template <typename R>
  __device__ __forceinline__ void put_columns(const R& rows) const {
    copy_columns<COLUMNS, V, THREADS>(columns, WIDE, rows, place, T);
  }
  // Writes the block's keys of rows.
  template <typename R>
  __device__ __forceinline__ void put_rows(float* to, const R& rows) const {
    Coming<R, KEYS, K, THREADS, CHUNK> coming;
    coming.load(rows, place.begin, T, place.b, place.head, first);
    coming.store(to, PITCH);
  }
  template <typename Call>
  __device__ __forceinline__ void put_steps(const Call& call) const {
    const int i = threadIdx.x;
    if (i < CHUNK) steps.d[i] = read_decay(call, place.begin + i, place.b, place.head);
#pragma unroll
    for (int at = i; at < Steps::PARTS * CHUNK; at += THREADS)
      steps.of_queries[at / CHUNK][at % CHUNK] = steps.of_keys[at / CHUNK][at % CHUNK] = 0;
  }
  __device__ __forceinline__ void multiply_decays() const {
    const int i = threadIdx.x % CHUNK;
    if (threadIdx.x < CHUNK)
      steps.before[i] = multiply_range(steps.d, 0, i);
    else if (threadIdx.x < 2 * CHUNK)
      steps.after[i] = multiply_range(steps.d, i + 1, CHUNK);
  }

  // Adds the product of each row of sums and that of `rows`, which is the gradient of the factor
  // of the row, to what step `row - shift` has.
  __device__ __forceinline__ void take_factors(const Sums& sums, const float* rows,
                                               float (&to)[Steps::PARTS][CHUNK], int shift) const {
    float (&own)[CHUNK] = to[warp % ACROSS * 4 + lane_depth()];
#pragma unroll
    for (int m = 0; m < Sums::M; ++m)
#pragma unroll
      for (int y = 0; y < 2; ++y) {
        const int row = sums.row + 16 * m + 8 * y + lane_row();
        const float* const others = rows + row * PITCH + sums.column + 2 * lane_depth();
        float sum = 0;
#pragma unroll
        for (int n = 0; n < Sums::TILES; ++n)
#pragma unroll
          for (int z = 0; z < 2; ++z) sum += sums.sums[m][n][2 * y + z] * others[8 * n + z];
        if (row >= shift) own[row - shift] += sum;
      }
  }

  // Takes the gradients of the queries that are loaded, or BEFORE: keys of predictions, whose
  // gradients of what they read are the columns. They read the state before the chunk, and steps of
  // the chunk, in pairs.
  template <bool BEFORE, typename Written>
  __device__ __forceinline__ void take_reads(const Written& written, Sums& d_k,
                                             const float* pairs) {
    constexpr int COUNT = CHUNK * CHUNK / 4 / THREADS;
    float coming[COUNT][4];
#pragma unroll
    for (int n = 0; n < COUNT; ++n) load(coming[n], pairs + (n * THREADS + threadIdx.x) * 4);
    __syncthreads();
    Sums sums(warp);
    sums.add(V, Along{columns, WIDE}, Along{state, WIDE});
    __syncthreads();
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const int at = (n * THREADS + threadIdx.x) * 4;
      store(columns + at / CHUNK * SQUARE + at % CHUNK, coming[n]);
    }
    take_factors(sums, queries, steps.of_queries, BEFORE);
    sums.scale_rows([this](int i) { return steps.before[i] * (BEFORE ? 1 : steps.d[i]); });
    __syncthreads();
    sums.add(CHUNK, Triangle<false>{{columns, SQUARE}}, Across{keys, PITCH});
    d_k.add(CHUNK, Triangle<true>{{columns, SQUARE}}, Across{queries, PITCH});
    write(written, sums);
  }

  template <typename R>
  __device__ __forceinline__ void write(const R& rows, const Sums& sums) const {
    sums.each_pair([&](int i, int c, const float (&pair)[2]) {
      const int key = first + c;
      if (place.begin + i >= T || key >= KEYS) return;
      auto* const to = rows.at(place.begin + i, place.b, place.head, key);
      if (key + 1 < KEYS)
        rows.store(to, pair);
      else
        rows.store(to, {pair[0]});
    });
  }

  // Writes the block's part of the gradient of each decay d_t, after that of pairs: from queries
  // that it scales, those at or after t, from keys, those before t, and from the state after the
  // chunk.
  template <typename Call>
  __device__ __forceinline__ void differentiate_decays(const Call& call) const {
    const int i = threadIdx.x % CHUNK, kind = threadIdx.x / CHUNK;
    __syncthreads();
    if (kind < 2) {
      float (&parts)[Steps::PARTS][CHUNK] = kind ? steps.of_keys : steps.of_queries;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < Steps::PARTS; ++n) sum += parts[n][i];
      parts[0][i] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      float carry = 0;
#pragma unroll 8
      for (int t = CHUNK - 1; t >= 0; --t) {
        carry += steps.of_queries[0][t];
        steps.of_queries[0][t] = carry, carry *= steps.d[t];
      }
    } else if (threadIdx.x == CHUNK) {
      float carry = 0;
#pragma unroll
      for (int n = 0; n < WARPS; ++n) carry += steps.whole[n];
#pragma unroll 8
      for (int t = 0; t < CHUNK; ++t) {
        const float of_key = steps.of_keys[0][t];
        steps.of_keys[0][t] = carry, carry = carry * steps.d[t] + of_key;
      }
    }
    __syncthreads();
    const auto rows = call.d_d;
    if (kind == 0 && place.begin + i < T)
      rows.store(rows.at(place.begin + i, place.b, place.head, 0) + (1 + place.block) * call.part,
                 {steps.before[i] * steps.of_queries[0][i] + steps.after[i] * steps.of_keys[0][i]});
  }
};

}  // namespace hoconv::recurrent
