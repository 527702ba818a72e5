// What generated kernels call that keep a layer's weights on the chip: the blocks of a cluster
// share some rows of the batch for all time steps, multiply by the slice of the weights that each
// holds in registers and shared memory, and push what others need into their shared memory. Two
// clusters may form a team, in which blocks of equal rank, partners, post to each other.
// For GPUs of compute capability 9.0 and later; compiled by NVRTC.
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
      show_barriers();
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
  show_copies();
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

// Rounds in which threads reduce all rows of all vectors: LANES lanes each.
template <int THREADS, int JOBS, int LANES>
constexpr int ROUNDS = (JOBS * LANES + THREADS - 1) / THREADS;

// Combines what LANES neighbouring lanes have, in a fixed order; each gets the result.
template <int LANES, typename A, typename F>
__device__ __forceinline__ A reduce_lanes(A value, F combine) {
#pragma unroll
  for (int lanes = LANES / 2; lanes > 0; lanes /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  return value;
}

// Reduces `columns` numbers, UNITS in most blocks, of each row of each vector, (N, ROWS, UNITS +
// LANES), and writes the result to (ROWS, STRIDE), that of vector n to column n.
template <int THREADS, int ROWS, int N, int LANES, int STRIDE, int UNITS, typename A, typename F>
__device__ __forceinline__ void reduce_rows(const A* from, int columns, A* to, A neutral,
                                            F combine) {
#pragma unroll
  for (int round = 0; round < ROUNDS<THREADS, N * ROWS, LANES>; ++round) {
    const int at = round * THREADS + threadIdx.x, job = min(at / LANES, N * ROWS - 1);
    A value = neutral;
#pragma unroll
    for (int first = 0; first < UNITS; first += LANES)
      if (const int column = first + at % LANES; column < columns)
        value = combine(value, from[job * (UNITS + LANES) + column]);
    value = reduce_lanes<LANES>(value, combine);
    if (at % LANES == 0 && at / LANES < N * ROWS) to[job % ROWS * STRIDE + job / ROWS] = value;
  }
}

// The same for the sum of the numbers, column 2 n, and for their spread, column 2 n + 1: the sum of
// the squares of what they deviate from their mean.
template <int THREADS, int ROWS, int N, int LANES, int STRIDE, int UNITS, typename A>
__device__ __forceinline__ void spread_rows(const A* from, int columns, A* to) {
  const auto add = [](A a, A b) { return a + b; };
#pragma unroll
  for (int round = 0; round < ROUNDS<THREADS, N * ROWS, LANES>; ++round) {
    const int at = round * THREADS + threadIdx.x, job = min(at / LANES, N * ROWS - 1);
    A sum = 0, spread = 0;
    A values[UNITS / LANES];
#pragma unroll
    for (int z = 0; z < UNITS / LANES; ++z) {
      const int column = z * LANES + at % LANES;
      values[z] = from[job * (UNITS + LANES) + column];
      if (column < columns) sum += values[z];
    }
    sum = reduce_lanes<LANES>(sum, add);
    const A mean = sum / A(max(columns, 1));
#pragma unroll
    for (int z = 0; z < UNITS / LANES; ++z) {
      const A deviation = values[z] - mean;
      if (z * LANES + at % LANES < columns) spread += deviation * deviation;
    }
    spread = reduce_lanes<LANES>(spread, add);
    if (at % LANES == 0 && at / LANES < N * ROWS) {
      A* const place = to + job % ROWS * STRIDE + job / ROWS * 2;
      place[0] = sum, place[1] = spread;
    }
  }
}

// Combines what the C blocks have reduced rows of N vectors to, (C, ROWS, STRIDE), and writes it to
// (ROWS, STRIDE).
template <int C, int THREADS, int ROWS, int N, int LANES, int STRIDE, typename A, typename F>
__device__ __forceinline__ void combine_rows(const A* from, A* to, A neutral, F combine) {
#pragma unroll
  for (int round = 0; round < ROUNDS<THREADS, N * ROWS, LANES>; ++round) {
    const int at = round * THREADS + threadIdx.x, job = min(at / LANES, N * ROWS - 1);
    const int place = job / N * STRIDE + job % N;
    A value = neutral;
    for (int k = at % LANES; k < C; k += LANES)
      value = combine(value, from[k * ROWS * STRIDE + place]);
    value = reduce_lanes<LANES>(value, combine);
    if (at % LANES == 0 && at / LANES < N * ROWS) to[place] = value;
  }
}

// The same of sums and spreads; a block has UNITS of SIZE features, the last ones fewer.
template <int C, int THREADS, int ROWS, int N, int LANES, int STRIDE, int UNITS, int SIZE,
          typename A>
__device__ __forceinline__ void combine_spreads(const A* from, A* to) {
  const auto add = [](A a, A b) { return a + b; };
#pragma unroll
  for (int round = 0; round < ROUNDS<THREADS, N * ROWS, LANES>; ++round) {
    const int at = round * THREADS + threadIdx.x, job = min(at / LANES, N * ROWS - 1);
    const int place = job / N * STRIDE + job % N * 2;
    A sum = 0, spread = 0;
    for (int k = at % LANES; k < C; k += LANES) sum += from[k * ROWS * STRIDE + place];
    sum = reduce_lanes<LANES>(sum, add);
    for (int k = at % LANES; k < C; k += LANES) {
      const A* own = from + k * ROWS * STRIDE + place;
      const int count = C * UNITS == SIZE ? UNITS : max(min(UNITS, SIZE - k * UNITS), 0);
      spread += combine_spread(own[1], own[0], count, sum, SIZE);
    }
    spread = reduce_lanes<LANES>(spread, add);
    if (at % LANES == 0 && at / LANES < N * ROWS) to[place] = sum, to[place + 1] = spread;
  }
}

// Loads what a lane holds of two rows of the weights, null past the last, and of 32 columns from k
// on and from k + `next` on: each time takes as long as memory does. It is no part of its caller,
// which would be many times as long and take as long to compile.
template <typename T, typename K>
__device__ __noinline__ Vector<uint32_t, 16> load_slices(const T* upper, const T* lower,
                                                         int64_t column_stride, K column, int k,
                                                         int next) {
  Vector<uint32_t, 16> bits;
#pragma unroll
  for (int z = 0; z < 16; ++z) {
    const int at = k + z / 8 * next + z % 8 / 2 * 8, first = column(at), second = column(at + 1);
    const T* from = z % 2 ? lower : upper;
    const uint32_t low = from && first >= 0 ? from[first * column_stride].bits : 0;
    const uint32_t high = from && second >= 0 ? from[second * column_stride].bits : 0;
    bits.of[z] = low | high << 16;
  }
  return bits;
}

// Slices of the weights that are on their way from the L2 cache.
constexpr int AHEAD = 4;
__device__ constexpr int clamp(int n, int least, int most) {
  return n < least ? least : n > most ? most : n;
}
// Unrolled copies of a loop's body: all, or as many whole rounds of AHEAD as keep the code short.
__device__ constexpr int count_copies(int turns) {
  return turns > 4 * AHEAD ? 2 * AHEAD : turns > 0 ? turns : 1;
}

// A product by this block's slice of the weights, (M, K): y (SPLIT, ROWS, stride) is W x^T in
// SPLIT sums over parts of K, for x in panels. Each warp holds tiles of 16 rows and a part of
// K as operands of the tensor cores: HELD slices of 32 columns in registers, KEPT in shared memory,
// at `rest`, and the others in global memory, at `far`, where they stay in the L2 cache: a thread
// reads there what it has written itself. M is a multiple of 16, K of 32 SPLIT; SPLIT divides the
// warps. Parts take turns with the slices, so that a product of some slices keeps all warps busy. A
// warp reads a part of x once for all of its tiles: reading x takes as long as multiplying where
// each warp has one tile of all of K.
template <typename T, int M, int K, int ROWS, int THREADS, int SPLIT, int HELD, int KEPT>
struct Product {
  static constexpr int WARPS = THREADS / 32 / SPLIT, TILES = M / 16;  // of a part of K
  static constexpr int EACH = (TILES + WARPS - 1) / WARPS, SLICES = K / 32 / SPLIT;
  static constexpr int FAR = SLICES - HELD - KEPT;
  static constexpr int COLUMN_TILES = (ROWS + 7) / 8, SUMS = EACH * COLUMN_TILES;
  // Whether four warps multiply together: they read x once, and weights from shared memory without
  // registers. With eight warps and 24 rows, 64 such products take 2440 clocks of an H200, of which
  // 36 read weights from shared memory, and 4520 if each warp multiplies by itself, since it reads
  // all of x. For 8 rows they take nearly as long as for 24: then warps by themselves are faster.
  static constexpr bool TOGETHER = HAS_WARPGROUPS && COLUMN_TILES == 3 && WARPS % 4 == 0;
  // Sums that do not wait in turn.
  static constexpr int CHAINS = TOGETHER || SUMS >= 4 ? 1 : SUMS < 2 ? 4 : 2;
  uint32_t held[EACH][HELD > 0 ? HELD : 1][2][4];

  // What a lane sums up: of each tile, in several chains.
  struct Sums {
    float of[EACH][COLUMN_TILES][CHAINS][4];

    __device__ __forceinline__ float total(int e, int n, int z) const {
      float sum = of[e][n][0][z];
#pragma unroll
      for (int chain = 1; chain < CHAINS; ++chain) sum += of[e][n][chain][z];
      return sum;
    }
  };

  static __device__ __forceinline__ int tile(int e) { return threadIdx.x / 32 % WARPS + e * WARPS; }
  static __device__ __forceinline__ int split() { return threadIdx.x / 32 / WARPS; }

  // row(m) and column(k) are where an element of the slice is in the weights, or -1.
  template <typename R, typename K_>
  __device__ __forceinline__ void load(const T* weights, int64_t row_stride, int64_t column_stride,
                                       R row, K_ column, uint4* rest, uint4* far) {
    constexpr int NEXT = SPLIT * 32;  // from a slice to the next
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int m = tile(e) * 16 + lane / 4;
      const int first = m < M ? row(m) : -1, second = m < M ? row(m + 8) : -1;
      const T* const upper = first < 0 ? nullptr : weights + first * row_stride;
      const T* const lower = second < 0 ? nullptr : weights + second * row_stride;
      const int k = split() * 32 + lane % 4 * 2;
#pragma unroll
      for (int s = 0; s < HELD; s += 2) {
        const auto bits = load_slices(upper, lower, column_stride, column, k + s * NEXT, NEXT);
#pragma unroll
        for (int z = 0; z < 16 && s + z / 8 < HELD; ++z)
          held[e][s + z / 8][z % 8 / 4][z % 4] = bits.of[z];
      }
#pragma unroll 1
      for (int s = HELD; s < SLICES; s += 2) {
        const auto bits = load_slices(upper, lower, column_stride, column, k + s * NEXT, NEXT);
        put(rest, far, e, s, bits.of);
        if (s + 1 < SLICES) put(rest, far, e, s + 1, bits.of + 8);
      }
    }
  }
  // Puts what a lane has of a slice where it reads it at every step.
  static __device__ __forceinline__ void put(uint4* rest, uint4* far, int e, int s,
                                             const uint32_t* bits) {
    if (TOGETHER && s < HELD + KEPT) {
      keep(rest, e, s, bits);
      return;
    }
    uint4* const place =
        s < HELD + KEPT ? rest + at<KEPT>(e, s - HELD) : far + at<FAR>(e, s - HELD - KEPT);
    place[0] = make_uint4(bits[0], bits[1], bits[2], bits[3]);
    place[32] = make_uint4(bits[4], bits[5], bits[6], bits[7]);
  }

  template <int Y_STRIDE>
  __device__ __forceinline__ void multiply(const T* x, float* y, const uint4* rest,
                                           const uint4* far) const {
    Sums sums = {};
    add<0, SLICES>(sums, x, rest, far);
    write<Y_STRIDE>(sums, y);
  }

  // Adds the products of slices BEGIN to END, for x from the first column of these on.
  template <int BEGIN, int END>
  __device__ __forceinline__ void add(Sums& sums, const T* x, const uint4* rest,
                                      const uint4* far) const {
    constexpr int FIRST_KEPT = clamp(HELD, BEGIN, END), FIRST_FAR = clamp(HELD + KEPT, BEGIN, END);
    constexpr int FIRST = (FIRST_FAR - HELD - KEPT) * EACH, LAST = (END - HELD - KEPT) * EACH;
    const int lane = threadIdx.x % 32;
    if ((TOGETHER ? tile(0) / 4 * 4 : tile(0)) >= TILES) return;
    uint4 coming[AHEAD][2];
#pragma unroll
    for (int f = FIRST; f < FIRST + AHEAD && f < LAST; ++f)
      read(coming[f % AHEAD], far + at<FAR>(f % EACH, f / EACH));
    uint32_t b[COLUMN_TILES][4];
    const auto take = [&](int s) {
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; ++n) {
        const int row = n * 8 + lane % 8;  // past the last row: any, its sums are not stored
        const int column = ((s - BEGIN) * SPLIT + split()) * 32 + lane / 8 * 8;
        load_tiles(b[n], x + Panels<T, ROWS>::at(row < ROWS ? row : ROWS - 1, column));
      }
    };
    // `e` and `chain` are constants wherever loops are unrolled: sums stay in registers.
    const auto turn = [&](const uint32_t (&a)[2][4], int e, int chain) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; ++n)
          multiply_tile(sums.of[e][n][(chain * 2 + half) % CHAINS], a[half], b[n][half * 2],
                        b[n][half * 2 + 1], T());
    };
    const auto turn_of = [&](const uint4(&v)[2], int e, int chain) {
      const uint32_t a[2][4] = {{v[0].x, v[0].y, v[0].z, v[0].w}, {v[1].x, v[1].y, v[1].z, v[1].w}};
      turn(a, e, chain);
    };
    if constexpr (TOGETHER) {
      add_together<BEGIN, FIRST_FAR>(sums, x, rest);
      end_products<T, 0>();
    }
