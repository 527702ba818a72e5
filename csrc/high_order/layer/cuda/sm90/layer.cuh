// What the layer's kernels for Hopper (compute capability 9.0) share: the sizes as constants of the
// compiler, the order of taps in the columns of a product, and the halo tile of x in shared memory.
//
// They serve the layers most often found at the front of a network: images of 1 or 3 channels, one
// group, no dilation, and a generator as large as the kernel. All others run the kernels of sm80/.
// Those load a pixel twice, once as an operand of the product that generates the weights and once
// to apply the weights to it. Here the depth of that product has the order of its columns, tap by
// tap for every channel, so that the words that a lane loads as an operand are the pixels that its
// taps read.
//
// B batch, C channels, H height, W width, k kernel size and that of the generator, N blocks of 8
// columns of a product; g = lane / 4, t = lane % 4 (precision.cuh).
#pragma once

#include "high_order/layer/cuda/layer.cuh"
#include "high_order/layer/cuda/sm90/wgmma.cuh"

namespace hoconv::high_order::layer::sm90 {

constexpr int kRegion = 64;  // columns of pixels of a block
constexpr int kBefore = 4;   // columns of x on either side, so that vector loads are aligned
constexpr int kWarps = 4;    // a warpgroup
constexpr int kSharedOfMultiprocessor = 228 * 1024;  // bytes

template <typename Precision, int kernel_size, int channels>
struct Sizes {
  using P = Precision;
  using T = typename P::T;
  static constexpr bool pairs = P::elements == 2;
  static constexpr int k = kernel_size, C = channels;
  static constexpr int taps = k * k, reach = k / 2;
};

// The order of taps in the columns of a product. Columns come in blocks of 8, of which columns 2t
// and 2t + 1 belong to lanes t. Where a word is a pair of neighbours, blocks come in pairs too, the
// last one empty if their number is odd.
struct TapPosition {
  int row, column;  // of a tap; from k on there is no tap
};
template <typename S>
constexpr int even_if_pairs(int N) {
  return S::pairs ? N + N % 2 : N;
}
// Taps follow each other without gaps; in pairs, each row is filled up to an even number. The
// columns `high` and `low` have no tap.
template <typename S>
struct Compact {
  static constexpr int row = S::pairs ? S::k + 1 : S::k;  // columns of a product
  static constexpr int N = (row * S::k + 7) / 8, blocks = even_if_pairs<S>(N);
  static constexpr int high = row * S::k, low = high + 1;
  __host__ __device__ static constexpr TapPosition position(int j, int t, int e) {
    const int n = 8 * j + 2 * t + e;
    return {n / row, n % row};
  }
};
// Each row of taps has a block.
template <typename S>
struct Grid {
  static constexpr int N = S::k, blocks = even_if_pairs<S>(N);
  static constexpr int high = 8 * N, low = high + 1;
  __host__ __device__ static constexpr TapPosition position(int j, int t, int e) {
    return {j, S::pairs ? 2 * t + e : t + 4 * e};
  }
};

template <typename S, typename Columns>
__host__ __device__ constexpr bool is_tap(int j, int t, int e) {
  const TapPosition p = Columns::position(j, t, e);
  return p.row < S::k && p.column < S::k;
}
template <typename S, typename Columns>
__host__ __device__ constexpr int tap_of(int column) {  // -1 for none
  const int j = column / 8, t = column % 8 / 2, e = column % 2;
  const TapPosition p = Columns::position(j, t, e);
  return is_tap<S, Columns>(j, t, e) ? p.row * S::k + p.column : -1;
}

// The halo tile: `rows` rows of x of every channel, in arrays of words. A word of 16-bit elements
// is a pair of neighbours. The first of them is even in array 0 and odd in array 1; arrays 2 and 3
// are the same with zero as the second element, for the end of a row of odd size. Neighbouring
// pixels are therefore neighbouring words.
//
// A warp loads a word of 8 neighbouring pixels for each of 4 taps at once. Neighbouring taps of a
// row share words, so that those of one row touch 8 to 11 banks. The next row is kPitchBanks banks
// further, and the last tap of an odd row, in array 2 or 3, is 2 * kArrayBanks further. With 12 and
// 10 there is no bank conflict for k = 5, and none for k = 3 and 7 but in the order Compact: one of
// two loads of k = 3 in 16 bits, and most of k = 7 in floats, take two cycles. For the vector
// stores a pitch must be a multiple of 4 words and the distance of arrays a multiple of 2.
constexpr int kPitchBanks = 12, kArrayBanks = 10;
// The next number of words, at least `words`, that is `bank` modulo 32.
constexpr int round_up_to(int words, int bank) { return (words - bank + 31) / 32 * 32 + bank; }

template <typename S, int rows_>
struct HaloTile {
  static constexpr int rows = rows_, columns = kRegion + 2 * kBefore;
  static constexpr int row_words = columns / S::P::elements;
  static constexpr int pitch = round_up_to(row_words, kPitchBanks);
  static constexpr int channel = rows * pitch;
  static constexpr int array = S::pairs ? round_up_to(S::C * channel, kArrayBanks) : 0;
  static constexpr int words = S::pairs ? 4 * array : S::C * channel;
  static constexpr int items = columns / 4;               // of four elements, in a row
  static constexpr int tile_words = 16 / S::P::elements;  // 16 pixels

