// The steps of a chunk, scaled by decays, and the products of its pairs of steps.
#pragma once

#include "recurrent/chunks/products.cuh"

namespace hoconv::recurrent {

// A thread's part of a chunk: EACH of the K keys of the block, at the steps of a segment. `first`
// is the block's first one of all KEYS.
template <int KEYS, int K, int EACH, int PADDING = PAD>
struct Segment {
  static constexpr int LANES = K / EACH > 32 ? 64 : 32;
  static constexpr int THREADS = SEGMENTS * LANES, WARPS = THREADS / 32;
  static constexpr int PITCH = K + PADDING;  // of scaled steps in shared memory
  using Numbers = float[STEPS][EACH];
  using Decays = float[SEGMENTS][K];  // the product of the decays of each segment

  int64_t T, begin;
  int first, key, segment, warp;
  Numbers d;

  __device__ Segment(int64_t T, int first) : T(T), first(first) {
    key = threadIdx.x % LANES * EACH, segment = threadIdx.x / LANES, warp = threadIdx.x / 32;
  }

  __device__ __forceinline__ bool owns() const { return key < K; }
  __device__ __forceinline__ int row(int s) const { return segment * STEPS + s; }

  // Numbers of each step and key, on their way until they are read.
  template <typename R>
  struct Loading {
    static constexpr int WIDTH = R::WIDTH % EACH == 0 ? EACH : 1;
    Word<typename R::Number, WIDTH> words[STEPS][EACH / WIDTH];
    int left;  // steps that there are

    __device__ __forceinline__ void load(const Segment& own, const R& rows, int64_t b, int64_t h) {
      const auto* from = rows.at(own.begin + own.row(0), b, h, own.first + own.key);
      left = rows.data && own.owns() ? min(own.T - own.begin, int64_t{CHUNK}) - own.row(0) : 0;
#pragma unroll
      for (int s = 0; s < STEPS; ++s, from += rows.step)
#pragma unroll
        for (int z = 0; z < EACH; z += WIDTH)
          if (s < left && own.first + own.key + z < KEYS)
            words[s][z / WIDTH] =
                *reinterpret_cast<const Word<typename R::Number, WIDTH>*>(from + z * R::DISTANCE);
    }
    // `otherwise` where there are none.
    __device__ __forceinline__ void get(const Segment& own, Numbers& to, float otherwise) const {
#pragma unroll
      for (int s = 0; s < STEPS; ++s)
#pragma unroll
        for (int z = 0; z < EACH; ++z)
          to[s][z] = s < left && own.first + own.key + z < KEYS ? words[s][z / WIDTH].at(z % WIDTH)
                                                                : otherwise;
    }
  };

  // Writes numbers of the steps that there are.
  template <typename R>
  __device__ __forceinline__ void write(const R& rows, const Numbers& from, int64_t b,
                                        int64_t h) const {
    auto* to = rows.at(begin + row(0), b, h, first + key);
    static_assert(EACH == 1, "a thread with several keys writes none of them");
    const bool there = owns() && first + key < KEYS;
    const int left = there ? min(T - begin, int64_t{CHUNK}) - row(0) : 0;
#pragma unroll
    for (int s = 0; s < STEPS; ++s, to += rows.step)
      if (s < left) rows.store(to, from[s]);
  }

  // Ends with a barrier.
  __device__ __forceinline__ void multiply_decays(Decays& all) const {
    float product[EACH];
#pragma unroll
    for (int z = 0; z < EACH; ++z) product[z] = 1;
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int z = 0; z < EACH; ++z) product[z] *= d[s][z];
    if (owns()) store(&all[segment][key], product);
    __syncthreads();
  }
  // The product of the decays of other segments.
  __device__ __forceinline__ void between(const Decays& all, int from, int to,
                                          float (&product)[EACH]) const {
#pragma unroll
    for (int z = 0; z < EACH; ++z) product[z] = 1;
    if (!owns()) return;
    for (int s = from; s < to; ++s)
#pragma unroll
      for (int z = 0; z < EACH; ++z) product[z] *= all[s][key + z];
  }

