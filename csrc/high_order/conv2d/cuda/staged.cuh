// The kernels for weights that are neighbours in memory by their pixel, as a channels-last
// generator writes them, of few channels.
//
// A thread that reads its pixel's weights from device memory loads two bytes at a time, and
// neighbouring threads load them from as many cache lines. So a block copies all weights of its
// pixels to shared memory first, 16 bytes at a time, and its threads read them there. The gradient
// of the weights takes the same way back. The pixels that the windows read are in shared memory,
// too, each with the channels of its group in one load, and what is outside the image as zeros, or
// as what it repeats.
//
// A lane of a warp owns two neighbouring pixels of a row. Windows that are a pixel apart read the
// same columns, so that a column is loaded once for both. In 16-bit types the weights of two pixels
// are as many words as there are taps: where that is odd, the lanes' loads are in 32 banks.
//
// For the gradient of x a block owns some columns of some rows, and each warp one of the rows that
// the current row of weights contributes to. The block goes down the rows: with each the oldest
// row of the gradient is complete, and its warp begins a new one. So a block reads its weights
// once, but for those of the columns and rows around its own.
//
// An example, 64 images of 3 channels, 224 x 224, k = 5, in bfloat16: the weights are 161 MB, both
// images 39 MB, 49 us of an H200's memory; 240 million products. Two taps take a load of a column
// and two of weights, 7 instructions that convert, multiply and add for each: 28 us of all
// schedulers, and 11 us of shared memory. So the memory binds it.
//
// B batch, C channels, G groups of channels, N channels of a group, K taps of a row.
#pragma once

#include <optional>
#include <utility>

#include "high_order/conv2d/cuda/windowed.cuh"

namespace hoconv::high_order::conv2d {

constexpr int kWarp = 32;  // lanes, each of which owns two pixels
constexpr int kMostColumns = 2 * kWarp;
constexpr int kStagedWarps = 8;  // that share a tile
constexpr int kFewChannels = 4;  // of a group
constexpr int kManyGroups = 32;  // with which general.cuh has neighbouring threads for neighbours
constexpr int kAnyK = 0;         // no constant: not the K x K taps of near windows of one group
constexpr int kTileBytes = 45 << 10;  // of weights; five such tiles fit a multiprocessor
constexpr int kBytesOfThread = 112;   // of shared memory where a multiprocessor has all its threads
constexpr int kEnoughWarps = 6144;    // 46 for each multiprocessor of an H100
constexpr int kSomeRows = 8;          // of weights at once

// Divides n by d, while n * d < 2^32.
struct Divisor {
  unsigned d, factor;
  explicit Divisor(unsigned d) : d(d), factor((uint64_t{1} << 32) / d + 1) {}
  __device__ int quotient(int n) const { return d == 1 ? n : __umulhi(n, factor); }
};

// What a block has in shared memory: rows of pixels with their weights, and a tile of an image.
struct Stage {
  int columns;        // that the block computes: an even number, a lane has two
  int rows, pixels;   // whose weights are there
  int sharing;        // warps that copy a row
  int pixel_weights;  // taps * G
  int padding;        // elements after the weights of two pixels
  int pitch;          // elements from a row of weights to the next
  int image_rows, image_columns;
  int places;  // 8-byte words before those of find_pixels
  bool near;   // neighbouring pixels read neighbouring columns
  Divisor by_pair, by_image_columns;

