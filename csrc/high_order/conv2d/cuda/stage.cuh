// What a block has in shared memory of weights that are neighbours by their pixel, and of an image:
// how it gets there, where it lies, and how threads read it.
//
// N channels of a group, K taps of a row.
#pragma once

#include <optional>

#include "high_order/conv2d/cuda/general.cuh"

namespace hoconv::high_order::conv2d {

constexpr int kWarp = 32;
// After the weights of two pixels, where lanes would read the same banks; copies are then as long.
constexpr int kPaddingBytes = 8;
constexpr int kAnyK = 0;  // no constant, or not the K x K taps of windows a pixel apart, of a group

// Divides n by d, while n * d < 2^32; by 1 unless told.
struct Divisor {
  unsigned d, factor;
  Divisor() : Divisor(1) {}
  explicit Divisor(unsigned d) : d(d), factor((uint64_t{1} << 32) / d + 1) {}
  __device__ int quotient(int n) const { return d == 1 ? n : __umulhi(n, factor); }
};

// What a block has in shared memory: rows of pixels with their weights, and a tile of an image.
struct Stage {
  int columns;       // that the block computes: an even number, a thread has two
  int rows, pixels;  // whose weights are there
  int image_rows, image_columns;
  int weights;  // of a pixel
  int padding;  // elements after the weights of two pixels
  int pitch;    // elements from a row of weights to the next
  int copying;  // warps that copy a row
  int bytes;
  bool near;  // neighbouring pixels read neighbouring columns
  Divisor by_pixel, by_pair, by_image_column;

  // Returns none where `most` bytes of shared memory, or the divisors, do not fit it.
  template <typename T>
  static std::optional<Stage> make(const Problem& p, int64_t columns, int64_t rows, int64_t pixels,
                                   int64_t image_rows, int64_t image_columns, int64_t warps,
                                   int64_t most) {
    constexpr int64_t most_positions = 1 << 16, most_weights = 1 << 12;
    constexpr int word = 4 / sizeof(T), align = 16 / sizeof(T);
    const int64_t weights = p.taps() * p.G, N = p.group_channels();
    image_columns += image_columns % 2;
    if (weights >= most_weights || pixels >= most_positions || image_rows >= most_positions ||
        image_columns >= most_positions || image_rows * image_columns >= most_positions)
      return std::nullopt;
    // So that at most two lanes read words of a bank, which are few enough.
    const int64_t padding = 2 * weights % (4 * word) == 0 ? kPaddingBytes / sizeof(T) : 0;
    // A row begins where it does in device memory, up to a unit after an aligned address.
    const int64_t pitch =
        (pixels * weights + (pixels + 1) / 2 * padding + 2 * align - 1) / align * align;
    const int64_t elements = rows * pitch + image_rows * image_columns * (N == 3 ? 4 : N);
    const int64_t bytes = (elements + align - 1) / align * 16;
    if (bytes > most) return std::nullopt;
    Stage s{int(columns),
            int(rows),
            int(pixels),
            int(image_rows),
            int(image_columns),
            int(weights),
            int(padding),
            int(pitch),
            int(std::max<int64_t>(warps / rows, 1)),
            int(bytes),
            p.across.is_dense() && p.across.step() == 1,
            Divisor(weights),
            Divisor(2 * weights),
            Divisor(image_columns)};
    return s;
  }

  template <int K>
  __device__ int weights_of_pixel() const {
    return K != kAnyK ? K * K : weights;
  }
};

// Rows of weights in device memory, as many as a stage has: from `row` on, of H, `step` apart; of
// their pixels `first` to `last` exist.
template <typename T>
struct StagedRows {
  T* data;
  int64_t stride;
  int row, step, H, first, last;

  __device__ T* at(int r) const { return data + r * stride; }
  __device__ bool exists(int r) const {
    return static_cast<unsigned>(row + r * step) < static_cast<unsigned>(H);
  }
  // Elements by which a row begins after an aligned address.
  __device__ int offset(int r) const { return reinterpret_cast<uintptr_t>(at(r)) % 16 / sizeof(T); }
};

// Those of a pixel's weights that a block reads.
struct Needed {
  int first, last;
};

// Begins to copy bytes to shared memory.
template <int Bytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (Bytes == 16)  // past the L1 cache
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(Bytes)
                 : "memory");
}
// Waits until all is in shared memory.
__device__ __forceinline__ void wait_for_stage() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
}

