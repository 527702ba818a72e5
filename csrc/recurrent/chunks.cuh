// Matrix states that decay and take outer products, in chunks of steps, by tensor cores. For each
// head
//
//   S_t = diag(d_t) S_{t-1} + k_t v_tᵀ,   o_t = S_tᵀ q_t.
//
// Let D_ji be the product of the decays d_{j+1} ... d_i, and S_0 the state before a chunk. Then
//
//   o_i = S_0ᵀ (D_0i q_i) + Σ_{j≤i} ((D_ji k_j)ᵀ q_i) v_j.
//
// The products of all pairs (j, i) are a matrix product where D_ji is a factor of j times one of i.
// D_0i / D_0j overflows, or is 0 / 0. But with a step m between them D_ji = D_jm D_mi. So the pairs
// are taken in levels: level n, a power of two, divides the chunk into blocks of 2n steps, and has
// the pairs whose j is in the first half of a block and whose i is in the second half; m is the
// last step of the first half. Every pair j < i is in one level, that of the highest bit in which j
// and i differ. At each level a step has one role: its key or its query is scaled, by up to n
// decays. So the decays may have any value and sign.
//
// The gradient differentiates these products of decays one factor after the other.
#pragma once

#include "recurrent/instructions.cuh"

namespace hoconv::recurrent {

constexpr int CHUNK = 64, HALF = CHUNK / 2;

// What each step, row of the batch and head reads or writes: features that lie `each` apart.
template <typename T>
struct Rows {
  T* data;
  int64_t step, row, head, each;

  __device__ __forceinline__ float at(int64_t t, int64_t b, int64_t h, int i) const {
    return float(data[t * step + b * row + h * head + i * each]);
  }
  __device__ __forceinline__ void put(int64_t t, int64_t b, int64_t h, int i, float x) const {
    data[t * step + b * row + h * head + i * each] = T(x);
  }
};

// Adds products to M x N tiles of 16 x 8 sums, for `depth` numbers from `begin` on. left(row, k)
// and right(k, column) are rounded to TF32.
template <int M, int N, typename Left, typename Right>
__device__ __forceinline__ void add_products(float (&sums)[M][N][4], int row, int column, int begin,
                                             int depth, Left left, Right right) {
  const int lane = threadIdx.x % 32, g = lane / 4, k = lane % 4;
  for (int at = begin; at < begin + depth; at += 8) {
    uint32_t b[N][2];
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int z = 0; z < 2; ++z)
        b[n][z] = round_to_tf32(right(at + k + 4 * z, column + 8 * n + g));
#pragma unroll
    for (int m = 0; m < M; ++m) {
      uint32_t a[4];
#pragma unroll
      for (int z = 0; z < 4; ++z)
        a[z] = round_to_tf32(left(row + 16 * m + g + z % 2 * 8, at + k + z / 2 * 4));
#pragma unroll
      for (int n = 0; n < N; ++n) multiply_tile(sums[m][n], a, b[n]);
    }
  }
}

// Calls f(row, column, sum) for the sums of a lane.
template <int M, int N, typename F>
__device__ __forceinline__ void for_each_sum(float (&sums)[M][N][4], int row, int column, F f) {
  const int lane = threadIdx.x % 32, g = lane / 4, k = lane % 4;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int z = 0; z < 4; ++z)
        f(row + 16 * m + g + z / 2 * 8, column + 8 * n + 2 * k + z % 2, sums[m][n][z]);
}

// The sizes of a matrix, and how the threads of a block divide a chunk: each has a key, at half of
// the steps.
template <int KEYS, int COLUMNS>
struct Chunks {
  // Whole tiles.
  static constexpr int K = (KEYS + 15) / 16 * 16, V = (COLUMNS + 15) / 16 * 16;
  static constexpr int THREADS = K > 64 ? 256 : 128, WARPS = THREADS / 32;
  static_assert(K <= 128 && V <= 128);
  // Of matrices in shared memory, so that the lanes of a warp read different banks: those whose
  // rows are the rows of a left operand, or the columns of a right one; and those whose rows are
  // the depth.
  static constexpr int PITCH = K + 4, SQUARE = CHUNK + 4;
  // Tiles of columns, and of keys, that belong to a warp, and the pitch of columns.
  static constexpr int TILES = (V / 8 + WARPS - 1) / WARPS, KEY_TILES = (K / 8 + WARPS - 1) / WARPS;
  static constexpr int WIDE = WARPS * TILES * 8 + 8;

