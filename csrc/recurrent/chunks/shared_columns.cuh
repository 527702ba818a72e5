// The kernel of the columns of chunks whose decays are those of a head: outputs, and gradients of
// values.
#pragma once

#include "recurrent/chunks/products.cuh"
#include "recurrent/chunks/shared_steps.cuh"

namespace hoconv::recurrent {

// As ComputeColumns: D_ji is a number, by which the product q_iᵀ k_j is multiplied, and rows that
// read the state are scaled when they have read it.
template <int KEYS, int COLUMNS, bool BACKWARD, bool PREDICTS, bool EARLY>
struct ComputeSharedColumns {
  static constexpr int K = round_up(KEYS, 16), V = round_up(COLUMNS, 16);
  static constexpr int WARPS = 8, THREADS = 32 * WARPS;
  static constexpr int PITCH = K + PAD, WIDE = V + WIDE_PAD;
  // The rows of v come in place of those that read the state, and columns in place of the others.
  static constexpr int ROWS = PITCH > V + PAD || !BACKWARD ? PITCH : V + PAD;
  static constexpr int SECOND = PITCH > WIDE ? PITCH : WIDE;
  using Square = Part<WARPS, 2, CHUNK, CHUNK>;
  using Sums = Part<WARPS, 2, CHUNK, V>;

  struct Steps {
    float d[CHUNK], factors[CHUNK];  // D_0i of queries, or BACKWARD: D_jC of keys
  };
  static constexpr int BYTES =
      4 * CHUNK * (ROWS + SECOND + 2 * SQUARE) + static_cast<int>(sizeof(Steps));

  const Place place;
  const int64_t T;
  const int warp;
  float *const x, *const columns, *const products, *const products_of;  // the last are D_ji
  Steps& steps;
  Square of_decays, of_earlier;  // the gradients of D_ji, and of D_j,i-1

  template <typename Call>
  __device__ ComputeSharedColumns(const Call& call, Memory memory)
      : place(call),
        T(call.T),
        warp(threadIdx.x / 32),
        x(memory.take(CHUNK * ROWS)),
        columns(memory.take(CHUNK * SECOND)),
        products(memory.take(CHUNK * SQUARE)),
        products_of(memory.take(CHUNK * SQUARE)),
        steps(*reinterpret_cast<Steps*>(memory.next)),
        of_decays(warp),
        of_earlier(warp) {}

  template <typename Call>
  static __device__ __forceinline__ void run(const Call& call, char* shared) {
    ComputeSharedColumns own(call, Memory{reinterpret_cast<float*>(shared)});
    if (threadIdx.x < CHUNK)
      own.steps.d[threadIdx.x] =
          read_decay(call, own.place.begin + threadIdx.x, own.place.b, own.place.head);
    if constexpr (!BACKWARD) {
      own.write_columns(call, call.q, call.k, call.v, call.states, call.output);
    } else if constexpr (!PREDICTS) {
      const Square pairs =
          own.write_columns(call, call.k, call.q, call.d_output, call.d_states, call.d_v);
      __syncthreads();
      own.template differentiate_products<0, EARLY>(call, pairs);
    } else {
      __syncthreads();
      multiply_steps<THREADS>(own.products_of, own.steps.d);
      own.template differentiate<0, EARLY>(call, call.q, call.d_output);
      __syncthreads();
      own.template differentiate<1, true>(call, call.p, call.d_v);
    }
    if constexpr (BACKWARD && Call::DECAYS) own.differentiate_decays(call);
  }

 private:
  // A state on its way from global memory, of which the keys are the depth of a product.
  template <typename Matrix>
  struct Ahead {
    static constexpr int COUNT = K / 16, AHEAD = 2;
    const Matrix matrix;
    const int column;
    float numbers[AHEAD][4][Sums::TILES];

    __device__ Ahead(Matrix matrix, int column) : matrix(matrix), column(column) {
      load<0>(), load<1>();
    }
    template <int N>
    __device__ __forceinline__ void load() {
      if constexpr (N < COUNT)
#pragma unroll
        for (int z = 0; z < 4; ++z)
          matrix.read(numbers[N % AHEAD][z], 16 * N + lane_depth() + 4 * z,
                      column + Sums::TILES * lane_row());
    }
    template <int N = 0>
    __device__ __forceinline__ void add_to(Sums& sums, Along left) {
      uint32_t b[Sums::TILES][4];
#pragma unroll
      for (int z = 0; z < 4; ++z)
#pragma unroll
        for (int tile = 0; tile < Sums::TILES; ++tile)
          b[tile][z] = round_to_tf32(numbers[N % AHEAD][z][tile]);
      load<N + AHEAD>();
      add_products(sums.sums, sums.row, 16 * N, left, b);
      if constexpr (N + 1 < COUNT) add_to<N + 1>(sums, left);
    }
  };

  template <typename R>
  __device__ __forceinline__ void put_rows(float* to, const R& rows) const {
    copy_columns<KEYS, K, THREADS>(to, PITCH, rows, place, T);
  }