// Copies weights to shared memory, zeros for pixels that do not exist, or back; of row r at least
// those that needed(r) names.
template <int Bytes, bool Back, typename T, typename U, typename F>
__device__ __forceinline__ void copy_units(const Stage& s, const StagedRows<U>& rows, T* staged,
                                           F&& needed) {
  constexpr int V = Bytes / sizeof(T);
  using Bits = bits_t<Bytes>;
  const auto place = [&](int e) { return Bytes == 16 ? e : e + s.by_pair.quotient(e) * s.padding; };
  const int group = threadIdx.x / kWarp / s.copying, threads = s.copying * kWarp;
  const int thread = threadIdx.x - group * threads, all = s.pixels * s.weights;
  for (int r = group; r < s.rows; r += blockDim.x / threads) {
    U* row = rows.at(r);
    const int offset = rows.offset(r);
    T* to = staged + r * s.pitch + offset;
    const bool exists = rows.exists(r);
    const int first = exists ? rows.first * s.weights : 0;
    const int last = exists ? rows.last * s.weights : 0;
    // The units that exist, from an aligned address on. With padding they are of one pair of
    // pixels, where the row begins with a unit.
    const bool whole = Bytes == 16 || offset % V == 0;
    const int begin = first + (V - (offset + first) % V) % V;
    const int end = whole ? max(last - (offset + last) % V, begin) : begin;
    const Needed of_pixel = needed(r);
    const bool skips = of_pixel.first > 0 || of_pixel.last < s.weights;
#pragma unroll 2
    for (int e = begin + thread * V; e < end; e += threads * V) {
      if (skips) {
        const int at = e - s.by_pixel.quotient(e) * s.weights;
        const bool misses = at >= of_pixel.last || at + V <= of_pixel.first;
        // It may end in the next pixel.
        if (misses && at + V - s.weights <= of_pixel.first) continue;
      }
      T* shared = to + place(e);
      if constexpr (Back)
        __stcs(reinterpret_cast<Bits*>(row + e), *reinterpret_cast<const Bits*>(shared));
      else
        copy_async<Bytes>(shared, row + e);
    }
    for (int n = thread; n < begin + all - end; n += threads) {  // what is no such unit
      const int e = n < begin ? n : n - begin + end;
      if constexpr (Back) {
        if (e >= first && e < last) row[e] = to[place(e)];
      } else {
        to[place(e)] = e >= first && e < last ? row[e] : narrow<T>(acc_t<T>(0));
      }
    }
  }
}
template <bool Back = false, typename T, typename U, typename F>
__device__ __forceinline__ void copy_weights(const Stage& s, const StagedRows<U>& rows, T* staged,
                                             F&& needed) {
  if (s.padding)
    copy_units<kPaddingBytes, Back>(s, rows, staged, needed);
  else
    copy_units<16, Back>(s, rows, staged, needed);
}
template <bool Back = false, typename T, typename U>
__device__ __forceinline__ void copy_weights(const Stage& s, const StagedRows<U>& rows, T* staged) {
  copy_weights<Back>(s, rows, staged, [&](int) { return Needed{0, s.weights}; });
}

// The channels of a group of a pixel, as one load.
template <typename T, int N>
using Channels = bits_t<sizeof(T) * (N == 3 ? 4 : N)>;

template <typename T, int N>
__device__ __forceinline__ Channels<T, N>* staged_image(const Stage& s, void* stage) {
  return reinterpret_cast<Channels<T, N>*>(static_cast<T*>(stage) + s.rows * s.pitch);
}

// Columns of a row lie apart by whether they are even, so that lanes, which begin at even ones,
// read neighbours.
__device__ __forceinline__ int place_of(int column, int columns) {
  return column / 2 + (column % 2 ? columns / 2 : 0);
}