  int key, half, warp;
  int64_t begin, T;
  float q[HALF], k[HALF], d[HALF];

  __device__ Chunks(int64_t T) : T(T) {
    key = threadIdx.x % (THREADS / 2), half = threadIdx.x / (THREADS / 2), warp = threadIdx.x / 32;
  }

  __device__ __forceinline__ bool owns() const { return key < K; }
  __device__ __forceinline__ int row(int s) const { return half * HALF + s; }
  __device__ __forceinline__ int64_t step(int s) const { return begin + row(s); }

  // Reads a number of each step; `otherwise` behind the last one, and for keys that there are not.
  template <typename F>
  __device__ __forceinline__ void read(float (&to)[HALF], float otherwise, F from) const {
#pragma unroll
    for (int s = 0; s < HALF; ++s)
      to[s] = step(s) < T && key < KEYS ? from(step(s), key) : otherwise;
  }

  // The product of the decays of each half; ends with a barrier.
  __device__ __forceinline__ void multiply_halves(float (*halves)[K]) const {
    float product = 1;
#pragma unroll
    for (int s = 0; s < HALF; ++s) product *= d[s];
    if (owns()) halves[half][key] = product;
    __syncthreads();
  }
  // D_0i of the steps before those of the thread, and D_jC of its last one, C the end of the chunk.
  __device__ __forceinline__ float before(const float (*halves)[K]) const {
    return half && owns() ? halves[0][key] : 1;
  }
  __device__ __forceinline__ float after(const float (*halves)[K]) const {
    return half || !owns() ? 1 : halves[1][key];
  }

  // Calls f(s, D_mi) for steps i from `first` on, where `scale` is D_m,first-1.
  template <typename F>
  __device__ __forceinline__ void scale_forward(int first, int count, float scale, F f) const {
#pragma unroll
    for (int s = 0; s < HALF; ++s)
      if (s >= first && s < first + count) f(s, scale *= d[s]);
  }
  // Calls f(s, D_jm) for steps j down to `first`, where `scale` is D of the last one.
  template <typename F>
  __device__ __forceinline__ void scale_backward(int first, int count, float scale, F f) const {
#pragma unroll
    for (int s = HALF - 1; s >= 0; --s)
      if (s >= first && s < first + count) f(s, scale), scale *= d[s];
  }
  // Calls key(s, D_jm) and query(s, D_mi) for the steps of the thread, by their role at level N.
  template <int N, typename Key, typename Query>
  __device__ __forceinline__ void scale(Key of_key, Query of_query) const {
    if constexpr (N == HALF) {
      if (half)
        scale_forward(0, HALF, 1, of_query);
      else
        scale_backward(0, HALF, 1, of_key);
    } else {
#pragma unroll
      for (int block = 0; block < HALF; block += 2 * N) {
        scale_backward(block, N, 1, of_key);
        scale_forward(block + N, N, 1, of_query);
      }
    }
  }

  static __device__ __forceinline__ bool in_level(int n, int i, int j) { return (i ^ j) / n == 1; }

  // Computes the products of the pairs of a level, for i > j alone, of steps scaled in x.
  template <int N>
  __device__ __forceinline__ void multiply_level(float* products, const float* x) const {
    constexpr int TILES = N == 16 || N == 8 ? 4 : 8;
    for (int tile = warp; tile < TILES; tile += WARPS) {
      const int m = N == 32 ? 2 + tile / 4 : N == 16 ? 1 + tile / 2 * 2 : N == 8 ? tile : tile / 2;
      const int n = N == 32 ? tile % 4 : N == 16 ? (m - 1) * 2 + tile % 2 : N == 8 ? 2 * m : tile;
      float sums[1][1][4] = {};
      add_products(
          sums, 16 * m, 8 * n, 0, K, [=](int i, int c) { return x[i * PITCH + c]; },
          [=](int c, int j) { return x[j * PITCH + c]; });
      for_each_sum(sums, 16 * m, 8 * n, [=](int i, int j, float sum) {
        if (i > j && in_level(N, i, j)) products[i * SQUARE + j] = sum;
      });
    }
  }