  // Computes what columns get of the steps before, or BACKWARD: after them, and of a state that
  // `reading` rows read. Returns the products of pairs without decays.
  template <typename Call, typename Reading, typename Others, typename Read, typename Written>
  __device__ __forceinline__ Square write_columns(const Call& call, const Reading& reading,
                                                  const Others& others, const Read& read,
                                                  float* states, const Written& written) {
    Sums sums(warp);
    const auto at = place.template state<KEYS, COLUMNS>(call);
    put_rows(x, reading), put_rows(columns, others);
    Ahead<State<KEYS, COLUMNS, Call>> state({states + at}, sums.column);
    Coming<Read, COLUMNS, V, THREADS, CHUNK> coming;
    coming.load(read, place.begin, T, place.b, place.head);
    __syncthreads();
    if (threadIdx.x < CHUNK) {
      const int i = threadIdx.x;
      steps.factors[i] =
          BACKWARD ? multiply_range(steps.d, i + 1, CHUNK) : multiply_range(steps.d, 0, i + !EARLY);
    }
    multiply_steps<THREADS>(products_of, steps.d);
    Square pairs(warp);
    pairs.add(K, Along{BACKWARD ? columns : x, PITCH}, Along{BACKWARD ? x : columns, PITCH});
    __syncthreads();
    pairs.each_pair([this](int i, int j, const float (&pair)[2]) {
#pragma unroll
      for (int z = 0; z < 2; ++z) {
        if (i < j + z) continue;
        const float number =
            i < j + z + EARLY ? 0 : pair[z] * products_of[(i - EARLY) * SQUARE + j + z];
        products[BACKWARD ? (j + z) * SQUARE + i : i * SQUARE + j + z] = rounded(number);
      }
    });
    coming.store(columns, WIDE);
    __syncthreads();
    if (sums.any()) {
      state.add_to(sums, Along{x, PITCH});
      sums.scale_rows([this](int i) { return steps.factors[i]; });
      sums.add(CHUNK, Triangle<BACKWARD>{{products, SQUARE}}, WideAcross{columns, WIDE});
      recurrent::write_columns<COLUMNS>(written, sums, place.begin, T, place.b, place.head);
    }
    return pairs;
  }

  // Computes the gradients of the products of all pairs with queries, or keys of predictions.
  template <int READ, bool BEFORE, typename Call, typename Queries, typename Read>
  __device__ __forceinline__ void differentiate(const Call& call, const Queries& queries,
                                                const Read& gradients) {
    Square pairs(warp);
    if constexpr (Call::DECAYS) {
      put_rows(columns, queries), put_rows(x, call.k);
      __syncthreads();
      pairs.add(K, Along{columns, PITCH}, Along{x, PITCH});
      __syncthreads();
    }
    copy_columns<COLUMNS, V, THREADS>(columns, WIDE, gradients, place, T);
    differentiate_products<READ, BEFORE>(call, pairs);
  }
  // The same of gradients that are in `columns`. READ: 0 of queries, 1 of these keys. BEFORE: with
  // D_j,i-1.
  template <int READ, bool BEFORE, typename Call>
  __device__ __forceinline__ void differentiate_products(const Call& call, const Square& pairs) {
    copy_columns<COLUMNS, V, THREADS>(x, V + PAD, call.v, place, T);
    __syncthreads();
    Square d_pairs(warp);
    d_pairs.add(V, Along{columns, WIDE}, Along{x, V + PAD});
    d_pairs.each_pair([this](int i, int j, const float (&pair)[2]) {
#pragma unroll
      for (int z = 0; z < 2; ++z) {
        if (i < j + z) continue;
        const float number =
            i < j + z + BEFORE ? 0 : pair[z] * products_of[(i - BEFORE) * SQUARE + j + z];
        products[i * SQUARE + j + z] = products[(j + z) * SQUARE + i] = rounded(number);
      }
    });
    __syncthreads();
    const int64_t index = READ * place.count(call) + place.index(call);
    float* const to = call.d_products + index * CHUNK * CHUNK;
#pragma unroll
    for (int n = 0; n < CHUNK * CHUNK / 4 / THREADS; ++n) {
      const int at = (n * THREADS + threadIdx.x) * 4;
      float numbers[4];
      load(numbers, products + at / CHUNK * SQUARE + at % CHUNK), write_numbers(to + at, numbers);
    }
    if constexpr (Call::DECAYS) (BEFORE ? of_earlier : of_decays).add_each(pairs, d_pairs);
  }

  // Writes what the pairs add to the gradients of decays, before the parts of blocks of keys.
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
    differentiate_steps(products, products_of, steps.d);
    __syncthreads();
    for (int i = warp; i < CHUNK && place.begin + i < T; i += WARPS) {
      const float* const row = products + i * SQUARE + threadIdx.x % 32;
      const float sum = warp_reduce(row[0] + row[32], [](float a, float b) { return a + b; });
      if (threadIdx.x % 32 == 0)
        call.d_d.store(call.d_d.at(place.begin + i, place.b, place.head, 0), {sum});
    }
  }
};

}  // namespace hoconv::recurrent
