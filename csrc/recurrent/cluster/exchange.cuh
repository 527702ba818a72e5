// What blocks of a cluster give each other, and partners of a team: barriers that count bytes,
// mailboxes, and slices that are pushed, posted and relayed.
#pragma once

#include "recurrent/instructions.cuh"

namespace hoconv::recurrent {

template <typename A, int N>
struct alignas(sizeof(A) * N < 16 ? sizeof(A) * N : 16) Vector {
  A of[N];
};

// Counts the bytes that other blocks push. Rounds of exchanges take turns with two barriers, and
// each is ready to count two rounds ahead: others push for round x + 2 when they have got x + 1
// from this block, which sends that after it has waited for x.
struct Exchanges {
  uint64_t* barriers;  // two, in shared memory
  uint32_t count;

  __device__ __forceinline__ void start(uint64_t* memory, uint32_t first_bytes,
                                        uint32_t second_bytes) {
    barriers = memory;
    count = 0;
    if (threadIdx.x < 2) {
      init_barrier(shared_address(barriers + threadIdx.x));
      fence_barrier_init();
      expect_bytes(shared_address(barriers + threadIdx.x),
                   threadIdx.x ? second_bytes : first_bytes);
    }
  }
  __device__ __forceinline__ uint32_t barrier() const {
    return shared_address(barriers + count % 2);
  }
  // Waits for what others push in this round; the one after the next will be of `bytes`.
  __device__ __forceinline__ void wait(uint32_t bytes) {
    wait_for_phase(barrier(), count / 2 % 2);
    if (threadIdx.x == 0) expect_bytes(barrier(), bytes);
    ++count;
    __syncwarp();  // what follows is of whole warps
  }
};

// Mailboxes in global memory, which stays in the L2 cache. Exchanges have numbers from 1 on and
// take turns with two mailboxes: a block posts for exchange x + 2 when it has got x + 1 from its
// partner, which posts that after all of its threads have got x. A word has 8 bytes of data and,
// beside each half of them, the number of the exchange: a reader that finds both has the data, and
// waits for nothing else.
struct Mail {
  uint4 *incoming, *outgoing;  // two mailboxes of `words` words
  int words;
  uint32_t number;

  __device__ __forceinline__ void post(int at, uint64_t data) const {
    const uint32_t low = static_cast<uint32_t>(data), high = static_cast<uint32_t>(data >> 32);
    store_word(outgoing + box() + at, make_uint4(low, number, high, number));
  }
  // Reads words `first`, `first` + `step`, ... before `end`, whether or not they have come.
  template <int N>
  __device__ __forceinline__ void look(uint4 (&found)[N], int first, int step, int end) const {
#pragma unroll
    for (int n = 0; n < N; ++n)
      found[n] = first + n * step < end ? load_word(incoming + box() + first + n * step)
                                        : make_uint4(0, number, 0, number);
  }
  // Gets them; `found` is what a look has found. Reads of all are on their way at the same time.
  template <int N>
  __device__ __forceinline__ void receive(uint64_t (&data)[N], uint4 (&found)[N], int first,
                                          int step) const {
    for (bool all = false; !all;) {
      all = true;
#pragma unroll
      for (int n = 0; n < N; ++n) all &= has_come(found[n]);
#pragma unroll
      for (int n = 0; n < N; ++n)
        if (!has_come(found[n])) found[n] = load_word(incoming + box() + first + n * step);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) data[n] = found[n].x | uint64_t{found[n].z} << 32;
  }
  __device__ __forceinline__ bool has_come(const uint4& word) const {
    return word.y == number && word.w == number;
  }
  __device__ __forceinline__ int box() const { return number % 2 * words; }
};

// An array of vectors in rows: EACH columns of the first row, of the next, ..., then the next
// columns. So what a block has of it, some columns of all rows, lies together, and so do 16 bytes
// of 8 rows, which tensor cores read at once. Padding: without tensor cores, lanes read some
// columns of a row, from different banks; and whatever a block has is a multiple of 16 bytes.
template <typename T, int ROWS>
struct Panels {
  static constexpr int EACH = sizeof(T) == 2 ? 8 : 4;
  static constexpr int HEIGHT = sizeof(T) == 2 ? ROWS : sizeof(T) == 1 ? ROWS + ROWS % 2 : ROWS | 1;
  static __device__ __forceinline__ int at(int row, int column) {
    return (column / EACH * HEIGHT + row) * EACH + column % EACH;
  }
};

// BYTES bytes that blocks get from one, in words and vectors that threads share.
template <int THREADS, int BYTES>
struct Slice {
  static_assert(BYTES % 16 == 0);
  static constexpr int VECTORS = BYTES / 16, WORDS = BYTES / 8;
  struct Words {
    uint4 of[(WORDS + THREADS - 1) / THREADS];
  };
  // Groups of threads that have all vectors: each pushes to some of the blocks.
  static constexpr int GROUPS = VECTORS < THREADS ? THREADS / VECTORS : 1;