  template <int N>
  __device__ __forceinline__ void multiply_levels(float* products, float* x) const {
    __syncthreads();
    put_level<N>(x);
    __syncthreads();
    multiply_level<N>(products, x);
    if constexpr (N > 1) multiply_levels<N / 2>(products, x);
  }

  // Computes Σ q_i D_ji k_j of all j <= i, and zeros above. Begins and ends with a barrier.
  __device__ __forceinline__ void multiply_pairs(float* products, float* x) const {
    for (int at = threadIdx.x; at < CHUNK * SQUARE; at += THREADS) products[at] = 0;
    put(x, [&](int s) { return q[s] * k[s]; });
    __syncthreads();
    sum_rows(x, [=](int i, float sum) { products[i * SQUARE + i] = sum; });
    multiply_levels<HALF>(products, x);
    __syncthreads();
  }

  template <int N>
  __device__ __forceinline__ void put_level(float* x) const {
    if (owns())
      scale<N>([&](int s, float scale) { x[row(s) * PITCH + key] = k[s] * scale; },
               [&](int s, float scale) { x[row(s) * PITCH + key] = q[s] * scale; });
  }
  template <typename F>
  __device__ __forceinline__ void put(float* x, F f) const {
    if (!owns()) return;
#pragma unroll
    for (int s = 0; s < HALF; ++s) x[row(s) * PITCH + key] = f(s);
  }
  // Calls f(i, the sum over keys) once for each row.
  template <typename F>
  __device__ __forceinline__ void sum_rows(const float* x, F f) const {
    for (int i = warp; i < CHUNK; i += WARPS) {
      float sum = 0;
      for (int c = threadIdx.x % 32; c < K; c += 32) sum += x[i * PITCH + c];
      sum = warp_reduce(sum, [](float a, float b) { return a + b; });
      if (threadIdx.x % 32 == 0) f(i, sum);
    }
  }

  // Copies columns of the steps of the chunk to shared memory, zeros where there are none.
  template <int WIDTH, typename F>
  __device__ __forceinline__ void copy_columns(float* to, int pitch, int first, F from) const {
    for (int at = threadIdx.x; at < CHUNK * WIDTH; at += THREADS) {
      const int i = at / WIDTH, c = at % WIDTH;
      const bool there = begin + i < T && first + c < COLUMNS;
      to[i * pitch + c] = there ? from(begin + i, first + c) : 0;
    }
  }
  template <typename F>
  __device__ __forceinline__ void copy_columns(float* to, F from) const {
    copy_columns<WIDE - 8>(to, WIDE, 0, from);
  }

  // Gradients of the functions above, of the products of decays. g(s) is the gradient of what f(s)
  // gets; `carry` is that of the product after the last call. They add to those of the decays, and
  // return that of `scale`. `kept` is the thread's own column of a matrix.
  template <typename G>
  __device__ __forceinline__ float differentiate_forward(int first, int count, float scale,
                                                         float carry, float* kept,
                                                         float (&d_decay)[HALF], G g) const {
    const float from = scale;
    scale_forward(first, count, scale, [&](int s, float scale) { kept[row(s) * PITCH] = scale; });
#pragma unroll
    for (int s = HALF - 1; s >= 0; --s) {
      if (s < first || s >= first + count) continue;
      carry += g(s);
      d_decay[s] += carry * (s > first ? kept[row(s - 1) * PITCH] : from);
      carry *= d[s];
    }
    return carry;
  }
  template <typename G>
  __device__ __forceinline__ float differentiate_backward(int first, int count, float scale,
                                                          float carry, float* kept,
                                                          float (&d_decay)[HALF], G g) const {
    scale_backward(first, count, scale, [&](int s, float scale) { kept[row(s) * PITCH] = scale; });
#pragma unroll
    for (int s = 0; s < HALF; ++s) {
      if (s < first || s >= first + count) continue;
      d_decay[s] += carry * kept[row(s) * PITCH];
      carry = carry * d[s] + g(s);
    }
    return carry;
  }
};

