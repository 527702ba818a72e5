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
//
// SHARED decays are those of a head, the same for all its keys. Then D_ji is a number, by which the
// product q_iᵀ k_j is multiplied: no levels.
#pragma once

#include "recurrent/instructions.cuh"

namespace hoconv::recurrent {

// A thread has some keys, at the steps of a segment.
constexpr int CHUNK = 64, SEGMENTS = 4, STEPS = CHUNK / SEGMENTS;
// By how many numbers rows in shared memory are longer than a matrix has columns, so that lanes of
// a warp read different banks: 8 rows of 4 numbers, or 4 rows of 8.
constexpr int PAD = 4, WIDE_PAD = 8;
constexpr int SQUARE = CHUNK + PAD;

__device__ constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }
// Of how many keys a block has where these are divided.
__device__ constexpr int count_own(int keys) { return keys > 16 ? 32 : 16; }
// The first power of two that is at least n.
__device__ constexpr int next_power(int n) { return n <= 1 ? 1 : 2 * next_power((n + 1) / 2); }

// N numbers as they lie in memory.
template <typename T, int N>
struct alignas(N * sizeof(T)) Word {
  static constexpr int EACH = sizeof(uint32_t) / sizeof(T);
  uint32_t words[N / EACH];

  __device__ __forceinline__ float at(int i) const {
    if constexpr (EACH == 1) {
      return as_float(words[i]);
    } else {
      T number;
      number.bits = static_cast<unsigned short>(words[i / 2] >> i % 2 * 16);
      return float(number);
    }
  }
  __device__ __forceinline__ void put(int i, float x) {
    if constexpr (EACH == 1)
      words[i] = as_bits(x);
    else
      words[i / 2] = (i % 2 ? words[i / 2] & 0xffff : 0) | uint32_t{T(x).bits} << i % 2 * 16;
  }
};
template <typename T>
struct Word<T, 1> {
  T number;
  __device__ __forceinline__ float at(int) const { return float(number); }
  __device__ __forceinline__ void put(int, float x) { number = T(x); }
};

// What each step, row of the batch and head reads or writes: features that lie APART apart. WORD of
// them, from a multiple of WORD on, are aligned.
template <typename T, int APART, int WORD>
struct Rows {
  using Number = T;
  static constexpr int WIDTH = WORD, DISTANCE = APART;
  T* data;
  int64_t step, row, head;

  __device__ __forceinline__ T* at(int64_t t, int64_t b, int64_t h, int i) const {
    return data + t * step + b * row + h * head + int64_t{i} * APART;
  }
  // Writes N neighbours, at once where they are aligned.
  template <int N>
  static __device__ __forceinline__ void store(T* to, const float (&from)[N]) {
    constexpr int EACH = WORD % N == 0 ? N : 1;
#pragma unroll
    for (int i = 0; i < N; i += EACH) {
      Word<T, EACH> word;
#pragma unroll
      for (int z = 0; z < EACH; ++z) word.put(z, from[i + z]);
      *reinterpret_cast<Word<T, EACH>*>(to + i * APART) = word;
    }
  }
};

__device__ __forceinline__ float rounded(float x) { return as_float(round_to_tf32(x)); }

// Reads or writes N numbers, a power of two, as few words.
template <int N>
__device__ __forceinline__ void load(float (&to)[N], const float* from) {
  constexpr int EACH = N < 4 ? N : 4;
#pragma unroll
  for (int i = 0; i < N; i += EACH) {
    const auto word = *reinterpret_cast<const Word<float, EACH>*>(from + i);
#pragma unroll
    for (int z = 0; z < EACH; ++z) to[i + z] = word.at(z);
  }
}
template <int N>
__device__ __forceinline__ void store(float* to, const float (&from)[N]) {
  constexpr int EACH = N < 4 ? N : 4;
#pragma unroll
  for (int i = 0; i < N; i += EACH) {
    Word<float, EACH> word;
#pragma unroll
    for (int z = 0; z < EACH; ++z) word.put(z, from[i + z]);
    *reinterpret_cast<Word<float, EACH>*>(to + i) = word;
  }
}

