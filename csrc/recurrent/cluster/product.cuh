// Products of tensor cores: each warp keeps tiles of the weights for all time steps.
#pragma once

#include "recurrent/cluster/exchange.cuh"

namespace hoconv::recurrent {

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

}  // namespace hoconv::recurrent