  template <typename T>
  static Stage make(int warps, int columns, int rows, int pixels, int pixel_weights, int image_rows,
                    int image_columns, bool near) {
    constexpr int word = 4 / sizeof(T), align = 16 / sizeof(T);
    // So that the lanes read different banks. Two lanes of a bank are few enough.
    const int padding = 2 * pixel_weights % (4 * word) == 0 ? word : 0;
    const int weights = pixels * pixel_weights + (pixels + 1) / 2 * padding;
    // A row begins where it does in device memory, up to a unit after an aligned address.
    const int pitch = (weights + 2 * align - 1) / align * align;
    return {columns,
            rows,
            pixels,
            std::max(warps / rows, 1),
            pixel_weights,
            padding,
            pitch,
            image_rows,
            image_columns,
            0,
            near,
            Divisor(2 * pixel_weights),
            Divisor(image_columns)};
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

// Begins to copy bytes to shared memory.
template <int Bytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (Bytes == 16)  // past the L1 cache
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(Bytes));
}

// Copies weights to shared memory, zeros for pixels that do not exist, or back.
template <int Bytes, bool Back, typename T, typename U>
__device__ __forceinline__ void copy_units(const Stage& s, const StagedRows<U>& rows, T* staged) {
  constexpr int V = Bytes / sizeof(T);
  using Bits = bits_t<Bytes>;
  const auto place = [&](int e) { return Bytes == 16 ? e : e + s.by_pair.quotient(e) * s.padding; };
  const int warps = blockDim.x / kWarp, at_once = max(warps / s.sharing, 1);
  const int warp = threadIdx.x / kWarp, group = warp / s.sharing;
  const int thread = threadIdx.x - group * s.sharing * kWarp, all = s.pixels * s.pixel_weights;
#pragma unroll 1
  for (int r = group; r < s.rows; r += at_once) {
    U* row = rows.at(r);
    const int offset = rows.offset(r);
    T* to = staged + r * s.pitch + offset;
    const int first = rows.exists(r) ? rows.first * s.pixel_weights : 0;
    const int last = rows.exists(r) ? rows.last * s.pixel_weights : 0;
    // Elements of a unit are of one pair of pixels where the row begins with a unit.
    const bool whole = Bytes == 16 || offset % V == 0;
#pragma unroll 1
    for (int e = thread * V - offset % V; e < all; e += s.sharing * kWarp * V) {
      if (e >= first && e + V <= last && whole) {
        T* shared = to + place(e);
        if constexpr (Back)
          __stcs(reinterpret_cast<Bits*>(row + e), *reinterpret_cast<const Bits*>(shared));
        else
          copy_async<Bytes>(shared, row + e);
        continue;
      }
#pragma unroll 1
      for (int i = max(e, 0); i < min(e + V, all); ++i) {
        const bool exists = i >= first && i < last;
        if constexpr (Back) {
          if (exists) row[i] = to[place(i)];
        } else {
          to[place(i)] = exists ? row[i] : narrow<T>(acc_t<T>(0));
        }
      }
    }
  }
}
template <bool Back = false, typename T, typename U>
__device__ __forceinline__ void copy_weights(const Stage& s, const StagedRows<U>& rows, T* staged) {
  if (s.padding)
    copy_units<4, Back>(s, rows, staged);
  else
    copy_units<16, Back>(s, rows, staged);
}
// Waits until all weights and pixels are in shared memory.
__device__ __forceinline__ void wait_for_stage() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
}

// The channels of a group of a pixel. Columns of a row lie apart by whether they are even, so that
// lanes, which begin at even ones, read neighbours.
template <typename T, int N>
using Channels = Pack<T, N == 3 ? 4 : N>;

__device__ __forceinline__ int place_of(int column, int columns) {
  return column / 2 + (column % 2 ? columns / 2 : 0);
}

// Loads a tile of an image, from the channel at `data` on. row(r) and column(c) are where the
// tile's pixels are from there, or less than 0 for pixels that are zeros.
template <int N, typename T, typename Row, typename Column>
__device__ __forceinline__ void load_image(const Stage& s, const T* data, int64_t next_channel,
                                           Channels<T, N>* staged, Row&& row, Column&& column) {
  constexpr int together = 4;  // loads whose latencies overlap
  const int all = s.image_rows * s.image_columns;
#pragma unroll 1
  for (int first = threadIdx.x; first < all; first += together * blockDim.x) {
    Channels<T, N> pixels[together] = {};
    int places[together];
#pragma unroll
    for (int i = 0; i < together; ++i) {
      const int n = first + i * blockDim.x, r = s.by_image_columns.quotient(n);
      const int c = n - r * s.image_columns;
      places[i] = r * s.image_columns + place_of(c, s.image_columns);
      if (n >= all) continue;
      const int64_t h = row(r), w = column(c);
      if (h < 0 || w < 0) continue;
      const T* pixel = data + h + w;
#pragma unroll
      for (int m = 0; m < N; ++m) pixels[i].e[m] = __ldg(pixel + m * next_channel);
    }
#pragma unroll
    for (int i = 0; i < together; ++i)
      if (first + i * blockDim.x < all) staged[places[i]] = pixels[i];
  }
}