// Operands of products, in TF32: what a lane has of 16 rows of the left one, or of N tiles of 8
// columns of the right one, and of 16 of the depth from `at` on. Lane 4 g + k has rows g and g + 8,
// column 8 n + g of tile n, and numbers k, k + 4, k + 8 and k + 12 of the depth. Where the tiles
// are wide, column N g + n is in tile n, so that a lane reads and writes neighbours.
__device__ __forceinline__ int lane_row() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int lane_depth() { return threadIdx.x % 4; }

// A matrix in shared memory that has a row for each row, or column, of the product.
struct Along {
  const float* x;
  int pitch;
  __device__ __forceinline__ void left(uint32_t (&a)[2][4], int row, int at) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 2; ++k)
      load_tiles(a[k], x + (row + lane % 16) * pitch + at + 8 * k + lane / 16 * 4);
  }
  static __device__ __forceinline__ bool skips(int, int) { return false; }
  template <int N>
  __device__ __forceinline__ void right(uint32_t (&b)[N][4], int column, int at) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N; ++n)
      load_tiles(b[n], x + (column + 8 * n + lane % 8) * pitch + at + lane / 8 * 4);
  }
};
// Its triangle left of the diagonal, or UPPER: right of it, with the diagonal. What is elsewhere
// counts as zero.
template <bool UPPER>
struct Triangle : Along {
  static __device__ __forceinline__ bool skips(int row, int at) {
    return UPPER ? at < row : at > row;
  }
  __device__ __forceinline__ void left(uint32_t (&a)[2][4], int row, int at) const {
    Along::left(a, row, at);
    if (at != row) return;
#pragma unroll
    for (int z = 0; z < 8; ++z) {
      const int i = lane_row() + z % 2 * 8, j = lane_depth() + z / 2 * 4;
      if (UPPER ? j < i : j > i) a[z / 4][z % 4] = 0;
    }
  }
};
// One that has a row for each number of the depth.
struct Across {
  const float* x;
  int pitch;
  template <int N>
  __device__ __forceinline__ void right(uint32_t (&b)[N][4], int column, int at) const {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int z = 0; z < 4; ++z)
        b[n][z] = as_bits(x[(at + lane_depth() + 4 * z) * pitch + column + 8 * n + lane_row()]);
  }
};
// The same of wide tiles.
struct WideAcross {
  const float* x;
  int pitch;
  template <int N>
  __device__ __forceinline__ void right(uint32_t (&b)[N][4], int column, int at) const {
#pragma unroll
    for (int z = 0; z < 4; ++z) {
      float numbers[N];
      load(numbers, x + (at + lane_depth() + 4 * z) * pitch + column + N * lane_row());
#pragma unroll
      for (int n = 0; n < N; ++n) b[n][z] = as_bits(numbers[n]);
    }
  }
};
// The state of a head in global memory.
template <int KEYS, int COLUMNS, typename Call>
struct State {
  const float* x;
  int first = 0;  // key 0 of the block

