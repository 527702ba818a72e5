// Steps that read the state before they write it. The kernel that solves for what a chunk writes,
// and the kernel that passes states from chunk to chunk then.
//
// With v_i = c_i + S_{i-1}ᵀ p_i and L_ij = (D_j,i-1 k_j)ᵀ p_i for j < i, the rows of v are
//
//   v = c + L v + P S_0,   so that   v = (I - L)⁻¹ c + (I - L)⁻¹ P S_0,
//
// where row i of P is D_0,i-1 p_i. Of the state S_0 alone this waits for the chunk before. The
// gradient v' of c is, in the other order of steps, of the same form, of the gradient S' after the
// chunk:
//
//   v' = (I - Lᵀ)⁻¹ c' + (I - Lᵀ)⁻¹ K S',
//
// where row j of K is D_jC k_j, and c'_j = Σ_{i≥j} ((D_ji k_j)ᵀ q_i) o'_i. The state, or its
// gradient, after that is
//
//   D_0C S_0 + Kᵀ v,   or   D_0C S' + Qᵀ o' + Pᵀ v',   where row i of Q is D_0i q_i.
#pragma once

#include "recurrent/chunks/shared_steps.cuh"
#include "recurrent/chunks/steps.cuh"

namespace hoconv::recurrent {

// What the second kernel reads of a chunk, in global memory, or BACKWARD in parentheses: `rows` are
// (I - L)⁻¹ P (or (I - Lᵀ)⁻¹ K), `written` is K (or P), a row for each key, `columns` are (I - L)⁻¹
// c (or (I - Lᵀ)⁻¹ c'), and `decays` D_0C of each key. The first two are rounded.
template <int K, int V>
struct Solved {
  static constexpr int SIZE = 2 * CHUNK * K + CHUNK * V + K;
  float *rows, *written, *columns, *decays;

  template <typename Call>
  __device__ Solved(const Call& call, int64_t index)
      : rows(call.solved + index * SIZE),
        written(rows + CHUNK * K),
        columns(written + CHUNK * K),
        decays(columns + CHUNK * V) {}
};

// Solves for what a chunk writes.
template <int KEYS, int COLUMNS, bool BACKWARD, bool SHARED, bool EARLY>
struct SolveChunk : Pairs<KEYS, round_up(KEYS, 16), 2> {
  static constexpr int K = round_up(KEYS, 16), V = round_up(COLUMNS, 16);
  using Own = Pairs<KEYS, K, 2>;
  using typename Own::Decays, typename Own::Square;
  static constexpr int THREADS = Own::THREADS, PITCH = Own::PITCH, WIDE = V + WIDE_PAD;
  static constexpr int INVERSE = STEPS + PAD;  // rows of the inverses of blocks of steps
  // The rows of Q, one for each key, come in place of those of steps.
  static constexpr int FIRST = BACKWARD && CHUNK * PITCH < K * SQUARE ? K * SQUARE : CHUNK * PITCH;
  // With shared decays, the keys come first in place of columns.
  static constexpr int SECOND = SHARED && PITCH > WIDE ? PITCH : WIDE;
  // Products of pairs with p, and, BACKWARD, with q; D_ji comes first in place of these.
  static constexpr int SQUARES = BACKWARD || SHARED ? 2 : 1;
  static constexpr int BYTES =
      4 * (FIRST + CHUNK * (SQUARES * SQUARE + SECOND + INVERSE) + SEGMENTS * K + SHARED * CHUNK);

  const Place place;
  float *const x, *const products, *const of_outputs, *const columns, *const inverses;
  Decays& decays;
  float* const own_decays;  // of each step, if they are shared

  template <typename Call>
  __device__ SolveChunk(const Call& call, Memory memory)
      : Own(call.T, 0),
        place(call),
        x(memory.take(FIRST)),
        products(memory.take(CHUNK * SQUARE)),
        of_outputs(memory.take((SQUARES - 1) * CHUNK * SQUARE)),
        columns(memory.take(CHUNK * SECOND)),
        inverses(memory.take(CHUNK * INVERSE)),
        decays(*reinterpret_cast<Decays*>(memory.take(SEGMENTS * K))),
        own_decays(memory.next) {}