  // The word, in array 0 or 1, of the element `d` columns from the lane's first pixel.
  __host__ __device__ static constexpr int at(int d) {
    return S::pairs ? (kBefore + d) / 2 + (kBefore + d) % 2 * array : kBefore + d;
  }
  // The distance of the lane's second pixel from its first, in words, at an even column of the
  // kernel.
  static constexpr int second = S::pairs ? (kBefore - S::reach) % 2 ? 1 - array : array : 8;

  // The offset of a tap's word from the corner of a pixel's window.
  __device__ static int of(TapPosition p) {
    const bool last = S::pairs && p.column + 1 == S::k;
    return p.row * pitch + at(p.column - S::reach) + (last ? 2 * array : 0);
  }
};

// Tensor cores truncate a float to TF32. Adding half of the last place to its bits beforehand
// rounds to nearest. A NaN whose bits would overflow then is replaced by another.
constexpr uint32_t kHalfOfTF32 = 0x1000;
__device__ __forceinline__ float roundable(float value) {
  return value == value ? value : __uint_as_float(0x7fc00000);
}

// Loads if `exists`, without waiting. In assembly, since the compiler may load into another
// register and wait to move the value.
__device__ __forceinline__ void load_if(bool exists, const void* from, uint32_t (&to)[4]) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
      : "l"(from), "r"(int{exists}));
}
__device__ __forceinline__ void load_if(bool exists, const void* from, uint32_t (&to)[2]) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p ld.global.nc.v2.u32 {%0, %1}, [%2];\n}"
               : "+r"(to[0]), "+r"(to[1])
               : "l"(from), "r"(int{exists}));
}
__device__ __forceinline__ void load_if(bool exists, const void* from, unsigned short& to) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.nc.u16 %0, [%1];\n}"
               : "+h"(to)
               : "l"(from), "r"(int{exists}));
}

// Prefetches four neighbouring elements of a row from `column` on and, where words are pairs, the
// element after them.
template <typename S>
struct Item {
  using T = typename S::T;
  using Raw = bits_t<sizeof(T)>;
  static constexpr int words = sizeof(T);  // four elements, in words of 4 bytes
  uint32_t four[words];
  unsigned short next;

  // The bounds, which do not depend on the row.
  struct Guard {
    int column, W;
    bool whole, has_next;  // whole: may be loaded as a vector
    __device__ Guard(int column, int W, bool vectors)
        : column(column),
          W(W),
          whole(vectors && column >= 0 && column < W),
          has_next(S::pairs && column + 4 >= 0 && column + 4 < W) {}
  };