// Where the pixels of a tile are that the windows of the output pixels from h, w on read.
__device__ __forceinline__ void find_pixels(const Stage& s, const Windows& p,
                                            const ImageStrides& strides, int h, int w,
                                            int64_t* places) {
  const auto find = [](const Line& line, int position, int64_t stride) {
    const int pixel = line.pixel_at(position);
    return line.is_inside(pixel) ? pixel * stride : -1;  // what is far outside no window reads
  };
  const int top = p.down.first_position(h), left = p.across.first_position(w);
  for (int r = threadIdx.x; r < s.image_rows; r += blockDim.x)
    places[r] = find(p.down, top + r, strides.h);
  for (int c = threadIdx.x; c < s.image_columns; c += blockDim.x)
    places[s.image_rows + c] = find(p.across, left + c, strides.w);
  __syncthreads();
}

template <int K>
__device__ __forceinline__ int pixel_weights(const Stage& s) {
  return K != kAnyK ? K * K : s.pixel_weights;
}

// Calls f(j, one, other) for all taps j of a row with the channels of what two pixels read: the
// columns that are j steps from `first` and from `second`. Near ones are first + j, first + j + 1.
template <int K, int N, typename T, typename F>
__device__ __forceinline__ void for_each_column(const Stage& s, const Line& line,
                                                const Channels<T, N>* row, int first, int second,
                                                F&& f) {
  using A = acc_t<T>;
  constexpr int V = sizeof(Channels<T, N>) / sizeof(T);
  const auto read = [](const Channels<T, N>* from, A(&to)[V]) {
    Pack<T, V> pack;
    using Bits = bits_t<sizeof(pack)>;
    *reinterpret_cast<Bits*>(&pack) = *reinterpret_cast<const Bits*>(from);
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

// Where a thread is in a tile whose rows some warps share: its row, the first of its taps' rows and
// how many are from that to its next, and its first column.
struct TilePlace {
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int sharing, row, part, h, w;
  int64_t b = blockIdx.z;
  bool exists, second;
  int top, left;  // of the tile

  __device__ TilePlace(const Stage& s, const Windows& p)
      : sharing(kStagedWarps / s.rows), row(warp / sharing), part(warp - row * sharing) {
    top = blockIdx.y * s.rows, left = blockIdx.x * s.columns;
    h = top + row, w = left + 2 * lane;
    exists = h < p.down.out && 2 * lane < s.columns && w < p.across.out;
    second = w + 1 < p.across.out;
  }
};

template <typename T>
__device__ __forceinline__ StagedRows<T> rows_of_tile(const Weights<T>& weight, const Stage& s,
                                                      const Windows& p, const TilePlace& at) {
  return {weight.at(0, at.b, 0, at.top, at.left), weight.s.h, at.top, 1, p.down.out, 0,
          min(s.columns, p.across.out - at.left)};
}

// Calls f(taps, one, other) for each tap of a thread's two pixels of group g with where its weight
// of the first is in shared memory, and the channels that both read.
template <int K, int N, typename T, typename F>
__device__ __forceinline__ void for_each_tap(const Stage& s, const Windows& p, const TilePlace& at,
                                             T* weights, const Channels<T, N>* image, int g,
                                             F&& f) {
  const int k = K != kAnyK ? K : p.across.taps, G = K != kAnyK ? 1 : p.G;
  const int first = p.across.first_position(at.w) - p.across.first_position(at.left);
  const int second = p.across.first_position(at.w + 1) - p.across.first_position(at.left);
  const int y = p.down.first_position(at.h) - p.down.first_position(at.top);
  weights += at.lane * (2 * pixel_weights<K>(s) + s.padding) + g;
  for (int i = at.part; i < (K != kAnyK ? K : p.down.taps); i += at.sharing) {
    const auto* row = image + (y + i * p.down.step) * s.image_columns;
    T* taps = weights + i * k * G;
    for_each_column<K, N, T>(
        s, p.across, row, first, second,
        [&](int j, const auto& one, const auto& other) { f(taps + j * G, one, other); });
  }
}

template <typename T, int N, int K>
__global__ void __launch_bounds__(kStagedWarps* kWarp, 5)
    apply_staged(Image<const T> x, Weights<const T> weight, Image<T> out, Windows p, Stage s) {
  using A = acc_t<T>;
  extern __shared__ uint4 shared[];
  T* weights = reinterpret_cast<T*>(shared);
  auto* image = reinterpret_cast<Channels<T, N>*>(weights + s.rows * s.pitch);
  A* sums = reinterpret_cast<A*>(image);  // of the warps that share a row, in the pixels' place
  auto* places = reinterpret_cast<int64_t*>(shared) + s.places;
  const TilePlace at(s, p);
  const auto rows = rows_of_tile(weight, s, p, at);
  copy_weights(s, rows, weights);
  find_pixels(s, p, x.s, at.top, at.left, places);
  for (int g = 0; g < p.G; ++g) {
    if (g > 0) __syncthreads();
    load_image<N>(
        s, x.at(at.b, g * N, 0, 0), x.s.c, image, [&](int r) { return places[r]; },
        [&](int c) { return places[s.image_rows + c]; });
    wait_for_stage();
    A sum[2 * N] = {};
    if (at.exists)
      for_each_tap<K, N>(s, p, at, weights + at.row * s.pitch + rows.offset(at.row), image, g,
                         [&](const T* taps, const auto& one, const auto& other) {
                           const A tap = widen<A>(taps[0]);
                           const A next = widen<A>(taps[pixel_weights<K>(s)]);
#pragma unroll
                           for (int c = 0; c < N; ++c) {
                             sum[c] += tap * one[c];
                             sum[N + c] += next * other[c];
                           }
                         });
    if (at.sharing > 1) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) sums[(at.warp * 2 * N + i) * kWarp + at.lane] = sum[i];
      __syncthreads();
      for (int other = 1; other < at.sharing && at.part == 0; ++other)
#pragma unroll
        for (int i = 0; i < 2 * N; ++i)
          sum[i] += sums[((at.warp + other) * 2 * N + i) * kWarp + at.lane];
    }
    if (at.exists && at.part == 0)
      store_two<N>(out.at(at.b, g * N, at.h, at.w), out.s, at.second, sum);
  }
}