  template <typename Call>
  static __device__ __forceinline__ void run(const Call& call, char* shared) {
    SolveChunk own(call, Memory{reinterpret_cast<float*>(shared)});
    const Solved<K, V> solved(call, own.place.index(call));
    own.load(call, call.p, own.place);
    if constexpr (SHARED) own.put_decays(own.own_decays);
    own.multiply_decays(own.decays);
    if constexpr (SHARED) multiply_steps<THREADS>(own.of_outputs, own.own_decays);
    own.template multiply<true>(own.products);
    if constexpr (BACKWARD) {
      own.template put_turned<true>(solved.written, own.q, true, CHUNK);
      own.load_queries(call.q, own.place);
      own.template multiply<EARLY>(own.of_outputs);
      own.add_outputs(call);
    } else {
      own.template put_turned<false>(solved.written, own.k, false, CHUNK);
      copy_columns<COLUMNS, V, THREADS>(own.columns, WIDE, call.c, own.place, call.T);
    }
    own.scale(solved);
    own.invert();
    __syncthreads();
    own.template substitute<K, true>(own.x, PITCH, solved.rows);
    own.template substitute<V, false>(own.columns, WIDE, solved.columns);
  }

 private:
  // Computes the products of pairs. Ends with a barrier.
  template <bool BEFORE>
  __device__ __forceinline__ void multiply(float* to) {
    if constexpr (SHARED) {
      Square pairs(Own::warp);
      Own::template multiply_pairs<BACKWARD, BEFORE>(pairs, to, x, columns, of_outputs);
      __syncthreads();
    } else {
      Own::template multiply_pairs<BACKWARD, BEFORE>(to, x, decays);
    }
  }

  // Computes c', and what outputs add to the gradient of the state.
  template <typename Call>
  __device__ __forceinline__ void add_outputs(const Call& call) {
    copy_columns<COLUMNS, V, THREADS>(columns, WIDE, call.d_output, place, call.T);
    put_turned<EARLY>(x, Own::q, true);
    __syncthreads();
    using Matrix = State<KEYS, COLUMNS, Call>;
    float* const to = call.d_states + place.template state<KEYS, COLUMNS>(call);
    constexpr int ROWS = K % 64 ? 16 : 64;  // keys at once, for whose sums there are registers
#pragma unroll 1
    for (int first = 0; first < K; first += ROWS) {
      Part<Own::WARPS, 1, ROWS, V> part(Own::warp);
      if (!part.any()) break;
      part.row += first;
      part.add(CHUNK, Along{x, SQUARE}, WideAcross{columns, WIDE});
      part.each([&](int i, int c, const float (&numbers)[decltype(part)::WIDTH]) {
        if (c < V) Matrix::write(to, numbers, i, c);
      });
    }
    Part<Own::WARPS, 2, CHUNK, V> local(Own::warp);
    if (local.any())
      local.add(CHUNK, Triangle<true>{{of_outputs, SQUARE}}, WideAcross{columns, WIDE});
    __syncthreads();
    if (local.any())
      local.each([this](int i, int c, const float (&numbers)[decltype(local)::WIDTH]) {
        if (c < V) store_rounded(columns + i * WIDE + c, numbers);
      });
  }

  // Scales the steps that are solved for; writes D_0C.
  __device__ __forceinline__ void scale(const Solved<K, V>& solved) const {
    if constexpr (BACKWARD)
      Own::put_keys(x, decays);
    else
      Own::template put_queries<true>(x, decays);
    if (Own::owns() && Own::segment == 0) {
      float scale[2];
      Own::between(decays, 0, SEGMENTS, scale);
      store(solved.decays + Own::key, scale);
    }
  }

  // Stores steps, a row for each key, scaled from the beginning of the chunk on, or to its end.
  template <bool BEFORE>
  __device__ __forceinline__ void put_turned(float* to, const typename Own::Numbers& of,
                                             bool from_begin, int pitch = SQUARE) const {
    if (!Own::owns()) return;
    float scale[2], scaled[2][STEPS];
    const auto put = [&](int s, const float (&f)[2]) {
      for (int z = 0; z < 2; ++z) scaled[z][s] = rounded(of[s][z] * f[z]);
    };
    if (from_begin) {
      Own::between(decays, 0, Own::segment, scale);
      Own::template scale_forward<BEFORE>(0, STEPS, scale, put);
    } else {
      Own::between(decays, Own::segment + 1, SEGMENTS, scale);
      Own::scale_backward(0, STEPS, scale, put);
    }
#pragma unroll
    for (int z = 0; z < 2; ++z) store(to + (Own::key + z) * pitch + Own::row(0), scaled[z]);
  }