  static constexpr bool ALL_KEYS = KEYS % CHUNK == 0, ALL_COLUMNS = COLUMNS % CHUNK == 0;
  // Returns whether N columns, from a multiple of N on, are aligned.
  static __device__ constexpr bool is_aligned(int n) {
    return Call::COLUMN == 1 && Call::KEY % n == 0 && Call::HEAD % n == 0 && COLUMNS % n == 0;
  }
  // Reads columns c to c + N - 1 of a key, zeros where there are none.
  template <int N>
  __device__ __forceinline__ void read(float (&to)[N], int key, int c) const {
    if constexpr (is_aligned(N)) {
#pragma unroll
      for (int n = 0; n < N; ++n) to[n] = 0;
      if ((ALL_KEYS || first + key < KEYS) && (ALL_COLUMNS || c < COLUMNS))
        load(to, x + (first + key) * Call::KEY + c);
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n)
        to[n] = first + key < KEYS && c + n < COLUMNS
                    ? x[(first + key) * Call::KEY + (c + n) * Call::COLUMN]
                    : 0;
    }
  }
  template <int N>
  static __device__ __forceinline__ void write(float* x, const float (&from)[N], int key, int c) {
    if constexpr (is_aligned(N)) {
      if ((ALL_KEYS || key < KEYS) && (ALL_COLUMNS || c < COLUMNS))
        store(x + key * Call::KEY + c, from);
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n)
        if (key < KEYS && c + n < COLUMNS) x[key * Call::KEY + (c + n) * Call::COLUMN] = from[n];
    }
  }
};
// One whose keys are the depth, of wide tiles.
template <int KEYS, int COLUMNS, typename Call>
struct DeepKeys : State<KEYS, COLUMNS, Call> {
  template <int N>
  __device__ __forceinline__ void right(uint32_t (&b)[N][4], int column, int at) const {
#pragma unroll
    for (int z = 0; z < 4; ++z) {
      float numbers[N];
      this->read(numbers, at + lane_depth() + 4 * z, column + N * lane_row());
#pragma unroll
      for (int n = 0; n < N; ++n) b[n][z] = round_to_tf32(numbers[n]);
    }
  }
};
// Adds products to M x N tiles of 16 x 8 sums.
template <int M, int N, typename Left, typename Right>
__device__ __forceinline__ void add_products(float (&sums)[M][N][4], int row, int column, int begin,
                                             int depth, Left left, Right right) {
#pragma unroll 4
  for (int at = begin; at < begin + depth; at += 16) {
    uint32_t b[N][4];
    right.right(b, column, at);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      if (left.skips(row + 16 * m, at)) continue;
      uint32_t a[2][4];
      left.left(a, row + 16 * m, at);
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int n = 0; n < N; ++n) multiply_tile(sums[m][n], a[k], {b[n][2 * k], b[n][2 * k + 1]});
    }
  }
}

// Calls f(row, column, numbers) for the sums of a lane in wide tiles: 2 N of neighbouring columns.
template <int M, int N, typename F>
__device__ __forceinline__ void for_each(float (&sums)[M][N][4], int row, int column, F f) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int y = 0; y < 2; ++y) {
      float numbers[2 * N];
#pragma unroll
      for (int n = 0; n < 2 * N; ++n) numbers[n] = sums[m][n % N][2 * y + n / N];
      f(row + 16 * m + 8 * y + lane_row(), column + 2 * N * lane_depth(), numbers);
#pragma unroll
      for (int n = 0; n < 2 * N; ++n) sums[m][n % N][2 * y + n / N] = numbers[n];
    }
}

// The same of other tiles: f gets pairs.
template <int M, int N, typename F>
__device__ __forceinline__ void for_each_pair(const float (&sums)[M][N][4], int row, int column,
                                              F f) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int y = 0; y < 2; ++y)
        f(row + 16 * m + 8 * y + lane_row(), column + 8 * n + 2 * lane_depth(),
          {sums[m][n][2 * y], sums[m][n][2 * y + 1]});
}

// The part of a warp in a product of some rows and N columns: M x TILES tiles. Rows are divided
// among GROUPS of the warps.
template <int WARPS, int GROUPS, int ROWS, int N>
struct Part {
  static constexpr int M = ROWS / 16 / GROUPS, ACROSS = WARPS / GROUPS;
  static constexpr int TILES = next_power((N / 8 + ACROSS - 1) / ACROSS), WIDTH = 2 * TILES;
  float sums[M][TILES][4] = {};
  int row, column;