  // Calls f(s, D_mi) for steps i from `from` on, where `scale` is D of m and the step before;
  // BEFORE: f(s, D_m,i-1).
  template <bool BEFORE = false, typename F>
  __device__ __forceinline__ void scale_forward(int from, int count, float (&scale)[EACH],
                                                F f) const {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      if (s < from || s >= from + count) continue;
      if (BEFORE) f(s, scale);
#pragma unroll
      for (int z = 0; z < EACH; ++z) scale[z] *= d[s][z];
      if (!BEFORE) f(s, scale);
    }
  }
  // Calls f(s, D_jm) for steps j down to `from`, where `scale` is D of the last one and m.
  template <typename F>
  __device__ __forceinline__ void scale_backward(int from, int count, float (&scale)[EACH],
                                                 F f) const {
#pragma unroll
    for (int s = STEPS - 1; s >= 0; --s) {
      if (s < from || s >= from + count) continue;
      f(s, scale);
#pragma unroll
      for (int z = 0; z < EACH; ++z) scale[z] *= d[s][z];
    }
  }

  __device__ __forceinline__ void put(float* x, int s, const float (&numbers)[EACH]) const {
    store(x + row(s) * PITCH + key, numbers);
  }
  __device__ __forceinline__ void put_scaled(float* x, int s, const Numbers& of,
                                             const float (&scale)[EACH]) const {
    float numbers[EACH];
#pragma unroll
    for (int z = 0; z < EACH; ++z) numbers[z] = rounded(of[s][z] * scale[z]);
    put(x, s, numbers);
  }
  // Stores all steps, rounded.
  __device__ __forceinline__ void put_all(float* x, const Numbers& of) const {
    if (!owns()) return;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      float numbers[EACH];
#pragma unroll
      for (int z = 0; z < EACH; ++z) numbers[z] = rounded(of[s][z]);
      put(x, s, numbers);
    }
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
};

// A segment with what its keys read, and the products of pairs of steps.
template <int KEYS, int K, int EACH, int PADDING = PAD>
struct Pairs : Segment<KEYS, K, EACH, PADDING> {
  using Own = Segment<KEYS, K, EACH, PADDING>;
  using Own::owns, Own::PITCH, Own::row, Own::segment, Own::THREADS, Own::WARPS;
  using Square = Part<WARPS, 2, CHUNK, CHUNK>;
  typename Own::Numbers q, k;

  __device__ Pairs(int64_t T, int first) : Own(T, first) {}

  template <typename Call, typename R>
  __device__ __forceinline__ void load(const Call& call, const R& queries, const Place& place) {
    Own::begin = place.begin;
    typename Own::template Loading<decltype(call.d)> of_d;
    typename Own::template Loading<decltype(call.k)> of_k;
    typename Own::template Loading<R> of_q;
    of_d.load(*this, call.d, place.b, place.head);
    of_k.load(*this, call.k, place.b, place.head);
    of_q.load(*this, queries, place.b, place.head);
    of_d.get(*this, Own::d, 1), of_k.get(*this, k, 0), of_q.get(*this, q, 0);
  }
  template <typename R>
  __device__ __forceinline__ void load_queries(const R& rows, const Place& place) {
    typename Own::template Loading<R> of_q;
    of_q.load(*this, rows, place.b, place.head);
    of_q.get(*this, q, 0);
  }

  static __device__ __forceinline__ bool in_level(int n, int i, int j) { return (i ^ j) / n == 1; }

  // Returns the role of the segment's steps at a level of whole segments.
  template <int N>
  __device__ __forceinline__ bool is_query() const {
    return segment / (N / STEPS) % 2;
  }
  // The product of the decays of the segments between this one and the middle.
  template <int N>
  __device__ __forceinline__ void up_to_middle(const typename Own::Decays& decays,
                                               float (&scale)[EACH]) const {
    constexpr int HALF = N / STEPS;
    const int begin = segment / HALF * HALF;
    if (is_query<N>())
      Own::between(decays, begin, segment, scale);
    else
      Own::between(decays, segment + 1, begin + HALF, scale);
  }

  // Scales each step by its role at level N.
  template <int N, bool BEFORE>
  __device__ __forceinline__ void put_level(float* x, const typename Own::Decays& decays) const {
    if (!owns()) return;
    const auto put_key = [&](int s, const float (&f)[EACH]) { Own::put_scaled(x, s, k, f); };
    const auto put_query = [&](int s, const float (&f)[EACH]) { Own::put_scaled(x, s, q, f); };
    float scale[EACH];
    if constexpr (N >= STEPS) {
      up_to_middle<N>(decays, scale);
      if (is_query<N>())
        Own::template scale_forward<BEFORE>(0, STEPS, scale, put_query);
      else
        Own::scale_backward(0, STEPS, scale, put_key);
    } else {
#pragma unroll
      for (int block = 0; block < STEPS; block += 2 * N) {
        set_to_one(scale), Own::scale_backward(block, N, scale, put_key);
        set_to_one(scale), Own::template scale_forward<BEFORE>(block + N, N, scale, put_query);
      }
    }
  }
  static __device__ __forceinline__ void set_to_one(float (&scale)[EACH]) {
#pragma unroll
    for (int z = 0; z < EACH; ++z) scale[z] = 1;
  }