#pragma unroll
    for (int s = BEGIN; s < FIRST_KEPT && !TOGETHER; ++s) {
      take(s);
#pragma unroll
      for (int e = 0; e < EACH; ++e) turn(held[e][s], e, s);
    }
#pragma unroll(count_copies(FIRST_FAR - FIRST_KEPT))
    for (int s = FIRST_KEPT; s < FIRST_FAR && !TOGETHER; ++s) {
      take(s);
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const uint4* place = rest + at<KEPT>(e, s - HELD);
        const uint4 v[2] = {place[0], place[32]};
        turn_of(v, e, s);
      }
    }
#pragma unroll(count_copies(END - FIRST_FAR))
    for (int s = FIRST_FAR; s < END; ++s) {
      take(s);
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const int f = (s - HELD - KEPT) * EACH + e, next = f + AHEAD;
        const uint4 v[2] = {coming[f % AHEAD][0], coming[f % AHEAD][1]};
        if (next < LAST) read(coming[f % AHEAD], far + at<FAR>(next % EACH, next / EACH));
        turn_of(v, e, s);
      }
    }
  }

  // Begins to add the products of slices BEGIN to END that four warps multiply together: a group
  // for each tile.
  template <int BEGIN, int END>
  __device__ __forceinline__ void add_together(Sums& sums, const T* x, const uint4* rest) const {
    constexpr int NEXT = Panels<T, ROWS>::HEIGHT;  // vectors of 8 columns
    const uint32_t b = describe_tiles(x + split() * NEXT * 32, NEXT * 16);
    const uint32_t a = describe_tiles(rest + kept(0, HELD), 1024);
    begin_products<T>();
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
#pragma unroll
      for (int s = BEGIN; s < END; ++s)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t columns = b + ((s - BEGIN) * SPLIT * 4 + half * 2) * NEXT;
          if (s < HELD)
            multiply_tiles<T>(sums.of[e], held[e][s < HELD ? s : 0][half], columns);
          else
            multiply_tiles<T>(sums.of[e], a + (e * KEPT + s - HELD) * 256 + half * 128, columns);
        }
      group_products<T>();
    }
  }

  // Where what four warps keep of a slice is: tiles of 8 rows of 16 bytes, by columns, then rows.
  static __device__ __forceinline__ int kept(int e, int s) {
    return ((threadIdx.x / 128 * EACH + e) * KEPT + s - HELD) * 256;
  }
  static __device__ __forceinline__ void keep(uint4* rest, int e, int s, const uint32_t* bits) {
    uint32_t* const place = reinterpret_cast<uint32_t*>(rest + kept(e, s)) + threadIdx.x % 32;
#pragma unroll
    for (int z = 0; z < 8; ++z)
      place[(z / 2 * 8 + threadIdx.x / 32 % 4 * 2 + z % 2) * 32] = bits[z];
  }

  template <int Y_STRIDE>
  static __device__ __forceinline__ void write(const Sums& sums, float* y) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
        for (int z = 0; z < 4; ++z) {
          const int row = n * 8 + lane % 4 * 2 + z % 2;
          if (row < ROWS && tile(e) < TILES)
            y[(split() * ROWS + row) * Y_STRIDE + tile(e) * 16 + lane / 4 + z / 2 * 8] =
                sums.total(e, n, z);
        }
  }

  // Adds the products of the last slices, from BEGIN on, and pushes the sums to the blocks whose
  // columns they are, as push_sums does, where SPLIT is 1: M is C times COLUMNS, and the numbers
  // are rounded to type S. Four warps push the sums of a tile while they multiply the next ones.
  // `stage` has room for a tile of each warp, if S has 16 bits.
  template <int BEGIN, int C, int COLUMNS, typename S>
  __device__ __forceinline__ void add_and_push(Sums& sums, const T* x, const uint4* rest,
                                               const uint4* far, const Exchanges& exchanges, S* to,
                                               uint4* stage) const {
    static_assert(SPLIT == 1);
    if constexpr (TOGETHER && FAR == 0) {
      add_together<BEGIN, SLICES>(sums, x, rest);
      push_in_turn<0, C, COLUMNS>(exchanges, sums, to, stage);
    } else {
      add<BEGIN, SLICES>(sums, x, rest, far);
#pragma unroll
      for (int e = 0; e < EACH; ++e) push_tile<C, COLUMNS>(exchanges, sums, e, to, stage);
    }
  }
  template <int E, int C, int COLUMNS, typename S>
  static __device__ __forceinline__ void push_in_turn(const Exchanges& exchanges, const Sums& sums,
                                                      S* to, uint4* stage) {
    end_products<T, EACH - 1 - E>();
    push_tile<C, COLUMNS>(exchanges, sums, E, to, stage);
    if constexpr (E + 1 < EACH) push_in_turn<E + 1, C, COLUMNS>(exchanges, sums, to, stage);
  }
  // Pushes what a warp has summed up of a tile, in vectors of 16 bytes.
  template <int C, int COLUMNS, typename S>
  static __device__ __forceinline__ void push_tile(const Exchanges& exchanges, const Sums& sums,
                                                   int e, S* to, uint4* stage) {
    const int lane = threadIdx.x % 32, rank = cluster_rank();
    const uint32_t barrier = exchanges.barrier();
    const auto push_vector = [&](int row, int m, const void* vector) {
      const uint32_t place = shared_address(to + (rank * ROWS + row) * COLUMNS + m % COLUMNS);
      if (row < ROWS && m < M)
        push<16>(address_in(place, m / COLUMNS), address_in(barrier, m / COLUMNS), vector);
    };
    if constexpr (sizeof(S) == 2) {
      uint4* const own = stage + threadIdx.x / 32 * COLUMN_TILES * 16;
      __syncwarp();  // until the last tile is read
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; ++n) {
        uint32_t pairs[2];
#pragma unroll
        for (int z = 0; z < 2; ++z)
          pairs[z] = S(sums.total(e, n, z * 2)).bits | uint32_t{S(sums.total(e, n, z * 2 + 1)).bits}
                                                           << 16;
        store_turned(own + n * 16 + lane % 16, pairs);
      }
      __syncwarp();
#pragma unroll
      for (int at = lane; at < COLUMN_TILES * 16; at += 32)
        push_vector(at / 16 * 8 + at % 8, tile(e) * 16 + at / 8 % 2 * 8, own + at);
    } else {
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; ++n) {
        Vector<S, 4> vector;
#pragma unroll
        for (int z = 0; z < 4; ++z) vector.of[z] = sums.total(e, n, z);
        // Lane l has rows 2 (l % 4) and the next of columns l / 4 and l / 4 + 8; it gets four
        // columns of one row.
        transpose<1>(vector.of);
        transpose<2>(vector.of);
        const int which = lane / 4 % 4;  // of the four numbers that a lane had
        push_vector(n * 8 + lane % 4 * 2 + which % 2, tile(e) * 16 + which / 2 * 8 + lane / 16 * 4,
                    &vector);
      }
    }
  }

  // One of two steps in which four lanes, 4 apart, transpose four numbers of each.
  template <int BIT>
  static __device__ __forceinline__ void transpose(float (&of)[4]) {
    const bool upper = threadIdx.x / 4 % 4 & BIT;
#pragma unroll
    for (int z = 0; z < 4; ++z)
      if ((z & BIT) == 0) {
        const float got = __shfl_xor_sync(0xffffffffu, upper ? of[z] : of[z + BIT], 4 * BIT);
        of[z] = upper ? got : of[z];
        of[z + BIT] = upper ? of[z + BIT] : got;
      }
  }

  // Where a lane's part of a slice is, of COUNT slices of each job.
  template <int COUNT>
  static __device__ __forceinline__ int at(int e, int s) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return ((warp * EACH + e) * COUNT + s) * 64 + lane;
  }
  static __device__ __forceinline__ void read(uint4 (&to)[2], const uint4* from) {
    to[0] = __ldcg(from), to[1] = __ldcg(from + 32);
  }
};