// Computes the state before each chunk and that after the last one; BACKWARD: the gradient of the
// state after each chunk, and of that before the first one. A block has SLAB columns of a head.
template <int KEYS, int COLUMNS, bool BACKWARD, typename Call>
__device__ __forceinline__ void pass_states(const Call& call, char* shared) {
  using C = Chunks<KEYS, COLUMNS>;
  constexpr int SLAB = C::V < 32 ? C::V : 32, SLABS = (C::V + SLAB - 1) / SLAB;
  constexpr int K = C::K, DEEP = K + 8, WIDTH = SLAB + 8;
  float* const x = reinterpret_cast<float*>(shared);
  float* const columns = x + CHUNK * DEEP;
  auto* const halves = reinterpret_cast<float (*)[K]>(columns + CHUNK * WIDTH);
  const int64_t b = blockIdx.x, chunks = (call.T + CHUNK - 1) / CHUNK;
  const int head = blockIdx.y / SLABS, first = blockIdx.y % SLABS * SLAB;
  const int64_t all = call.heads * KEYS * COLUMNS, matrix = b * all + head * Call::HEAD;
  C own(call.T);
  float states[1][SLAB / 8][4] = {};
  const int row = own.warp * 16;
  const auto copy = [&](float* to, const float* from) {
    for_each_sum(states, row, first, [&](int i, int c, float& state) {
      if (i >= KEYS || c >= COLUMNS) return;
      const int at = i * Call::KEY + c * Call::COLUMN;
      if (to) to[at] = state;
      if (from) state = from[at];
    });
  };
  copy(nullptr, call.first + matrix);
  const auto read = [&](int64_t n) {
    own.begin = (BACKWARD ? chunks - 1 - n : n) * CHUNK;
    own.read(own.d, 1,
             [&](int64_t t, int i) { return call.d.data ? call.d.at(t, b, head, i) : 1; });
    if constexpr (BACKWARD)
      own.read(own.q, 0, [&](int64_t t, int i) { return call.q.at(t, b, head, i); });
    else
      own.read(own.k, 0, [&](int64_t t, int i) { return call.k.at(t, b, head, i); });
  };
  if (chunks > 0) read(0);
  for (int64_t n = 0; n < chunks; ++n) {
    copy(call.states + own.begin / CHUNK * call.B * all + matrix, nullptr);
    own.multiply_halves(halves);
    const auto put = [&](int s, float number) {
      if (own.owns()) x[own.row(s) * DEEP + own.key] = number;
    };
    if constexpr (BACKWARD) {
      own.scale_forward(0, HALF, own.before(halves), [&](int s, float f) { put(s, own.q[s] * f); });
      own.template copy_columns<SLAB>(
          columns, WIDTH, first, [&](int64_t t, int c) { return call.d_output.at(t, b, head, c); });
    } else {
      own.scale_backward(0, HALF, own.after(halves), [&](int s, float f) { put(s, own.k[s] * f); });
      own.template copy_columns<SLAB>(columns, WIDTH, first,
                                      [&](int64_t t, int c) { return call.v.at(t, b, head, c); });
    }
    __syncthreads();
    if (n + 1 < chunks) read(n + 1);  // on its way during the products
    if (row < K) {
      for_each_sum(states, row, first,
                   [&](int i, int, float& state) { state *= halves[0][i] * halves[1][i]; });
      add_products(
          states, row, 0, 0, CHUNK, [=](int i, int t) { return x[t * DEEP + i]; },
          [=](int t, int c) { return columns[t * WIDTH + c]; });
    }
    __syncthreads();
  }
  copy(call.last + matrix, nullptr);
}