template <typename T, int N, int K>
__global__ void __launch_bounds__(kStagedWarps* kWarp, 5)
    sum_staged(Image<const T> grad, Image<const T> x, Weights<T> out, Windows p, Stage s) {
  using A = acc_t<T>;
  extern __shared__ uint4 shared[];
  T* weights = reinterpret_cast<T*>(shared);
  auto* image = reinterpret_cast<Channels<T, N>*>(weights + s.rows * s.pitch);
  auto* places = reinterpret_cast<int64_t*>(shared) + s.places;
  const TilePlace at(s, p);
  const auto rows = rows_of_tile(out, s, p, at);
  find_pixels(s, p, x.s, at.top, at.left, places);
  for (int g = 0; g < p.G; ++g) {
    if (g > 0) __syncthreads();
    load_image<N>(
        s, x.at(at.b, g * N, 0, 0), x.s.c, image, [&](int r) { return places[r]; },
        [&](int c) { return places[s.image_rows + c]; });
    A one_gradient[N], other_gradient[N];
    const T* gradients = grad.at(at.b, g * N, at.h, at.w);
    load_channels<N, false>(gradients, grad.s.c, at.exists, one_gradient);
    load_channels<N, false>(gradients + grad.s.w, grad.s.c, at.exists && at.second, other_gradient);
    wait_for_stage();
    if (!at.exists) continue;
    for_each_tap<K, N>(s, p, at, weights + at.row * s.pitch + rows.offset(at.row), image, g,
                       [&](T* taps, const auto& one, const auto& other) {
                         A sum = 0, next = 0;
#pragma unroll
                         for (int c = 0; c < N; ++c) {
                           sum += one_gradient[c] * one[c];
                           next += other_gradient[c] * other[c];
                         }
                         taps[0] = narrow<T>(sum);
                         taps[pixel_weights<K>(s)] = narrow<T>(next);
                       });
  }
  __syncthreads();
  copy_weights<true>(s, rows, weights);
}