  // Inverts the blocks of I - L on the diagonal, or of its transposed; a lane has a column of one.
  __device__ __forceinline__ void invert() const {
    const int column = threadIdx.x % 32, first = Own::warp * STEPS;
    if (Own::warp >= SEGMENTS || column >= STEPS) return;
    float inverse[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      inverse[i] = i == column;
#pragma unroll
      for (int j = 0; j < i; ++j) {
        const int at =
            BACKWARD ? (first + j) * SQUARE + first + i : (first + i) * SQUARE + first + j;
        inverse[i] += products[at] * inverse[j];
      }
      const int row = BACKWARD ? column : i, place = BACKWARD ? i : column;
      inverses[(first + row) * INVERSE + place] = rounded(inverse[i]);
    }
  }

  // Solves for N columns of x, in place: block by block of steps, each after those that it waits
  // for. A warp has columns of its own.
  template <int N, bool ROUNDED>
  __device__ __forceinline__ void substitute(float* x, int pitch, float* to) const {
    using Block = Part<Own::WARPS, 1, STEPS, N>;
    constexpr int WIDTH = Block::WIDTH;
    if (!Block(Own::warp).any()) return;
#pragma unroll 1
    for (int n = 0; n < SEGMENTS; ++n) {
      const int at = STEPS * (BACKWARD ? SEGMENTS - 1 - n : n);
      Block known(Own::warp), block(Own::warp);
      known.each([&](int i, int c, float (&numbers)[WIDTH]) {
        if (c < N) load(numbers, x + (at + i) * pitch + c);
      });
      add_products(known.sums, at, known.column, BACKWARD ? at + STEPS : 0, STEPS * n,
                   Along{products, SQUARE}, WideAcross{x, pitch});
      known.each([&](int i, int c, const float (&numbers)[WIDTH]) {
        if (c < N) store_rounded(x + (at + i) * pitch + c, numbers);
      });
      __syncwarp();
      add_products(block.sums, at, block.column, 0, STEPS, Along{inverses, INVERSE},
                   WideAcross{x + at * pitch, pitch});
      __syncwarp();
      block.each([&](int i, int c, const float (&numbers)[WIDTH]) {
        if (c >= N) return;
        store_rounded(x + (at + i) * pitch + c, numbers);
        float written[WIDTH];
#pragma unroll
        for (int z = 0; z < WIDTH; ++z) written[z] = ROUNDED ? rounded(numbers[z]) : numbers[z];
        write_numbers(to + (at + i) * N + c, written);
      });
      __syncwarp();
    }
  }
};

// Computes the state before each chunk and that after the last one; BACKWARD: the gradient of the
// state after each chunk, and of that before the first one, to which what outputs add is already in
// its place. Computes the rows of v, or v', too. A block has some columns of a head.
template <int KEYS, int COLUMNS, bool BACKWARD>
struct PassSolvedStates {
  static constexpr int K = round_up(KEYS, 16), ALL = round_up(COLUMNS, 16);
  static constexpr int V = COLUMNS > 16 ? 32 : 16, BLOCKS = (COLUMNS + V - 1) / V;
  static constexpr int WARPS = K > 64 ? 8 : 4, THREADS = 32 * WARPS;
  static constexpr int GROUPS = K / 16 % WARPS ? 1 : WARPS;
  static constexpr int ROW = K + PAD, PITCH = V + WIDE_PAD;
  static constexpr int BYTES = 4 * (CHUNK * ROW + K * SQUARE + (K + CHUNK) * PITCH + K);