  __device__ explicit Part(int warp)
      : row(warp / ACROSS * M * 16), column(warp % ACROSS * TILES * 8) {}
  // Some warps have none.
  __device__ __forceinline__ bool any() const { return column < N; }
  template <typename Left, typename Right>
  __device__ __forceinline__ void add(int depth, Left left, Right right) {
    add_products(sums, row, column, 0, depth, left, right);
  }
  template <typename F>
  __device__ __forceinline__ void each(F f) {
    for_each(sums, row, column, f);
  }
  template <typename F>
  __device__ __forceinline__ void each_pair(F f) const {
    for_each_pair(sums, row, column, f);
  }
  // Multiplies the sums one by one.
  __device__ __forceinline__ void multiply(const Part& by) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int z = 0; z < 4; ++z) sums[m][n][z] *= by.sums[m][n][z];
  }
};

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
    const int left = min(T - begin, int64_t{CHUNK}) - row(0);
    const int there = owns() ? min(EACH, KEYS - first - key) : 0;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      if (s < left) {
        if (there == EACH)
          rows.store(to, from[s]);
        else if (there > 0)
          *to = typename R::Number(from[s][0]);
      }
      to += rows.step;
    }
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

  // Calls f(s, D_mi) for steps i from `from` on, where `scale` is D of m and the step before.
  template <typename F>
  __device__ __forceinline__ void scale_forward(int from, int count, float (&scale)[EACH],
                                                F f) const {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      if (s < from || s >= from + count) continue;
#pragma unroll
      for (int z = 0; z < EACH; ++z) scale[z] *= d[s][z];
      f(s, scale);
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

// Columns of N steps on their way to shared memory; zeros where there are none.
template <typename R, int COLUMNS, int V, int THREADS, int N>
struct Coming {
  // Words of a row, each of a thread, and rows at once.
  static constexpr int WORDS = next_power(V / R::WIDTH), ROWS = THREADS / WORDS;
  static constexpr int COUNT = ROWS < N ? N / ROWS : 1;
  static_assert(ROWS > 0);
  using Own = Word<typename R::Number, R::WIDTH>;
  Own words[COUNT];

  static __device__ __forceinline__ int row() { return threadIdx.x / WORDS; }
  static __device__ __forceinline__ int column() { return threadIdx.x % WORDS * R::WIDTH; }

  __device__ __forceinline__ void load(const R& rows, int64_t begin, int64_t T, int64_t b,
                                       int64_t h, int first = 0) {
    const auto* from = rows.at(begin + row(), b, h, first + column());
    const int left = first + column() < COLUMNS ? min(T - begin, int64_t{N}) - row() : 0;
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      words[n] = {};
      if (n * ROWS < left) words[n] = *reinterpret_cast<const Own*>(from);
      from += ROWS * rows.step;
    }
  }
  __device__ __forceinline__ void store(float* to, int pitch) const {
    if (column() >= V) return;
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      float numbers[R::WIDTH];
#pragma unroll
      for (int z = 0; z < R::WIDTH; ++z) {
        numbers[z] = words[n].at(z);
        if (sizeof(typename R::Number) == 4) numbers[z] = rounded(numbers[z]);
      }
      if (row() < N) recurrent::store(to + (n * ROWS + row()) * pitch + column(), numbers);
    }
  }
};
// The chunk and head of a block, of a grid of (chunks of all rows of the batch, blocks of heads).
struct Place {
  int64_t chunk, b, begin;
  int head, block;  // of those of the head

  template <typename Call>
  __device__ __forceinline__ explicit Place(const Call& call, int blocks = 1) {
    const int64_t chunks = (call.T + CHUNK - 1) / CHUNK;
    chunk = blockIdx.x % chunks, b = blockIdx.x / chunks, begin = chunk * CHUNK;
    head = blockIdx.y / blocks, block = blockIdx.y % blocks;
  }
  template <typename Call>
  __device__ __forceinline__ int64_t index(const Call& call) const {
    return (chunk * call.B + b) * call.heads + head;
  }
  // Where the state before the chunk lies.
  template <int KEYS, int COLUMNS, typename Call>
  __device__ __forceinline__ int64_t state(const Call& call) const {
    return (chunk * call.B + b) * call.heads * KEYS * COLUMNS + head * Call::HEAD;
  }
};