  static __device__ __forceinline__ int group() {
    return VECTORS < THREADS ? threadIdx.x / VECTORS : 0;
  }
  static __device__ __forceinline__ int first() {
    return VECTORS < THREADS ? threadIdx.x % VECTORS : threadIdx.x;
  }
  // Pushes a vector to the same place in COUNT of the C blocks, of which this one is the last.
  template <int C, int COUNT>
  static __device__ __forceinline__ void push_to(const Exchanges& exchanges, const uint4* vector,
                                                 const uint4& value) {
    const uint32_t place = shared_address(vector), barrier = exchanges.barrier();
    const int rank = cluster_rank();
#pragma unroll
    for (int other = 0; other < COUNT; other += GROUPS) {
      const int to = (rank + 1 + other + group()) % C;
      if (other + group() < COUNT) push<16>(address_in(place, to), address_in(barrier, to), &value);
    }
  }
};

// Pushes a slice to the same place in the C - 1 other blocks.
template <int C, int THREADS, int BYTES>
__device__ __forceinline__ void push_slice(const Exchanges& exchanges, const void* from) {
  using S = Slice<THREADS, BYTES>;
  if (S::group() >= S::GROUPS) return;
  const uint4* const vectors = static_cast<const uint4*>(from);
  for (int at = S::first(); at < S::VECTORS; at += THREADS)
    S::template push_to<C, C - 1>(exchanges, vectors + at, vectors[at]);
}

// Copies what threads have written to global memory to the same place in the blocks of `mask`. That
// is one copy from the L2 cache, where a block that pushes to each has 13 bytes a clock in all: 16
// blocks of an H200 get 22 KB in 1060 clocks so, and in 1770 by pushes; 3 KB in 860 and 770.
template <int BYTES>
__device__ __forceinline__ void copy_to_blocks(const Exchanges& exchanges, void* to,
                                               const void* from, uint32_t mask) {
  fence_async_proxy();
  __syncthreads();
  if (threadIdx.x == 0) copy_to<BYTES>(shared_address(to), exchanges.barrier(), from, mask);
}
template <int C>
constexpr uint32_t ALL_BLOCKS = (1u << C) - 1;

// As push_slice, for much data, by way of `room` in global memory.
template <int C, int THREADS, int BYTES>
__device__ __forceinline__ void spread_slice(const Exchanges& exchanges, void* slice, void* room) {
  for (int at = threadIdx.x; at < BYTES / 16; at += THREADS)
    static_cast<uint4*>(room)[at] = static_cast<const uint4*>(slice)[at];
  copy_to_blocks<BYTES>(exchanges, slice, room, ALL_BLOCKS<C> & ~(1u << cluster_rank()));
}

// Posts a slice to the partner, in words from `first_word` of the mailbox on.
template <int THREADS, int BYTES>
__device__ __forceinline__ void post_slice(const Mail& mail, int first_word, const void* from) {
  for (int at = threadIdx.x; at < BYTES / 8; at += THREADS)
    mail.post(first_word + at, static_cast<const uint64_t*>(from)[at]);
}

// Looks for such a slice. The answer takes long, and is needed when something else is done.
template <int THREADS, int BYTES>
__device__ __forceinline__ auto look_for(const Mail& mail, int first_word) {
  using S = Slice<THREADS, BYTES>;
  typename S::Words words;
  mail.look(words.of, first_word + threadIdx.x, THREADS, first_word + S::WORDS);
  return words;
}

// Gets such a slice; `found` is what a look has found of it.
template <int THREADS, int BYTES>
__device__ __forceinline__ void receive_slice(const Mail& mail, int first_word,
                                              typename Slice<THREADS, BYTES>::Words& found,
                                              void* to) {
  constexpr int N = sizeof(found.of) / sizeof(uint4);
  uint64_t words[N];
  mail.receive(words, found.of, first_word + threadIdx.x, THREADS);
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (const int at = threadIdx.x + n * THREADS; at < BYTES / 8)
      static_cast<uint64_t*>(to)[at] = words[n];
}

// Gets such a slice and pushes it to the same place in all C blocks.
template <int C, int THREADS, int BYTES>
__device__ __forceinline__ void relay_slice(const Mail& mail, int first_word,
                                            const Exchanges& exchanges, const void* to) {
  using S = Slice<THREADS, BYTES>;
  if (S::group() >= S::GROUPS) return;
  for (int at = S::first(); at < S::VECTORS; at += THREADS) {
    uint4 found[2];
    uint64_t words[2];
    mail.look(found, first_word + at * 2, 1, first_word + S::WORDS);
    mail.receive(words, found, first_word + at * 2, 1);
    const uint4 value = make_uint4(found[0].x, found[0].z, found[1].x, found[1].z);
    S::template push_to<C, C>(exchanges, static_cast<const uint4*>(to) + at, value);
  }
}

// The same for much data, by way of `room` in global memory.
template <int C, int THREADS, int BYTES>
__device__ __forceinline__ void spread_received(const Mail& mail, int first_word,
                                                typename Slice<THREADS, BYTES>::Words& found,
                                                const Exchanges& exchanges, void* to, void* room) {
  receive_slice<THREADS, BYTES>(mail, first_word, found, room);
  copy_to_blocks<BYTES>(exchanges, to, room, ALL_BLOCKS<C>);
}

// Adds up the SPLIT partial sums of a product, (SPLIT, ROWS, STRIDE), and pushes to each block its
// columns: block c gets COLUMNS from c COLUMNS on, at `to` in its memory, (C senders, ROWS,
// COLUMNS), rounded to type S.
template <int C, int THREADS, int ROWS, int COLUMNS, int STRIDE, int SPLIT, typename A, typename S>
__device__ __forceinline__ void push_sums(const Exchanges& exchanges, const A* from, S* to) {
  constexpr int EACH = 16 / sizeof(A), VECTORS = COLUMNS / EACH, ALL = ROWS * VECTORS;
  const int rank = cluster_rank();
  for (int i = threadIdx.x; i < ALL * C; i += THREADS) {
    const int c = i / ALL, row = i % ALL / VECTORS, column = i % VECTORS * EACH;
    Vector<A, EACH> sum = {};
#pragma unroll
    for (int split = 0; split < SPLIT; ++split) {
      const A* place = from + (split * ROWS + row) * STRIDE + c * COLUMNS + column;
      const auto v = *reinterpret_cast<const Vector<A, EACH>*>(place);
#pragma unroll
      for (int z = 0; z < EACH; ++z) sum.of[z] += v.of[z];
    }
    Vector<S, EACH> vector;
#pragma unroll
    for (int z = 0; z < EACH; ++z) vector.of[z] = S(sum.of[z]);
    const uint32_t place = shared_address(to + (rank * ROWS + row) * COLUMNS + column);
    push<EACH * sizeof(S)>(address_in(place, c), address_in(exchanges.barrier(), c), &vector);
  }
}

}  // namespace hoconv::recurrent