  template <typename Call>
  static __device__ __forceinline__ void run(const Call& call, char* shared) {
    if constexpr (BACKWARD)
      run(call, call.d_v, call.d_states, shared);
    else
      run(call, call.v, call.states, shared);
  }
  template <typename Call, typename Written>
  static __device__ __forceinline__ void run(const Call& call, const Written& written,
                                             float* between, char* shared) {
    Memory memory{reinterpret_cast<float*>(shared)};
    float* const rows = memory.take(CHUNK * ROW);
    float* const keys = memory.take(K * SQUARE);
    float* const own_states = memory.take(K * PITCH);
    float* const columns = memory.take(CHUNK * PITCH);
    float* const decays = memory.next;
    const int64_t b = blockIdx.x, chunks = (call.T + CHUNK - 1) / CHUNK;
    const int head = blockIdx.y / BLOCKS, first = blockIdx.y % BLOCKS * V;
    const int warp = threadIdx.x / 32;
    const int64_t all = call.heads * KEYS * COLUMNS, matrix = b * all + head * Call::HEAD;
    using Matrix = State<KEYS, COLUMNS, Call>;
    using States = Part<WARPS, GROUPS, K, V>;
    using Columns = Part<WARPS, SEGMENTS, CHUNK, V>;
    using Rows = float[States::WIDTH];
    using Values = float[Columns::WIDTH];
    States states(warp);
    const auto read = [&](States& to, const float* from) {
      const Matrix state{from + matrix};
      to.each([&](int i, int c, Rows& own) {
        if (c < V) state.read(own, i, first + c);
      });
    };
    const auto write = [&](float* to) {
      states.each([&](int i, int c, const Rows& own) {
        if (c < V) Matrix::write(to + matrix, own, i, first + c);
      });
    };
    const auto chunk_at = [&](int64_t n) { return BACKWARD ? chunks - 1 - n : n; };
    const auto solved = [&](int64_t n) {
      return Solved<K, ALL>(call, (chunk_at(n) * call.B + b) * call.heads + head);
    };
    read(states, call.first);
    if (chunks > 0) copy_rows(rows, decays, solved(0)), copy_keys(keys, solved(0));
    for (int64_t n = 0; n < chunks; ++n) {
      float* const here = between + chunk_at(n) * call.B * all;
      States added(warp);
      Columns own(warp);
      if constexpr (BACKWARD) read(added, here);
      own.each([&](int i, int c, Values& numbers) {
        if (c < V && first + c < ALL) load(numbers, solved(n).columns + i * ALL + first + c);
      });
      write(here);
      states.each([&](int i, int c, const Rows& numbers) {
        if (c < V) store_rounded(own_states + i * PITCH + c, numbers);
      });
      wait_for_copies<1>();
      __syncthreads();
      if (own.any()) own.add(K, Along{rows, ROW}, WideAcross{own_states, PITCH});
      own.each([&](int i, int c, const Values& numbers) {
        if (c < V) store_rounded(columns + i * PITCH + c, numbers);
      });
      if (own.any())
        write_columns<COLUMNS>(written, own, chunk_at(n) * CHUNK, call.T, b, head, first);
      states.each([&](int i, int c, Rows& numbers) {
        if (c < V)
#pragma unroll
          for (float& number : numbers) number *= decays[i];
      });
      wait_for_copies<0>();
      __syncthreads();
      if (n + 1 < chunks) copy_rows(rows, decays, solved(n + 1));
      if (states.any()) {
        states.add(CHUNK, Along{keys, SQUARE}, WideAcross{columns, PITCH});
        if constexpr (BACKWARD) states.add(added);
      }
      __syncthreads();
      if (n + 1 < chunks) copy_keys(keys, solved(n + 1));
    }
    write(call.last);
  }

 private:
  // Begin copies, each a group.
  static __device__ __forceinline__ void copy_rows(float* rows, float* decays,
                                                   const Solved<K, ALL>& from) {
    copy<CHUNK, K>(rows, ROW, from.rows);
    copy<1, K>(decays, K, from.decays);
    group_copies();
  }
  static __device__ __forceinline__ void copy_keys(float* keys, const Solved<K, ALL>& from) {
    copy<K, CHUNK>(keys, SQUARE, from.written);
    group_copies();
  }
  template <int ROWS, int N>
  static __device__ __forceinline__ void copy(float* to, int pitch, const float* from) {
#pragma unroll 4
    for (int at = threadIdx.x * 4; at < ROWS * N; at += THREADS * 4)
      copy_word(to + at / N * pitch + at % N, from + at);
  }
};

}  // namespace hoconv::recurrent
