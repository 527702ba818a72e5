// What the kernels of chunks read and write: rows of sequences, states of heads, and rows in shared
// memory.
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
// The keys of a block where these are divided among blocks, and how many blocks there are then.
__device__ constexpr int count_own(int keys) { return keys > 16 ? 32 : 16; }
__device__ constexpr int count_blocks(int keys) {
  return (keys + count_own(keys) - 1) / count_own(keys);
}
// The same where all keys of a head have the same decays.
__device__ constexpr int count_shared(int keys) { return keys > 32 ? 64 : keys > 16 ? 32 : 16; }
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

// Writes a word to global memory at once. (Of a struct the compiler may write each member.)
template <typename T, int N>
__device__ __forceinline__ void write_word(T* to, const Word<T, N>& word) {
  if constexpr (N * sizeof(T) == sizeof(uint4))
    store_global(to, uint4{word.words[0], word.words[1], word.words[2], word.words[3]});
  else if constexpr (N > 1 && N * sizeof(T) == sizeof(uint2))
    store_global(to, uint2{word.words[0], word.words[1]});
  else
    *reinterpret_cast<Word<T, N>*>(to) = word;
}

// Calls f(i, word) for words of EACH numbers, the first of which is number i.
template <typename T, int EACH, int N, typename F>
__device__ __forceinline__ void for_each_word(const float (&from)[N], F f) {
#pragma unroll
  for (int i = 0; i < N; i += EACH) {
    Word<T, EACH> word;
#pragma unroll
    for (int z = 0; z < EACH; ++z) word.put(z, from[i + z]);
    f(i, word);
  }
}

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
    constexpr int EACH = WORD % N == 0 ? N : N % WORD == 0 ? WORD : 1;
    for_each_word<T, EACH>(
        from, [to](int i, const Word<T, EACH>& word) { write_word(to + i * APART, word); });
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
  using Own = Word<float, EACH>;
  for_each_word<float, EACH>(
      from, [to](int i, const Own& word) { *reinterpret_cast<Own*>(to + i) = word; });
}

// The same to global memory.
template <int N>
__device__ __forceinline__ void write_numbers(float* to, const float (&from)[N]) {
  constexpr int EACH = N < 4 ? N : 4;
  using Own = Word<float, EACH>;
  for_each_word<float, EACH>(from, [to](int i, const Own& word) { write_word(to + i, word); });
}

template <int N>
__device__ __forceinline__ void store_rounded(float* to, const float (&from)[N]) {
  float numbers[N];
#pragma unroll
  for (int n = 0; n < N; ++n) numbers[n] = rounded(from[n]);
  store(to, numbers);
}

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
      if ((ALL_KEYS || first + key < KEYS) && c < COLUMNS)  // lanes may be more than columns
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
        write_numbers(x + key * Call::KEY + c, from);
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n)
        if (key < KEYS && c + n < COLUMNS) x[key * Call::KEY + (c + n) * Call::COLUMN] = from[n];
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
  // How many there are.
  template <typename Call>
  static __device__ __forceinline__ int64_t count(const Call& call) {
    return (call.T + CHUNK - 1) / CHUNK * call.B * call.heads;
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
    store(to, pitch, [](int) { return 1.0f; }, sizeof(typename R::Number) == 4);
  }
  // Stores rows times their factors. Numbers of half precision need not be rounded.
  template <typename F>
  __device__ __forceinline__ void store(float* to, int pitch, F factor, bool rounds = true) const {
    if (column() >= V || row() >= N) return;
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const float by = factor(n * ROWS + row());
      float numbers[R::WIDTH];
#pragma unroll
      for (int z = 0; z < R::WIDTH; ++z) {
        numbers[z] = words[n].at(z) * by;
        if (rounds) numbers[z] = rounded(numbers[z]);
      }
      float* const own = to + (n * ROWS + row()) * pitch + column();
      if constexpr (R::WIDTH == 8) {  // 8 lanes write 16 bytes each at once: to different banks
        const bool turned = column() / 32 % 2;
        float halves[2][4];
#pragma unroll
        for (int z = 0; z < 8; ++z) halves[z / 4][z % 4] = turned ? numbers[z ^ 4] : numbers[z];
        recurrent::store(own + 4 * turned, halves[0]);
        recurrent::store(own + 4 * !turned, halves[1]);
      } else {
        recurrent::store(own, numbers);
      }
    }
  }
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

// Writes columns of a chunk's steps; the part's first one is column `first`.
template <int COLUMNS, typename R, typename P>
__device__ __forceinline__ void write_columns(const R& rows, P& part, int64_t begin, int64_t T,
                                              int64_t b, int64_t h, int first = 0) {
  part.each([&](int i, int c, const float (&numbers)[P::WIDTH]) {
    const int column = first + c;
    if (begin + i >= T || column >= COLUMNS) return;
    auto* const to = rows.at(begin + i, b, h, column);
    if (column + P::WIDTH <= COLUMNS) {
      rows.store(to, numbers);
    } else {
#pragma unroll
      for (int n = 0; n < P::WIDTH; ++n)
        if (column + n < COLUMNS) rows.store(to + n * R::DISTANCE, {numbers[n]});
    }
  });
}

}  // namespace hoconv::recurrent