// Loads four columns from k on of a row of the weights; as load_slices, no part of its caller.
template <typename A, typename K>
__device__ __noinline__ Vector<A, 4> load_four(const A* row, int64_t column_stride, K column,
                                               int k) {
  Vector<A, 4> four;
#pragma unroll
  for (int z = 0; z < 4; ++z) {
    const int at = column(k + z);
    four.of[z] = row && at >= 0 ? row[at * column_stride] : A(0);
  }
  return four;
}

// Adds up sums over SPLIT neighbouring lanes, each of which keeps its share of the totals: those
// from a lane's first on, which this returns, that many less a SPLITth.
template <int SPLIT, int COUNT, typename A>
__device__ __forceinline__ int add_shares(A (&sums)[COUNT]) {
  static_assert(COUNT % SPLIT == 0);
  int first = 0;
  if constexpr (SPLIT > 1) {
    constexpr int HALF = COUNT / 2;
    const bool upper = threadIdx.x & SPLIT / 2;
    A kept[HALF];
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const A given = upper ? sums[i] : sums[i + HALF];
      kept[i] = (upper ? sums[i + HALF] : sums[i]) + __shfl_xor_sync(~0u, given, SPLIT / 2);
    }
    first = upper * HALF + add_shares<SPLIT / 2>(kept);
#pragma unroll
    for (int i = 0; i < COUNT / SPLIT; ++i) sums[i] = kept[i];
  }
  return first;
}