// Computes the outputs of a chunk.
template <int KEYS, int COLUMNS, typename Call>
__device__ __forceinline__ void compute_outputs(const Call& call, char* shared) {
  using C = Chunks<KEYS, COLUMNS>;
  constexpr int K = C::K, PITCH = C::PITCH, SQUARE = C::SQUARE, WIDE = C::WIDE;
  float* const x = reinterpret_cast<float*>(shared);
  float* const products = x + CHUNK * PITCH;
  float* const columns = products + CHUNK * SQUARE;
  auto* const halves = reinterpret_cast<float (*)[K]>(columns + CHUNK * WIDE);
  const int64_t chunks = (call.T + CHUNK - 1) / CHUNK, chunk = blockIdx.x % chunks;
  const int64_t b = blockIdx.x / chunks;
  const int head = blockIdx.y;
  const float* const state =
      call.states + (chunk * call.B + b) * call.heads * KEYS * COLUMNS + head * Call::HEAD;
  C own(call.T);
  own.begin = chunk * CHUNK;
  own.read(own.q, 0, [&](int64_t t, int i) { return call.q.at(t, b, head, i); });
  own.read(own.k, 0, [&](int64_t t, int i) { return call.k.at(t, b, head, i); });
  own.read(own.d, 1, [&](int64_t t, int i) { return call.d.data ? call.d.at(t, b, head, i) : 1; });
  own.copy_columns(columns, [&](int64_t t, int c) { return call.v.at(t, b, head, c); });
  own.multiply_halves(halves);
  own.multiply_pairs(products, x);
  if (own.owns())
    own.scale_forward(0, HALF, own.before(halves),
                      [&](int s, float f) { x[own.row(s) * PITCH + own.key] = own.q[s] * f; });
  __syncthreads();
  const int first = own.warp * C::TILES * 8;
  if (first >= C::V) return;
  float sums[4][C::TILES][4] = {};
  add_products(
      sums, 0, first, 0, K, [=](int i, int k) { return x[i * PITCH + k]; },
      [=](int k, int c) {
        return k < KEYS && c < COLUMNS ? state[k * Call::KEY + c * Call::COLUMN] : 0;
      });
  add_products(
      sums, 0, first, 0, CHUNK, [=](int i, int j) { return products[i * SQUARE + j]; },
      [=](int j, int c) { return columns[j * WIDE + c]; });
  for_each_sum(sums, 0, first, [&](int i, int c, float sum) {
    if (own.begin + i < call.T && c < COLUMNS) call.output.put(own.begin + i, b, head, c, sum);
  });
}

// The gradients of the steps of a thread.
template <int KEYS, int COLUMNS>
struct ChunkGradients : Chunks<KEYS, COLUMNS> {
  using C = Chunks<KEYS, COLUMNS>;
  using C::d, C::half, C::K, C::k, C::key, C::KEY_TILES, C::PITCH, C::q, C::SQUARE, C::warp;

  float *x, *d_x;  // scaled steps and their gradients
  float d_q[HALF] = {}, d_k[HALF] = {}, d_decay[HALF] = {};

  __device__ ChunkGradients(int64_t T, float* x, float* d_x) : C(T), x(x), d_x(d_x) {}

  __device__ __forceinline__ float given(int s) const { return d_x[C::row(s) * PITCH + key]; }

  // Adds the gradients of scaled queries, and of scaled keys, and returns that of `scale`.
  __device__ __forceinline__ float take_queries(int first, int count, float scale, float carry) {
    C::scale_forward(first, count, scale, [&](int s, float f) { d_q[s] += given(s) * f; });
    return C::differentiate_forward(first, count, scale, carry, x + key, d_decay,
                                    [&](int s) { return given(s) * q[s]; });
  }
  __device__ __forceinline__ float take_keys(int first, int count, float scale, float carry) {
    C::scale_backward(first, count, scale, [&](int s, float f) { d_k[s] += given(s) * f; });
    return C::differentiate_backward(first, count, scale, carry, x + key, d_decay,
                                     [&](int s) { return given(s) * k[s]; });
  }

  // Writes d_x of the warp's keys: its products of the rows of `left` and the columns of `right`.
  template <typename Left, typename Right>
  __device__ __forceinline__ void multiply(int depth, Left left, Right right) const {
    const int first = warp * KEY_TILES * 8;
    if (first >= K) return;
    float sums[4][KEY_TILES][4] = {};
    add_products(sums, 0, first, 0, depth, left, right);
    put(sums, first);
  }
  template <int M>
  __device__ __forceinline__ void put(float (&sums)[M][KEY_TILES][4], int first,
                                      int row = 0) const {
    for_each_sum(sums, row, first, [&](int i, int c, float sum) {
      if (c < K) d_x[i * PITCH + c] = sum;
    });
  }