// Shared memory of a kernel: floats one after another.
struct Memory {
  float* next;
  __device__ __forceinline__ float* take(int count) { return (next += count) - count; }
};

template <int COLUMNS, int V, int THREADS, typename R>
__device__ __forceinline__ void copy_columns(float* to, int pitch, const R& rows,
                                             const Place& place, int64_t T) {
  constexpr int HALF = CHUNK / 2;  // what there are registers for
#pragma unroll
  for (int i = 0; i < CHUNK; i += HALF) {
    Coming<R, COLUMNS, V, THREADS, HALF> coming;
    coming.load(rows, place.begin + i, T, place.b, place.head);
    coming.store(to + i * pitch, pitch);
  }
}

// Computes the state before each chunk and that after the last one; BACKWARD: the gradient of the
// state after each chunk, and of that before the first one. A block has some keys and columns of a
// head, few, for it takes the chunks one by one.
template <int KEYS, int COLUMNS, bool BACKWARD>
struct PassStates {
  static constexpr int K = count_own(KEYS), V = COLUMNS > 48 ? 64 : round_up(COLUMNS, 16);
  static constexpr int DOWN = (KEYS + K - 1) / K, BLOCKS = DOWN * ((COLUMNS + V - 1) / V);
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
        own.scale_forward(0, STEPS, scale, put);
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

// A segment with what its keys read, and the products of pairs of steps.
template <int KEYS, int K, int EACH, int PADDING = PAD>
struct Pairs : Segment<KEYS, K, EACH, PADDING> {
  using Own = Segment<KEYS, K, EACH, PADDING>;
  using Own::owns, Own::PITCH, Own::row, Own::segment, Own::THREADS, Own::WARPS;
  typename Own::Numbers q, k;

  __device__ Pairs(int64_t T, int first) : Own(T, first) {}

  template <typename Call>
  __device__ __forceinline__ void load(const Call& call, const Place& place) {
    Own::begin = place.begin;
    typename Own::template Loading<decltype(call.d)> of_d;
    typename Own::template Loading<decltype(call.k)> of_k;
    typename Own::template Loading<decltype(call.q)> of_q;
    of_d.load(*this, call.d, place.b, place.head);
    of_k.load(*this, call.k, place.b, place.head);
    of_q.load(*this, call.q, place.b, place.head);
    of_d.get(*this, Own::d, 1), of_k.get(*this, k, 0), of_q.get(*this, q, 0);
  }

  static __device__ __forceinline__ bool in_level(int n, int i, int j) { return (i ^ j) / n == 1; }