template <int K>
constexpr int kGatheringWarps = K != kAnyK ? K : kMostTaps;

// The gradient of x, of `segment` rows of a residue of the dilation, and one group. A warp owns
// every `taps`th of these rows.
template <typename T, int N, int K>
__global__ void __launch_bounds__(kGatheringWarps<K>* kWarp, 40 / kGatheringWarps<K>)
    gather_staged(Image<const T> grad, Weights<const T> weight, Image<T> out, Windows p, Stage s,
                  int segment) {
  using A = acc_t<T>;
  extern __shared__ uint4 shared[];
  T* weights = reinterpret_cast<T*>(shared);
  auto* image = reinterpret_cast<Channels<T, N>*>(weights + s.rows * s.pitch);
  const int lane = threadIdx.x % kWarp, step = p.down.step;
  const int down = K != kAnyK ? K : p.down.taps, k = K != kAnyK ? K : p.across.taps;
  const int each = pixel_weights<K>(s);
  const int part = blockIdx.y / step, top = part * segment * step + blockIdx.y - part * step;
  const int left = blockIdx.x * s.columns, w = left + 2 * lane;
  const int64_t b = blockIdx.z;
  if (top >= p.down.in) return;
  const bool exists = 2 * lane < s.columns && w < p.across.in;
  const int own = min(segment, (p.down.in - top + step - 1) / step);  // rows
  // The output pixels that read the first row and column by their last taps.
  const int y = top + p.down.before - (down - 1) * step;
  const int z = left + p.across.before - (k - 1) * p.across.step;
  const int first = min(max(-z, 0), s.pixels), last = max(min(s.pixels, p.across.out - z), first);
  int age = (down - static_cast<int>(threadIdx.x / kWarp)) % down;  // rows that a sum has
  A sum[2 * N] = {};
  for (int n = 0; n < own + down - 1; n += s.rows) {
    const int row = y + n * step;
    const StagedRows<const T> rows{
        weight.at(0, b, 0, row, z), step * weight.s.h, row, step, p.down.out, first, last};
    if (n > 0) __syncthreads();
    copy_weights(s, rows, weights);
    load_image<N>(
        s, grad.at(b, 0, 0, 0), grad.s.c, image,
        [&](int r) { return rows.exists(r) ? (row + r * step) * grad.s.h : -1; },
        [&](int c) { return c >= first && c < last ? (z + c) * grad.s.w : -1; });
    wait_for_stage();
    for (int r = 0; r < s.rows && n + r < own + down - 1; ++r) {
      if (exists && rows.exists(r)) {
        // The pixel of a column contributes by the tap j before the last one of the row.
        const T* taps = weights + r * s.pitch + rows.offset(r) + lane * (2 * each + s.padding) +
                        (down - age) * k - 1;
        const T* tap = taps;
        for_each_column<K, N, T>(s, p.across, image + r * s.image_columns, 2 * lane, 2 * lane + 1,
                                 [&](int j, const auto& one, const auto& other) {
                                   const int c = K != kAnyK || s.near ? j : j * p.across.step;
                                   if (K == kAnyK && !s.near)
                                     tap = taps + c * each + c / 2 * s.padding - j;
                                   const T* next = tap + each + (c % 2 ? s.padding : 0);
                                   const A factor = widen<A>(*tap), next_factor = widen<A>(*next);
#pragma unroll
                                   for (int m = 0; m < N; ++m) {
                                     sum[m] += factor * one[m];
                                     sum[N + m] += next_factor * other[m];
                                   }
                                   tap = next - 1;
                                 });
      }
      if (++age < down) continue;
      const int done = n + r - (down - 1);
      if (exists && done >= 0)
        store_two<N>(out.at(b, 0, top + done * step, w), out.s, w + 1 < p.across.in, sum);
      age = 0;
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) sum[i] = 0;
    }
  }
}