  // Takes the gradients of the pairs of level N and those below.
  template <int N>
  __device__ __forceinline__ void take_levels(const float* d_products) {
    C::template put_level<N>(x);
    __syncthreads();
    const int first = warp * KEY_TILES * 8;
    if (first < K) {
#pragma unroll
      for (int m = 0; m < CHUNK / 16; ++m) {
        // The other steps of the blocks of these 16.
        constexpr int DEPTH = N == 32 ? 32 : 16;
        const int begin = N == 32 ? 32 - m / 2 * 32 : N == 16 ? (m ^ 1) * 16 : m * 16;
        float sums[1][KEY_TILES][4] = {};
        add_products(
            sums, 16 * m, first, begin, DEPTH,
            [=](int i, int j) {
              const float product = d_products[max(i, j) * SQUARE + min(i, j)];
              return C::in_level(N, i, j) ? product : 0;
            },
            [this](int j, int c) { return x[j * PITCH + c]; });
        put(sums, first, 16 * m);
      }
    }
    __syncthreads();
    if (C::owns()) {
      if constexpr (N == HALF) {
        if (half)
          take_queries(0, HALF, 1, 0);
        else
          take_keys(0, HALF, 1, 0);
      } else {
#pragma unroll
        for (int block = 0; block < HALF; block += 2 * N) {
          take_keys(block, N, 1, 0);
          take_queries(block + N, N, 1, 0);
        }
      }
    }
    if constexpr (N > 1) take_levels<N / 2>(d_products);
  }
};