  // The segments of whose steps this one's are scaled by at a level of whole segments: its own, and
  // others up to the middle.
  template <int N>
  __device__ __forceinline__ bool is_query() const {
    return segment / (N / STEPS) % 2;
  }
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
  template <int N>
  __device__ __forceinline__ void put_level(float* x, const typename Own::Decays& decays) const {
    if (!owns()) return;
    const auto put_key = [&](int s, const float (&f)[EACH]) { Own::put_scaled(x, s, k, f); };
    const auto put_query = [&](int s, const float (&f)[EACH]) { Own::put_scaled(x, s, q, f); };
    float scale[EACH];
    if constexpr (N >= STEPS) {
      up_to_middle<N>(decays, scale);
      if (is_query<N>())
        Own::scale_forward(0, STEPS, scale, put_query);
      else
        Own::scale_backward(0, STEPS, scale, put_key);
    } else {
#pragma unroll
      for (int block = 0; block < STEPS; block += 2 * N) {
        set_to_one(scale), Own::scale_backward(block, N, scale, put_key);
        set_to_one(scale), Own::scale_forward(block + N, N, scale, put_query);
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

  template <int N, bool TURNED>
  __device__ __forceinline__ void multiply_levels(float* products, float* x,
                                                  const typename Own::Decays& decays) const {
    __syncthreads();
    put_level<N>(x, decays);
    __syncthreads();
    multiply_level<N, TURNED>(products, x);
    if constexpr (N > 1) multiply_levels<N / 2, TURNED>(products, x, decays);
  }

  // Computes Σ q_i D_ji k_j of all j <= i, in row i, or TURNED: in row j: a Triangle. Ends with a
  // barrier.
  template <bool TURNED>
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
    Own::sum_rows(x, [=](int i, float sum) { products[i * SQUARE + i] = rounded(sum); });
    multiply_levels<CHUNK / 2, TURNED>(products, x, decays);
    __syncthreads();
  }
};

template <int COLUMNS, typename R, typename P>
__device__ __forceinline__ void write_columns(const R& rows, P& part, const Place& place,
                                              int64_t T) {
  part.each([&](int i, int c, const float (&numbers)[P::WIDTH]) {
    if (place.begin + i >= T || c >= COLUMNS) return;
    auto* const to = rows.at(place.begin + i, place.b, place.head, c);
    if (c + P::WIDTH <= COLUMNS) {
      rows.store(to, numbers);
    } else {
#pragma unroll
      for (int n = 0; n < P::WIDTH; ++n)
        if (c + n < COLUMNS) rows.store(to + n * R::DISTANCE, {numbers[n]});
    }
  });
}

// Computes what the columns of a chunk get: the outputs; BACKWARD: the gradients of v, which are
// alike, with the roles of keys and queries exchanged,
//
//   S'ᵀ (D_jC k_j) + Σ_{i≥j} ((D_ji k_j)ᵀ q_i) o'_i,
//
// where C is the last step, and those of the products of pairs, o'_i v_j, in both orders of i and
// j.
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
          if (threadIdx.x % 32 == 0)
            rows.store(rows.at(own.begin + i, place.b, place.head, 0) + OTHERS * call.part, {sum});
        }
      }
    }
  }

 private:
  // Parts of the gradient of decays that other blocks write.
  static constexpr int OTHERS = (KEYS + count_own(KEYS) - 1) / count_own(KEYS);

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