// An even number of columns, as few as cut a row in as many parts.
inline int64_t even_columns(int64_t W, int64_t most) {
  const int64_t parts = (W + most - 1) / most;
  return (W + 2 * parts - 1) / (2 * parts) * 2;
}

// The stage of a block, and the bytes that it takes; none where they do not fit.
template <typename T>
std::optional<std::pair<Stage, int>> fitting_stage(const Problem& p, int64_t warps, int64_t sums,
                                                   int64_t columns, int64_t rows, int64_t pixels,
                                                   int64_t image_rows, int64_t image_columns,
                                                   bool near) {
  constexpr int64_t most = 1 << 16, most_weights = 1 << 12;  // that the divisors take
  const int64_t weights = p.taps() * p.G, N = p.group_channels();
  image_columns += image_columns % 2;
  if (weights >= most_weights || pixels >= most || image_rows >= most || image_columns >= most ||
      image_rows * image_columns >= most)
    return std::nullopt;
  const int64_t available = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (rows * pixels * weights * int64_t{sizeof(T)} > available) return std::nullopt;
  Stage s = Stage::make<T>(warps, columns, rows, pixels, weights, image_rows, image_columns, near);
  const int64_t image = image_rows * image_columns * sizeof(T) * (N == 3 ? 4 : N);
  constexpr int64_t word = sizeof(int64_t);
  s.places = (rows * s.pitch * sizeof(T) + std::max(image, sums) + word - 1) / word;
  const int64_t bytes = (s.places + image_rows + image_columns) * word;
  if (bytes > available) return std::nullopt;
  return std::pair(s, static_cast<int>(bytes));
}

// Whether the weights of a pixel are neighbours, and of few channels.
inline bool are_staged(const Tensor& weight, const Problem& p) {
  const WeightStrides s = weight_strides(weight);
  const int64_t weights = p.taps() * p.G;
  return weight.element_size() <= 4 && weights > 1 && s.w == weights && (p.G == 1 || s.g == 1) &&
         (p.taps() == 1 || s.tap == p.G) && p.G < kManyGroups &&
         p.group_channels() <= kFewChannels && p.B <= kMaxGridYZ;
}

// Calls f(N, K).
template <typename F>
void dispatch_staged(const Problem& p, const Stage& s, F&& f) {
  using std::integral_constant;
  const auto with_taps = [&](auto N) {
    const bool square = s.near && p.G == 1 && p.down.taps == p.across.taps;
    switch (square ? p.across.taps : kAnyK) {
      case 3:
        return f(N, integral_constant<int, 3>{});
      case 5:
        return f(N, integral_constant<int, 5>{});
      case 7:
        return f(N, integral_constant<int, 7>{});
      default:
        return f(N, integral_constant<int, kAnyK>{});
    }
  };
  static_assert(kFewChannels == 4);
  switch (p.group_channels()) {
    case 1:
      return with_taps(integral_constant<int, 1>{});
    case 2:
      return with_taps(integral_constant<int, 2>{});
    case 3:
      return with_taps(integral_constant<int, 3>{});
    default:
      return with_taps(integral_constant<int, 4>{});
  }
}

// Calls f(N, K, grid, bytes, stage) for a kernel that computes output pixels, or their weights'
// gradient; returns false where none takes them.
template <typename T, typename F>
bool dispatch_tiles(const Tensor& weight, const Problem& p, F&& f) {
  if constexpr (sizeof(T) > 4) {
    return false;
  } else {
    if (!are_staged(weight, p)) return false;
    check_positions(p);
    const int64_t bytes_of_pixel = p.taps() * p.G * sizeof(T);
    int64_t rows = kStagedWarps, columns = even_columns(p.across.out, kMostColumns);
    while (rows > 1 && rows * columns * bytes_of_pixel > kTileBytes) rows /= 2;
    while (columns > 2 && columns * bytes_of_pixel > 2 * kTileBytes)
      columns = even_columns(columns, columns / 2);
    const auto positions = [](const Axis& a, int64_t pixels) {
      return ((pixels - 1) / a.scale + (a.scale > 1)) * a.stride + (a.taps - 1) * a.step() + 1;
    };
    const int64_t sums = kStagedWarps * kWarp * 2 * p.group_channels() * sizeof(acc_t<T>);
    const auto stage =
        fitting_stage<T>(p, kStagedWarps, sums, columns, rows, columns, positions(p.down, rows),
                         positions(p.across, columns), p.across.is_dense() && p.across.step() == 1);
    const dim3 grid((p.across.out + columns - 1) / columns, (p.down.out + rows - 1) / rows, p.B);
    if (!stage || grid.y > kMaxGridYZ) return false;
    dispatch_staged(p, stage->first,
                    [&](auto N, auto K) { f(N, K, grid, stage->second, stage->first); });
    return true;
  }
}