// Loads a tile of an image, from the channel at `data` on. offset(r, c) is that of its pixel from
// there, or less than 0 where the pixel is zeros.
template <int N, typename T, typename F>
__device__ __forceinline__ void load_image(const Stage& s, const T* data, int64_t next_channel,
                                           Channels<T, N>* staged, F&& offset) {
  constexpr int together = 4;  // loads whose latencies overlap
  constexpr int bits = 8 * sizeof(T), in_word = 4 / sizeof(T);
  const int all = s.image_rows * s.image_columns;
#pragma unroll 1
  for (int first = threadIdx.x; first < all; first += together * blockDim.x) {
    unsigned pixels[together][4] = {};
    int places[together];
#pragma unroll
    for (int i = 0; i < together; ++i) {
      const int n = first + i * blockDim.x, r = s.by_image_column.quotient(n);
      const int c = n - r * s.image_columns;
      places[i] = r * s.image_columns + place_of(c, s.image_columns);
      if (n >= all) continue;
      const int64_t from = offset(r, c);
      if (from < 0) continue;
      const T* pixel = data + from;
#pragma unroll
      for (int m = 0; m < N; ++m, pixel += next_channel)
        pixels[i][m] = __ldg(reinterpret_cast<const bits_t<sizeof(T)>*>(pixel));
    }
#pragma unroll
    for (int i = 0; i < together; ++i) {
      unsigned words[4] = {};
#pragma unroll
      for (int m = 0; m < N; ++m) words[m / in_word] |= pixels[i][m] << m % in_word * bits;
      if (first + i * blockDim.x < all)
        staged[places[i]] = *reinterpret_cast<const Channels<T, N>*>(words);
    }
  }
}
// Loads what the windows of the output pixels from h, w on read.
template <int N, typename T>
__device__ __forceinline__ void load_windows(const Stage& s, const Windows& p, const T* data,
                                             const ImageStrides& strides, int h, int w,
                                             Channels<T, N>* staged) {
  const int top = p.down.first_position(h), left = p.across.first_position(w);
  const auto offset = [&](int y, int z) {
    // Far outside, at what no window reads, a pixel that is repeated is none of the image, either.
    return p.down.is_inside(y) && p.across.is_inside(z) ? y * strides.h + z * strides.w : -1;
  };
  if (p.down.repeats())
    load_image<N>(s, data, strides.c, staged, [&](int r, int c) {
      return offset(p.down.pixel_at(top + r), p.across.pixel_at(left + c));
    });
  else
    load_image<N>(s, data, strides.c, staged,
                  [&](int r, int c) { return offset(top + r, left + c); });
}

// Calls f(j, one, other) for all taps j of a row with the channels of what two pixels read: the
// columns that are j steps from `first` and from `second`. Near ones are first + j, first + j + 1.
template <int K, int N, typename T, typename F>
__device__ __forceinline__ void for_each_column(const Stage& s, const Line& line,
                                                const Channels<T, N>* row, int first, int second,
                                                F&& f) {
  constexpr int V = sizeof(Channels<T, N>) / sizeof(T);
  using A = acc_t<T>;
  const auto read = [](const Channels<T, N>* from, A(&to)[V]) {
    Pack<T, V> pack;
    *reinterpret_cast<Channels<T, N>*>(&pack) = *from;
    widen_all(pack, to);
  };
  A one[V], other[V];
  if (K != kAnyK || s.near) {
    const int taps = K != kAnyK ? K : line.taps;
    const auto *even = row + first / 2, *odd = even + s.image_columns / 2;
    read(even, one);
#pragma unroll(K == kAnyK ? 2 : K)
    for (int j = 0; j + 1 < taps; j += 2) {
      read(odd + j / 2, other);
      f(j, one, other);
      read(even + j / 2 + 1, one);
      f(j + 1, other, one);
    }
    if (taps % 2 == 0) return;
    read(odd + taps / 2, other);
    f(taps - 1, one, other);
  } else {
    for (int j = 0; j < line.taps; ++j, first += line.step, second += line.step) {
      read(row + place_of(first, s.image_columns), one);
      read(row + place_of(second, s.image_columns), other);
      f(j, one, other);
    }
  }
}

// Stores the channels of two pixels, of which the second may not exist.
template <int N, typename T, typename A>
__device__ __forceinline__ void store_two(T* p, const ImageStrides& strides, bool second,
                                          const A (&sum)[2 * N]) {
  const bool neighbours = strides.w == N && (N == 1 || strides.c == 1);
  if (neighbours && second && reinterpret_cast<uintptr_t>(p) % (2 * sizeof(T)) == 0) {
#pragma unroll
    for (int i = 0; i < 2 * N; i += 2) {
      const A both[2] = {sum[i], sum[i + 1]};
      store_sum<2>(p + i, both);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 2 * N; ++i)
    if (i < N || second) p[i / N * strides.w + i % N * strides.c] = narrow<T>(sum[i]);
}

}  // namespace hoconv::high_order::conv2d