  __device__ void load(const T* from, int64_t stride, const Guard& guard, bool inside,
                       bool vectors) {
#pragma unroll
    for (int i = 0; i < words; ++i) four[i] = 0;
    next = 0;
    load_if(inside && guard.whole, from, four);
    if constexpr (S::pairs) load_if(inside && guard.has_next, from + 4 * stride, next);
    if (inside && !vectors) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = guard.column + e, at = e * words;  // of four, in bytes
        if (column >= 0 && column < guard.W)
          four[at / 4] |= uint32_t{*reinterpret_cast<const Raw*>(from + e * stride)} << at % 4 * 8;
      }
    }
  }

  __device__ T operator[](int e) const {
    const Raw raw = four[e * words / 4] >> e * words % 4 * 8;
    T value;
    memcpy(&value, &raw, sizeof value);
    return value;
  }

  // Stores item `q` of a row; `to` is that row in array 0.
  template <typename Halo>
  __device__ void store(uint32_t* to, int q) const {
    const Item& value = *this;
    if constexpr (S::pairs) {
      T after;
      memcpy(&after, &next, sizeof after);
      uint32_t pair[4], single[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        S::P::planes(value[e], e < 3 ? value[e + 1] : after, pair[e], single[e]);
      to += 2 * q;
      *reinterpret_cast<uint2*>(to) = {pair[0], pair[2]};
      *reinterpret_cast<uint2*>(to + Halo::array) = {pair[1], pair[3]};
      *reinterpret_cast<uint2*>(to + 2 * Halo::array) = {single[0], single[2]};
      *reinterpret_cast<uint2*>(to + 3 * Halo::array) = {single[1], single[3]};
    } else {
      *reinterpret_cast<float4*>(to + 4 * q) = {roundable(value[0]), roundable(value[1]),
                                                roundable(value[2]), roundable(value[3])};
    }
  }
};

// Calls f with the sizes of a layer that these kernels serve.
template <typename P, typename F>
void dispatch_sizes(const Layer& l, F&& f) {
  const auto with = [&](auto k) {
    if (l.C == 1)
      f(Sizes<P, decltype(k)::value, 1>{});
    else
      f(Sizes<P, decltype(k)::value, 3>{});
  };
  switch (l.k) {
    case 3:
      return with(std::integral_constant<int, 3>{});
    case 5:
      return with(std::integral_constant<int, 5>{});
    default:
      return with(std::integral_constant<int, 7>{});
  }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Pointers to the words that the lane's taps read for its first pixel.
template <typename S, typename Columns, typename Halo>
struct TapPointers {
  static constexpr int words = S::pairs ? 1 : 2;
  const uint32_t* of[Columns::N][words];

  __device__ explicit TapPointers(const uint32_t* shared_x) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < Columns::N; ++j)
#pragma unroll
      for (int e = 0; e < words; ++e)
        of[j][e] = shared_x + Halo::of(Columns::position(j, t, e)) + g;
  }
};

// The words of a channel that the lane's taps read for its two pixels; zeros where there is no tap.
template <typename S, typename Columns, typename Halo>
struct Pixels {
  using P = typename S::P;
  static constexpr int words = S::pairs ? 1 : 2;
  static constexpr int steps = Columns::blocks / P::elements;  // of a product's depth
  uint32_t a[steps][4];                                        // as operands of a product

  // Loads them for the pixels `shift` words after the first.
  __device__ void load(const TapPointers<S, Columns, Halo>& tap_pointers, int shift, int c) {
#pragma unroll
    for (int j = 0; j < Columns::blocks; ++j)
#pragma unroll
      for (int e = 0; e < words; ++e) {
        const bool any =
            j < Columns::N && (is_tap<S, Columns>(j, 0, e) || is_tap<S, Columns>(j, 1, e) ||
                               is_tap<S, Columns>(j, 2, e) || is_tap<S, Columns>(j, 3, e));
        const bool all = is_tap<S, Columns>(j, 0, e) && is_tap<S, Columns>(j, 1, e) &&
                         is_tap<S, Columns>(j, 2, e) && is_tap<S, Columns>(j, 3, e);
        const bool exists = is_tap<S, Columns>(j, threadIdx.x % 4, e);
        const uint32_t* from = tap_pointers.of[j < Columns::N ? j : 0][e];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t& word = S::pairs ? a[j / P::elements][j % P::elements * 2 + i]
                                    : a[j / P::elements][e * 2 + i];
          word = 0;
          if (any && (all || exists)) word = from[shift + c * Halo::channel + i * Halo::second];
        }
      }
  }

  __device__ float operator()(int j, int e, int pixel) const {
    if constexpr (S::pairs) {
      const float2 both = P::unpack(a[j / 2][j % 2 * 2 + pixel]);
      return e ? both.y : both.x;
    } else {
      return __uint_as_float(a[j][e * 2 + pixel]);
    }
  }
};

#endif

}  // namespace hoconv::high_order::layer::sm90