  // Computes the products of the pairs of a level, for i > j alone, of steps scaled in x.
  template <int N, bool TURNED>
  __device__ __forceinline__ void multiply_level(float* products, const float* x) const {
    const auto put = [=](int i, int j, const float (&pair)[2]) {
#pragma unroll
      for (int z = 0; z < 2; ++z)
        if (i > j + z && in_level(N, i, j + z))
          products[TURNED ? (j + z) * SQUARE + i : i * SQUARE + j + z] = rounded(pair[z]);
    };
    constexpr int TILES = N == 32 ? 8 : 4;
    for (int tile = Own::warp; tile < TILES; tile += WARPS) {
      if constexpr (N >= STEPS) {
        const int m = N == 32 ? 2 + tile / 4 : 1 + tile / 2 * 2;
        const int n = N == 32 ? tile % 4 : (m - 1) * 2 + tile % 2;
        float sums[1][1][4] = {};
        add_products(sums, 16 * m, 8 * n, 0, K, Along{x, PITCH}, Along{x, PITCH});
        for_each_pair(sums, 16 * m, 8 * n, put);
      } else {  // of 16 steps and themselves: a lane has the same numbers of both
        float sums[1][2][4] = {};
#pragma unroll 2
        for (int at = 0; at < K; at += 16) {
          uint32_t a[2][4];
          Along{x, PITCH}.left(a, 16 * tile, at);
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            multiply_tile(sums[0][0], a[k], {a[k][0], a[k][2]});
            if (N < 8) multiply_tile(sums[0][1], a[k], {a[k][1], a[k][3]});
          }
        }
        for_each_pair(sums, 16 * tile, 16 * tile, put);
      }
    }
  }

  template <int N, bool TURNED, bool BEFORE>
  __device__ __forceinline__ void multiply_levels(float* products, float* x,
                                                  const typename Own::Decays& decays) const {
    __syncthreads();
    put_level<N, BEFORE>(x, decays);
    __syncthreads();
    multiply_level<N, TURNED>(products, x);
    if constexpr (N > 1) multiply_levels<N / 2, TURNED, BEFORE>(products, x, decays);
  }

  // Computes Σ q_i D_ji k_j of all j <= i, in row i, or TURNED: in row j: a Triangle. BEFORE: of
  // all j < i with D_j,i-1. Ends with a barrier.
  template <bool TURNED, bool BEFORE>
  __device__ __forceinline__ void multiply_pairs(float* products, float* x,
                                                 const typename Own::Decays& decays) const {
    if (owns())
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        float own[EACH];
#pragma unroll
        for (int z = 0; z < EACH; ++z) own[z] = q[s][z] * k[s][z];
        Own::put(x, s, own);
      }
    __syncthreads();
    Own::sum_rows(x,
                  [=](int i, float sum) { products[i * SQUARE + i] = BEFORE ? 0 : rounded(sum); });
    multiply_levels<CHUNK / 2, TURNED, BEFORE>(products, x, decays);
    __syncthreads();
  }

  // The same where all keys have the same decays, of which D_ji is in row i of `products_of`; ends
  // without a barrier. `pairs` are the products q_i k_j.
  template <bool TURNED, bool BEFORE>
  __device__ __forceinline__ void multiply_pairs(Square& pairs, float* products, float* x,
                                                 float* keys, const float* products_of) const {
    Own::put_all(x, q), Own::put_all(keys, k);
    __syncthreads();
    pairs.add(K, Along{x, PITCH}, Along{keys, PITCH});
    __syncthreads();
    pairs.each_pair([=](int i, int j, const float (&pair)[2]) {
#pragma unroll
      for (int z = 0; z < 2; ++z) {
        if (i < j + z) continue;
        // Nobody reads D_jj: `products` may come in place of these, turned.
        const int from = (i - BEFORE) * SQUARE + j + z;
        const float product_of = i <= j + z + BEFORE ? 1 : products_of[from];
        products[TURNED ? (j + z) * SQUARE + i : i * SQUARE + j + z] =
            i == j + z && BEFORE ? 0 : rounded(pair[z] * product_of);
      }
    });
  }
  // Scales queries from the beginning of the chunk on.
  template <bool BEFORE>
  __device__ __forceinline__ void put_queries(float* x, const typename Own::Decays& decays) const {
    if (!owns()) return;
    float scale[EACH];
    Own::between(decays, 0, segment, scale);
    Own::template scale_forward<BEFORE>(
        0, STEPS, scale, [&](int s, const float (&f)[EACH]) { Own::put_scaled(x, s, q, f); });
  }
  // Scales keys to the end of the chunk.
  __device__ __forceinline__ void put_keys(float* x, const typename Own::Decays& decays) const {
    if (!owns()) return;
    float scale[EACH];
    Own::between(decays, segment + 1, SEGMENTS, scale);
    Own::scale_backward(0, STEPS, scale,
                        [&](int s, const float (&f)[EACH]) { Own::put_scaled(x, s, k, f); });
  }
  // Writes the decays of the steps, if all keys have the same.
  __device__ __forceinline__ void put_decays(float* decays) const {
    if (Own::key == 0)
#pragma unroll
      for (int s = 0; s < STEPS; ++s) decays[row(s)] = Own::d[s][0];
  }
};

}  // namespace hoconv::recurrent