// Computes the gradients of q, k and d of a chunk. A block has some keys of a head.
template <int KEYS, int COLUMNS, bool SHARED>
struct ComputeKeys : Pairs<KEYS, count_own(KEYS), 1, WIDE_PAD> {
  static constexpr int K = count_own(KEYS), SLABS = (KEYS + K - 1) / K;
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
  // product of those before. `carry` is the gradient of the product after the last one.
  __device__ __forceinline__ void take_queries(int from, int count, float scale, float carry) {
    float each[STEPS], product[1] = {scale};
    Own::scale_forward(from, count, product, [&](int s, const float (&f)[1]) { each[s] = f[0]; });
#pragma unroll
    for (int s = STEPS - 1; s >= 0; --s) {
      if (s < from || s >= from + count) continue;
      d_q[s][0] += given(s) * each[s];
      carry += given(s) * q[s][0];
      d_decay[s][0] += carry * (s > from ? each[s - 1] : scale);
      carry *= d[s][0];
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
  __device__ __forceinline__ void take_segments(bool queries, int first, int last, float carry) {
    float own = 0;
    if (owns()) {
      if (queries)
#pragma unroll
        for (int s = STEPS - 1; s >= 0; --s) own = (own + given(s) * q[s][0]) * d[s][0];
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
      take_queries(0, STEPS, scale[0], carry);
    } else {
      for (int s = first; s < segment; ++s) carry = carry * decays[s][key] + carries[s][key];
      Own::between(decays, segment + 1, last + 1, scale);
      take_keys(0, STEPS, scale[0], carry);
    }
  }

  // Takes the gradients of the pairs of level N and those below.
  template <int N>
  __device__ __forceinline__ void take_levels(const float* d_products) {
    Own::template put_level<N>(x, decays);
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
      take_segments(Own::template is_query<N>(), first, first + HALF - 1, 0);
    } else if (owns() && Own::begin < Own::T) {
      // The second condition always holds: ptxas moves no sums out of a branch, and so spills none.
#pragma unroll
      for (int block = 0; block < STEPS; block += 2 * N) {
        take_keys(block, N, 1, 0);
        take_queries(block + N, N, 1, 0);
      }
    }
    if constexpr (N > 1) take_levels<N / 2>(d_products);
  }

  // Takes the gradients of all pairs, whose products of decays are in those of the products.
  __device__ __forceinline__ void take_pairs(const float* d_products) {
    take_triangle<false>(d_products, k, d_q);
    take_triangle<true>(d_products, q, d_k);
  }
  template <bool UPPER>
  __device__ __forceinline__ void take_triangle(const float* d_products, const Numbers& of,
                                                Numbers& gradient) {
    Own::put_all(x, of);
    __syncthreads();
    Part<Own::WARPS, Own::WARPS, CHUNK, K> part(Own::warp);
    part.add(CHUNK, Triangle<UPPER>{{d_products, SQUARE}}, Across{x, PITCH});
    part.each_pair([&](int i, int c, const float (&pair)[2]) { store(d_x + i * PITCH + c, pair); });
    __syncthreads();
    if (!owns()) return;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) gradient[s][0] += given(s);
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

  template <typename Call>
  static __device__ __forceinline__ void run(const Call& call, char* shared) {
    Memory memory{reinterpret_cast<float*>(shared)};
    float* const columns = memory.take(FIRST);
    float *const x = columns, *const d_products = x + CHUNK * PITCH;
    float* const d_x = memory.take(CHUNK * PITCH);
    float* const own_state = memory.take(K * WIDE);
    float* const d_all = memory.take(K);  // of the product of all decays
    auto& decays = *reinterpret_cast<Decays*>(memory.take(SEGMENTS * K));
    auto& carries = *reinterpret_cast<Decays*>(memory.take(SEGMENTS * K));
    const Place place(call, SLABS);
    const int64_t matrix = place.template state<KEYS, COLUMNS>(call);
    const float *const state = call.states + matrix, *const d_state = call.d_states + matrix;
    ComputeKeys own(call.T, place.block * K, x, d_x, decays, carries);
    own.load(call, place);
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
    // Queries scaled from the beginning of the chunk, which read the state.
    own.multiply_state(call.d_output, before, columns, own_state, place);
    const float* const pairs = call.d_products + place.index(call) * CHUNK * CHUNK;
#pragma unroll
    for (int n = 0; n < CHUNK * CHUNK / 4 / THREADS; ++n) {
      const int at = (n * THREADS + threadIdx.x) * 4;
      float numbers[4];
      load(numbers, pairs + at), store(d_products + at / CHUNK * SQUARE + at % CHUNK, numbers);
    }
    own.take_segments(true, 0, SEGMENTS - 1, 0);

    if constexpr (SHARED) {
      __syncthreads();
      own.take_pairs(d_products);
    } else {
      own.template take_levels<CHUNK / 2>(d_products);
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {  // the pairs of a step with itself
        const float product = d_products[own.row(s) * (SQUARE + 1)];
        own.d_q[s][0] += product * own.k[s][0], own.d_k[s][0] += product * own.q[s][0];
      }
    }
    own.write(call.d_q, own.d_q, place.b, place.head);
    own.write(call.d_k, own.d_k, place.b, place.head);
    if constexpr (Call::DECAYS == 2) own.write(call.d_d, own.d_decay, place.b, place.head);
    if constexpr (Call::DECAYS == 1) {  // one of a head, of which each block has a part
      __syncthreads();
      if (own.owns())
#pragma unroll
        for (int s = 0; s < STEPS; ++s) own.Own::Own::put(x, s, own.d_decay[s]);
      __syncthreads();
      const auto rows = call.d_d;
      own.sum_rows(x, [=](int i, float sum) {
        if (own.begin + i < call.T)
          rows.store(rows.at(own.begin + i, place.b, place.head, 0) + place.block * call.part,
                     {sum});
      });
    }
  }
};

}  // namespace hoconv::recurrent