template <typename Kernel, typename... Arguments>
void launch_staged(Kernel kernel, dim3 grid, int threads, int bytes, cudaStream_t stream,
                   const Arguments&... arguments) {
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<grid, threads, bytes, stream>>>(arguments...);
}

// Launch their kernel where it takes the problem; return whether it does.
template <typename T>
bool apply_from_stage(const Tensor& x, const Tensor& weight, Tensor& out, const Problem& p,
                      cudaStream_t stream) {
  return dispatch_tiles<T>(weight, p, [&](auto N, auto K, dim3 grid, int bytes, const Stage& s) {
    launch_staged(apply_staged<T, N, K>, grid, kStagedWarps * kWarp, bytes, stream, image<T>(x),
                  weights<T>(weight), mutable_image<T>(out), Windows(p), s);
  });
}

template <typename T>
bool sum_to_stage(const Tensor& grad, const Tensor& x, Tensor& out, const Problem& p,
                  cudaStream_t stream) {
  return dispatch_tiles<T>(out, p, [&](auto N, auto K, dim3 grid, int bytes, const Stage& s) {
    launch_staged(sum_staged<T, N, K>, grid, kStagedWarps * kWarp, bytes, stream, image<T>(grad),
                  image<T>(x), mutable_weights<T>(out), Windows(p), s);
  });
}

template <typename T>
bool gather_from_stage(const Tensor& grad, const Tensor& weight, Tensor& out, const Problem& p,
                       cudaStream_t stream) {
  if constexpr (sizeof(T) > 4) {
    return false;
  } else {
    if (!are_staged(weight, p) || p.G > 1 || !p.is_dense()) return false;
    check_positions(p);
    const int64_t down = p.down.taps, step = p.down.step(), threads = down * kWarp;
    const int64_t around = (p.across.taps - 1) * p.across.step();
    std::optional<std::pair<Stage, int>> stage;
    for (int64_t most = kMostColumns; !stage && most > 2; most /= 2) {
      const int64_t columns = even_columns(p.across.in, most), pixels = columns + around;
      const int64_t bytes_of_row = pixels * p.taps() * sizeof(T);
      const int64_t rows =
          std::clamp<int64_t>(threads * kBytesOfThread / bytes_of_row, 1, kSomeRows);
      stage =
          fitting_stage<T>(p, down, 0, columns, rows, pixels, rows, pixels, p.across.step() == 1);
    }
    if (!stage) return false;
    // As many segments as fill the GPU: between two of them weights are read twice.
    const int64_t strips = (p.across.in + stage->first.columns - 1) / stage->first.columns;
    const int64_t rows = (p.down.in + step - 1) / step;
    const int64_t enough = kEnoughWarps / (down * strips * p.B * step);
    const int64_t parts = std::clamp<int64_t>(rows / down, 1, std::max<int64_t>(enough, 1));
    const int64_t segment = (rows + parts - 1) / parts;
    const dim3 grid(strips, (rows + segment - 1) / segment * step, p.B);
    if (grid.y > kMaxGridYZ) return false;
    dispatch_staged(p, stage->first, [&](auto N, auto K) {
      launch_staged(gather_staged<T, N, K>, grid, threads, stage->second, stream, image<T>(grad),
                    weights<T>(weight), mutable_image<T>(out), Windows(p), stage->first,
                    static_cast<int>(segment));
    });
    return true;
  }
}

}  // namespace hoconv::high_order::conv2d