// The same without tensor cores, in float32 or float64: SPLIT lanes share EACH rows of the weights
// and add up at the end, so that y is (ROWS, stride). They take turns with 4 columns; HELD turns
// are in registers, KEPT in shared memory. x has BATCH rows at a time.
template <typename A, int M, int K, int ROWS, int THREADS, int SPLIT, int HELD, int KEPT, int BATCH>
struct PlainProduct {
  using Four = Vector<A, 4>;
  static constexpr int GROUPS = THREADS / SPLIT, EACH = (M + GROUPS - 1) / GROUPS;
  static constexpr int TURNS = K / 4 / SPLIT;
  Four held[EACH][HELD > 0 ? HELD : 1];

  template <typename R, typename K_>
  __device__ __forceinline__ void load(const A* weights, int64_t row_stride, int64_t column_stride,
                                       R row, K_ column, uint4* rest, uint4* far) {
    const int first = threadIdx.x / SPLIT * EACH, part = threadIdx.x % SPLIT;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int found = first + e < M ? row(first + e) : -1;
      const A* const from = found < 0 ? nullptr : weights + found * row_stride;
#pragma unroll
      for (int s = 0; s < HELD; ++s)
        held[e][s] = load_four(from, column_stride, column, (s * SPLIT + part) * 4);
#pragma unroll 1
      for (int s = HELD; s < TURNS; ++s)
        *at(rest, far, e, s) = load_four(from, column_stride, column, (s * SPLIT + part) * 4);
    }
  }

  template <int Y_STRIDE>
  __device__ __forceinline__ void multiply(const A* x, A* y, uint4* rest, uint4* far) const {
    constexpr int SUMS = (EACH * BATCH + SPLIT - 1) / SPLIT;  // of a lane, in the end
    const int group = threadIdx.x / SPLIT, part = threadIdx.x % SPLIT;
#pragma unroll
    for (int begin = 0; begin < ROWS; begin += BATCH) {
      A sums[SUMS * SPLIT] = {};
      const auto turn = [&](const Four(&w)[EACH], int s) {
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
          const int row = begin + n < ROWS ? begin + n : ROWS - 1;
          const A* from = x + Panels<A, ROWS>::at(row, (s * SPLIT + part) * 4);
          const Four v = *reinterpret_cast<const Four*>(from);
#pragma unroll
          for (int e = 0; e < EACH; ++e)
#pragma unroll
            for (int z = 0; z < 4; ++z) sums[n * EACH + e] += w[e].of[z] * v.of[z];
        }
      };
      Four w[EACH];
#pragma unroll
      for (int s = 0; s < HELD; ++s) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) w[e] = held[e][s];
        turn(w, s);
      }
#pragma unroll 4
      for (int s = HELD; s < HELD + KEPT; ++s) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) w[e] = *at(rest, nullptr, e, s);
        turn(w, s);
      }
#pragma unroll 4
      for (int s = HELD + KEPT; s < TURNS; ++s) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) w[e] = *at(nullptr, far, e, s);
        turn(w, s);
      }
      const int first = add_shares<SPLIT>(sums);
#pragma unroll
      for (int i = 0; i < SUMS; ++i) {
        const int n = begin + (first + i) / EACH, m = group * EACH + (first + i) % EACH;
        if (first + i < EACH * BATCH && n < ROWS && m < M) y[n * Y_STRIDE + m] = sums[i];
      }
    }
  }

  // Where a thread's part of a turn past HELD is.
  static __device__ __forceinline__ Four* at(uint4* rest, uint4* far, int e, int s) {
    const int turn = s - HELD - (s < HELD + KEPT ? 0 : KEPT);
    Four* const from = reinterpret_cast<Four*>(s < HELD + KEPT ? rest : far);
    return from + (turn * EACH + e) * THREADS + threadIdx.x;
  }
};

}  // namespace hoconv::recurrent