// Computes the gradients of the steps of a chunk.
template <int KEYS, int COLUMNS, typename Call>
__device__ __forceinline__ void compute_gradients(const Call& call, char* shared) {
  using C = ChunkGradients<KEYS, COLUMNS>;
  constexpr int K = C::K, V = C::V, PITCH = C::PITCH, SQUARE = C::SQUARE, WIDE = C::WIDE;
  float* const x = reinterpret_cast<float*>(shared);
  float* const d_x = x + CHUNK * PITCH;
  float* const products = d_x + CHUNK * PITCH;
  float* const d_products = products + CHUNK * SQUARE;
  float* const columns = d_products + CHUNK * SQUARE;
  float* const d_columns = columns + CHUNK * WIDE;
  float* const carried = d_columns + CHUNK * WIDE;  // between the halves
  float* const d_total = carried + K;               // of the product of all decays
  auto* const halves = reinterpret_cast<float (*)[K]>(d_total + K);
  const int64_t chunks = (call.T + CHUNK - 1) / CHUNK, chunk = blockIdx.x % chunks;
  const int64_t b = blockIdx.x / chunks;
  const int head = blockIdx.y;
  const int64_t matrix = (chunk * call.B + b) * call.heads * KEYS * COLUMNS + head * Call::HEAD;
  const float *const state = call.states + matrix, *const d_state = call.d_states + matrix;
  C own(call.T, x, d_x);
  own.begin = chunk * CHUNK;
  own.read(own.q, 0, [&](int64_t t, int i) { return call.q.at(t, b, head, i); });
  own.read(own.k, 0, [&](int64_t t, int i) { return call.k.at(t, b, head, i); });
  own.read(own.d, 1, [&](int64_t t, int i) { return call.d.data ? call.d.at(t, b, head, i) : 1; });
  own.copy_columns(columns, [&](int64_t t, int c) { return call.v.at(t, b, head, c); });
  own.copy_columns(d_columns, [&](int64_t t, int c) { return call.d_output.at(t, b, head, c); });
  for (int i = own.warp; i < K; i += C::WARPS) {
    float sum = 0;
    for (int c = threadIdx.x % 32; i < KEYS && c < COLUMNS; c += 32)
      sum += state[i * Call::KEY + c * Call::COLUMN] * d_state[i * Call::KEY + c * Call::COLUMN];
    sum = warp_reduce(sum, [](float a, float b) { return a + b; });
    if (threadIdx.x % 32 == 0) d_total[i] = sum;
  }
  own.multiply_halves(halves);
  own.multiply_pairs(products, x);
  const float before = own.before(halves), after = own.after(halves);

  // Keys scaled to the end of the chunk, which the state takes, and the products of pairs.
  if (own.owns())
    own.scale_backward(0, HALF, after,
                       [&](int s, float f) { x[own.row(s) * PITCH + own.key] = own.k[s] * f; });
  {
    constexpr int OWN = CHUNK / 8 / C::WARPS;
    const int first = own.warp * OWN * 8;
    float sums[4][OWN][4] = {};
    add_products(
        sums, 0, first, 0, V, [=](int i, int c) { return d_columns[i * WIDE + c]; },
        [=](int c, int j) { return columns[j * WIDE + c]; });
    for_each_sum(sums, 0, first,
                 [=](int i, int j, float sum) { d_products[i * SQUARE + j] = sum; });
  }
  __syncthreads();
  if (const int first = own.warp * C::TILES * 8; first < V) {
    float sums[4][C::TILES][4] = {};
    add_products(
        sums, 0, first, 0, K, [=](int j, int k) { return x[j * PITCH + k]; },
        [=](int k, int c) {
          return k < KEYS && c < COLUMNS ? d_state[k * Call::KEY + c * Call::COLUMN] : 0;
        });
    add_products(
        sums, 0, first, 0, CHUNK, [=](int j, int i) { return products[i * SQUARE + j]; },
        [=](int i, int c) { return d_columns[i * WIDE + c]; });
    for_each_sum(sums, 0, first, [&](int j, int c, float sum) {
      if (own.begin + j < call.T && c < COLUMNS) call.d_v.put(own.begin + j, b, head, c, sum);
    });
  }
  own.multiply(
      V, [=](int j, int c) { return columns[j * WIDE + c]; },
      [=](int c, int k) {
        return k < KEYS && c < COLUMNS ? d_state[k * Call::KEY + c * Call::COLUMN] : 0;
      });
  __syncthreads();
  // The first half of the steps is scaled by the second one.
  if (own.owns() && !own.half) carried[own.key] = own.take_keys(0, HALF, after, 0);
  __syncthreads();
  if (own.owns() && own.half) own.take_keys(0, HALF, after, carried[own.key]);
  // The state is scaled by all decays: by those before a step, its own, and those after it, whose
  // product is still in x.
  if (own.owns()) {
    float others = before * d_total[own.key];
#pragma unroll
    for (int s = 0; s < HALF; ++s) {
      own.d_decay[s] += others * x[own.row(s) * PITCH + own.key];
      others *= own.d[s];
    }
  }
  __syncthreads();

  // Queries scaled from the beginning of the chunk, which read the state.
  own.multiply(
      V, [=](int i, int c) { return d_columns[i * WIDE + c]; },
      [=](int c, int k) {
        return k < KEYS && c < COLUMNS ? state[k * Call::KEY + c * Call::COLUMN] : 0;
      });
  __syncthreads();
  if (own.owns() && own.half) carried[own.key] = own.take_queries(0, HALF, before, 0);
  __syncthreads();
  if (own.owns() && !own.half) own.take_queries(0, HALF, before, carried[own.key]);

  own.template take_levels<HALF>(d_products);
#pragma unroll
  for (int s = 0; s < HALF; ++s) {  // the pairs of a step with itself
    const float product = d_products[own.row(s) * (SQUARE + 1)];
    own.d_q[s] += product * own.k[s], own.d_k[s] += product * own.q[s];
    if (own.key >= KEYS || own.step(s) >= call.T) continue;
    call.d_q.put(own.step(s), b, head, own.key, own.d_q[s]);
    call.d_k.put(own.step(s), b, head, own.key, own.d_k[s]);
    if constexpr (Call::DECAYS == 2) call.d_d.put(own.step(s), b, head, own.key, own.d_decay[s]);
  }
  if constexpr (Call::DECAYS == 1) {  // one of a head
    __syncthreads();
    own.Chunks<KEYS, COLUMNS>::put(x, [&](int s) { return own.d_decay[s]; });
    __syncthreads();
    own.sum_rows(x, [=](int i, float sum) {
      if (own.begin + i < call.T) call.d_d.put(own.begin + i, b, head, 0, sum);
    });
  }
}

}  // namespace hoconv::recurrent
