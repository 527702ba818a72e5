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
// A thread owns two neighbouring pixels of a row. Windows that are a pixel apart read the same
// columns, so that a column is loaded once for both. In 16-bit types the weights of two pixels are
// as many words as there are taps: where that is odd, the lanes' loads are in 32 banks.
//
// For the gradient of x a block owns some columns of some rows, and each warp one of the rows that
// the current row of weights contributes to. The block goes down the rows: with each the oldest
// row of the gradient is complete, and its warp begins a new one. So a block reads its weights
// once, but for those of the columns and rows around its own.
//
// An example, 64 images of 3 channels, 224 x 224, k = 5, in bfloat16: the weights are 161 MB, both
// images 39 MB, 49 us of an H200's memory; 240 million products. Five taps of a thread's two pixels
// take 84 instructions as compiled for sm_90, 23 us of all schedulers; to copy a pixel of an image
// takes 55, and as many pixels are copied as a tile and the windows around it have. The output
// takes 74 us, the gradient of the weights 82, that of x 104. What binds them is the instructions,
// and that a multiprocessor has few tiles at once: in float32 the output takes 117 us, 83 % of
// what its memory could. What did not help: tiles of more rows with fewer of them at once, more
// registers, fewer with spills, and narrower tiles, whose warps have two rows and bank conflicts.
//
// B batch, C channels, G groups of channels, N channels of a group, K taps of a row.
#pragma once

#include <limits>
#include <optional>

#include "high_order/conv2d/cuda/stage.cuh"

namespace hoconv::high_order::conv2d {

constexpr int kMostColumns = 2 * kWarp;  // of a block
constexpr int kStagedThreads = 256;      // of a tile
constexpr int kTileRegisters = 40;       // of a thread: six tiles fit a multiprocessor
constexpr int kTileBytes = 32 << 10;     // of weights
constexpr int kMostRows = 18;            // of a tile
// What a thread takes for a tap of its two pixels, for a pixel of the image, and for a tile.
constexpr int kTapInstructions = 18, kLoadInstructions = 50, kTileInstructions = 300;
constexpr int kGatherRegisters = 48;
constexpr int kBytesOfThread = 100;   // of a stage of weights
constexpr int kSomeRows = 8;          // of a stage
constexpr int kLeastRows = 12;        // of the gradient that a block computes
constexpr int kReservedBytes = 1024;  // of shared memory, for each block
constexpr int kFewChannels = 4;       // of a group
constexpr int kManyGroups = 32;  // with which general.cuh has neighbouring threads for neighbours

// How the threads of a block share a tile: a group of threads has the columns of a row, or, where
// groups share a row, of some of its rows of taps.
struct Groups {
  int at_once, sharing;  // rows of all groups; groups of a row
  Divisor by_thread, by_group;

  Groups(int threads, int rows)
      : at_once(std::min(kStagedThreads / threads, rows)),
        sharing(kStagedThreads / threads / at_once),
        by_thread(threads),
        by_group(sharing) {}
};

// Where a thread is in a tile: its columns, its first row, and which rows of taps it computes.
struct TilePlace {
  int pair, row, part, w;
  int top, left;  // of the tile
  int64_t b = blockIdx.z;
  bool exists, second;  // of its two columns

  __device__ TilePlace(const Stage& s, const Groups& groups, const Windows& p) {
    const int group = groups.by_thread.quotient(threadIdx.x);
    pair = threadIdx.x - group * groups.by_thread.d;
    row = groups.by_group.quotient(group), part = group - row * groups.sharing;
    top = blockIdx.y * s.rows, left = blockIdx.x * s.columns, w = left + 2 * pair;
    exists = row < groups.at_once && w < p.across.out, second = w + 1 < p.across.out;
  }
  template <typename T>
  __device__ StagedRows<T> rows(const Weights<T>& weight, const Stage& s, const Windows& p) const {
    const int pixels = min(s.columns, p.across.out - left);
    return {weight.at(0, b, 0, top, left), weight.s.h, top, 1, p.down.out, 0, pixels};
  }
};

// Calls f(taps, one, other) for each tap of a thread's two pixels of a row of a tile, whose weights
// of the group are from `weights` on: with where that of the first is, and the channels that both
// read.
template <int K, int N, typename T, typename F>
__device__ __forceinline__ void for_each_tap(const Stage& s, const Groups& groups, const Windows& p,
                                             const TilePlace& at, int row, T* weights,
                                             const Channels<T, N>* image, F&& f) {
  const int down = K != kAnyK ? K : p.down.taps, across = K != kAnyK ? K : p.across.taps;
  const int G = K != kAnyK ? 1 : p.G, step = K != kAnyK ? 1 : p.down.step;
  int first = 2 * at.pair, second = first + 1, y = row;  // where windows are a pixel apart
  if constexpr (K == kAnyK) {
    const int left = p.across.first_position(at.left);
    first = p.across.first_position(at.w) - left;
    second = p.across.first_position(at.w + 1) - left;
    y = p.down.first_position(at.top + row) - p.down.first_position(at.top);
  }
  weights += at.pair * (2 * s.template weights_of_pixel<K>() + s.padding);
  for (int i = at.part; i < down; i += groups.sharing) {
    T* taps = weights + i * across * G;
    for_each_column<K, N, T>(
        s, p.across, image + (y + i * step) * s.image_columns, first, second,
        [&](int j, const auto& one, const auto& other) { f(taps + j * G, one, other); });
  }
}

template <typename T, int N, int K>
__global__ void __maxnreg__(kTileRegisters)
    apply_staged(Image<const T> x, Weights<const T> weight, Image<T> out, Windows p, Stage s,
                 Groups groups) {
  using A = acc_t<T>;
  extern __shared__ uint4 shared[];
  T* weights = reinterpret_cast<T*>(shared);
  auto* image = staged_image<T, N>(s, shared);
  A* sums = reinterpret_cast<A*>(shared);  // of groups that share a row, in the weights' place
  const TilePlace at(s, groups, p);
  const auto rows = at.rows(weight, s, p);
  for (int g = 0; g < p.G; ++g) {
    if (g == 0 || groups.sharing > 1) copy_weights(s, rows, weights);
    load_windows<N>(s, p, x.at(at.b, g * N, 0, 0), x.s, at.top, at.left, image);
    wait_for_stage();
    for (int above = 0; above < s.rows; above += groups.at_once) {
      const int r = above + at.row;
      const bool exists = at.exists && r < s.rows && at.top + r < p.down.out;
      A sum[2 * N] = {};
      if (exists)
        for_each_tap<K, N>(s, groups, p, at, r, weights + r * s.pitch + rows.offset(r) + g, image,
                           [&](const T* taps, const auto& one, const auto& other) {
                             const A tap = widen<A>(taps[0]);
                             const A next = widen<A>(taps[s.template weights_of_pixel<K>()]);
#pragma unroll
                             for (int c = 0; c < N; ++c) {
                               sum[c] += tap * one[c];
                               sum[N + c] += next * other[c];
                             }
                           });
      if (groups.sharing > 1) {  // and no group has two rows
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) sums[i * kStagedThreads + threadIdx.x] = sum[i];
        __syncthreads();
#pragma unroll 1
        for (int other = 1; other < groups.sharing && at.part == 0 && exists; ++other)
#pragma unroll
          for (int i = 0; i < 2 * N; ++i)
            sum[i] += sums[i * kStagedThreads + threadIdx.x + other * groups.by_thread.d];
      }
      if (exists && at.part == 0)
        store_two<N>(out.at(at.b, g * N, at.top + r, at.w), out.s, at.second, sum);
    }
    __syncthreads();
  }
}

template <typename T, int N, int K>
__global__ void __maxnreg__(kTileRegisters)
    sum_staged(Image<const T> grad, Image<const T> x, Weights<T> out, Windows p, Stage s,
               Groups groups) {
  using A = acc_t<T>;
  extern __shared__ uint4 shared[];
  T* weights = reinterpret_cast<T*>(shared);
  auto* image = staged_image<T, N>(s, shared);
  const TilePlace at(s, groups, p);
  const auto rows = at.rows(out, s, p);
  const auto exists = [&](int r) { return at.exists && r < s.rows && at.top + r < p.down.out; };
  for (int g = 0; g < p.G; ++g) {
    int r = at.row;
    A one_gradient[N], other_gradient[N];
    const auto load_gradients = [&](int r) {
      const T* from = grad.at(at.b, g * N, at.top + r, at.w);
      load_channels<N, false>(from, grad.s.c, exists(r), one_gradient);
      load_channels<N, false>(from + grad.s.w, grad.s.c, exists(r) && at.second, other_gradient);
    };
    load_gradients(r);
    load_windows<N>(s, p, x.at(at.b, g * N, 0, 0), x.s, at.top, at.left, image);
    __syncthreads();
    for (; exists(r); load_gradients(r += groups.at_once)) {
      for_each_tap<K, N>(s, groups, p, at, r, weights + r * s.pitch + rows.offset(r) + g, image,
                         [&](T* taps, const auto& one, const auto& other) {
                           A sum = 0, next = 0;
#pragma unroll
                           for (int c = 0; c < N; ++c) {
                             sum += one_gradient[c] * one[c];
                             next += other_gradient[c] * other[c];
                           }
                           taps[0] = narrow<T>(sum);
                           taps[s.template weights_of_pixel<K>()] = narrow<T>(next);
                         });
    }
    __syncthreads();
  }
  copy_weights<true>(s, rows, weights);
}

// The gradient of x, of one group, of `segment` rows that are a dilation apart. A warp owns every
// so many-th of these rows as the window has taps down. While one stage of weights is read, the
// next is copied.
template <typename T, int N, int K>
__global__ void __maxnreg__(kGatherRegisters)
    gather_staged(Image<const T> grad, Weights<const T> weight, Image<T> out, Windows p, Stage s,
                  int segment) {
  using A = acc_t<T>;
  extern __shared__ uint4 shared[];
  const int lane = threadIdx.x % kWarp, step = p.down.step;
  const int down = K != kAnyK ? K : p.down.taps, across = K != kAnyK ? K : p.across.taps;
  const int weights = s.template weights_of_pixel<K>();
  const int part = blockIdx.y / step, top = part * segment * step + blockIdx.y - part * step;
  if (top >= p.down.in) return;
  const int left = blockIdx.x * s.columns, w = left + 2 * lane;
  const int64_t b = blockIdx.z;
  const bool exists = 2 * lane < s.columns && w < p.across.in;
  const int own = min(segment, (p.down.in - top + step - 1) / step);  // rows
  // The output pixels that read the first row and column by their last taps.
  const int y = top + p.down.before - (down - 1) * step;
  const int z = left + p.across.before - (across - 1) * p.across.step;
  const int first = min(max(-z, 0), s.pixels), last = max(min(s.pixels, p.across.out - z), first);
  const auto rows_from = [&](int n) {
    const int row = y + n * step;
    return StagedRows<const T>{
        weight.at(0, b, 0, row, z), step * weight.s.h, row, step, p.down.out, first, last};
  };
  const auto begin = [&](int n, uint4* stage) {
    const auto rows = rows_from(n);
    copy_weights(s, rows, reinterpret_cast<T*>(stage), [&](int r) {
      const int missing = down - 1 - (n + r);  // rows of taps, which would contribute above `top`
      return Needed{max(missing, 0) * across, min(missing + own, down) * across};
    });
    load_image<N>(s, grad.at(b, 0, 0, 0), grad.s.c, staged_image<T, N>(s, stage),
                  [&](int r, int c) {
                    const bool inside = rows.exists(r) && c >= first && c < last;
                    return inside ? (rows.row + r * step) * grad.s.h + (z + c) * grad.s.w : -1;
                  });
  };
  const int all = own + down - 1;
  int age = (down - static_cast<int>(threadIdx.x / kWarp)) % down;  // rows that a sum has
  A sum[2 * N] = {};
  uint4 *current = shared, *following = shared + s.bytes / sizeof(uint4);
  begin(0, current);
  for (int n = 0; n < all; n += s.rows) {
    wait_for_stage();
    if (n + s.rows < all) begin(n + s.rows, following);
    const auto rows = rows_from(n);
    const auto* image = staged_image<T, N>(s, current);
    for (int r = 0; r < s.rows && n + r < all; ++r) {
      const int done = n + r - age;  // the row that the sum is of
      const bool owns = exists && done >= 0 && done < own;
      if (owns && rows.exists(r)) {
        // The pixel of a column contributes by the tap j before the last one of the row.
        const T* taps = reinterpret_cast<const T*>(current) + r * s.pitch + rows.offset(r) +
                        lane * (2 * weights + s.padding) + (down - age) * across - 1;
        const T* tap = taps;
        for_each_column<K, N, T>(s, p.across, image + r * s.image_columns, 2 * lane, 2 * lane + 1,
                                 [&](int j, const auto& one, const auto& other) {
                                   const bool near = K != kAnyK || s.near;
                                   const int c = near ? j : j * p.across.step;
                                   if (!near) tap = taps + c * weights + c / 2 * s.padding - j;
                                   const T* next = tap + weights + (c % 2 ? s.padding : 0);
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
      if (owns) store_two<N>(out.at(b, 0, top + done * step, w), out.s, w + 1 < p.across.in, sum);
      age = 0;
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) sum[i] = 0;
    }
    uint4* free = current;
    current = following, following = free;
  }
}

// An even number of columns, as few as cut a row in as many parts.
inline int64_t even_columns(int64_t W, int64_t most) {
  const int64_t parts = (W + most - 1) / most;
  return (W + 2 * parts - 1) / (2 * parts) * 2;
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
void dispatch_staged(const Problem& p, F&& f) {
  using std::integral_constant;
  const auto is_constant = [](const Axis& a) { return a.is_dense() && a.step() == 1; };
  const bool square =
      p.G == 1 && is_constant(p.down) && is_constant(p.across) && p.down.taps == p.across.taps;
  const auto with_taps = [&](auto N) {
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

template <typename Kernel, typename... Arguments>
void launch_staged(Kernel kernel, dim3 grid, int threads, int bytes, cudaStream_t stream,
                   const Arguments&... arguments) {
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<grid, threads, bytes, stream>>>(arguments...);
}

// Calls launch(N, K, stage, groups, grid, bytes) for a kernel that computes tiles of the output, or
// of the gradient of the weights; returns false where none takes them.
template <typename T, typename F>
bool dispatch_tiles(const Tensor& weight, const Problem& p, F&& launch) {
  if constexpr (sizeof(T) > 4) {
    return false;
  } else {
    if (!are_staged(weight, p)) return false;
    check_positions(p);
    const auto positions = [](const Axis& a, int64_t pixels) {
      return ((pixels - 1) / a.scale + (a.scale > 1)) * a.stride + (a.taps - 1) * a.step() + 1;
    };
    // As wide as it may be, and as high as lets threads take the fewest instructions.
    const int64_t bytes_of_pixel = p.taps() * p.G * sizeof(T);
    int64_t columns = 0, rows = 0, fewest = std::numeric_limits<int64_t>::max();
    const auto none = [&] { return fewest == std::numeric_limits<int64_t>::max(); };
    for (int64_t most = kMostColumns; none() && most >= 2; most /= 2) {
      const int64_t w = even_columns(p.across.out, most);
      for (int64_t h = 1; h <= kMostRows; ++h) {
        if (h * w * bytes_of_pixel > (h == 1 ? 2 * kTileBytes : kTileBytes)) break;
        const Groups groups(w / 2, h);
        const int64_t passes = (h + groups.at_once - 1) / groups.at_once *
                               ((p.down.taps + groups.sharing - 1) / groups.sharing);
        const int64_t loads = positions(p.down, h) * positions(p.across, w) / kStagedThreads;
        const int64_t tiles = (p.down.out + h - 1) / h;
        const int64_t instructions = tiles * (passes * p.across.taps * kTapInstructions +
                                              loads * kLoadInstructions + kTileInstructions);
        if (instructions < fewest) columns = w, rows = h, fewest = instructions;
      }
    }
    if (none()) return false;
    const auto stage = Stage::make<T>(p, columns, rows, columns, positions(p.down, rows),
                                      positions(p.across, columns), kStagedThreads / kWarp,
                                      device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
    const dim3 grid((p.across.out + columns - 1) / columns, (p.down.out + rows - 1) / rows, p.B);
    if (!stage || grid.y > kMaxGridYZ) return false;
    const int64_t sums = kStagedThreads * 2 * p.group_channels() * sizeof(acc_t<T>);
    const int bytes =
        std::max<int64_t>(stage->bytes, Groups(columns / 2, rows).sharing > 1 ? sums : 0);
    dispatch_staged(
        p, [&](auto N, auto K) { launch(N, K, *stage, Groups(columns / 2, rows), grid, bytes); });
    return true;
  }
}

// Launch their kernel where it takes the problem; return whether it does.
template <typename T>
bool apply_from_stage(const Tensor& x, const Tensor& weight, Tensor& out, const Problem& p,
                      cudaStream_t stream) {
  return dispatch_tiles<T>(
      weight, p,
      [&](auto N, auto K, const Stage& stage, const Groups& groups, dim3 grid, int bytes) {
        launch_staged(apply_staged<T, N, K>, grid, kStagedThreads, bytes, stream, image<T>(x),
                      weights<T>(weight), mutable_image<T>(out), Windows(p), stage, groups);
      });
}

template <typename T>
bool sum_to_stage(const Tensor& grad, const Tensor& x, Tensor& out, const Problem& p,
                  cudaStream_t stream) {
  return dispatch_tiles<T>(
      out, p, [&](auto N, auto K, const Stage& stage, const Groups& groups, dim3 grid, int bytes) {
        launch_staged(sum_staged<T, N, K>, grid, kStagedThreads, bytes, stream, image<T>(grad),
                      image<T>(x), mutable_weights<T>(out), Windows(p), stage, groups);
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
    const int64_t step = p.down.step(), around = (p.across.taps - 1) * p.across.step();
    const int64_t threads = p.down.taps * kWarp;
    const int64_t available = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) / 2;
    std::optional<Stage> stage;
    for (int64_t most = kMostColumns; !stage && most > 2; most /= 2) {
      const int64_t columns = even_columns(p.across.in, most), pixels = columns + around;
      const int64_t bytes_of_row = pixels * p.taps() * sizeof(T);
      const int64_t rows = std::clamp<int64_t>(
          (threads * kBytesOfThread + bytes_of_row / 2) / bytes_of_row, 1, kSomeRows);
      stage = Stage::make<T>(p, columns, rows, pixels, rows, pixels, threads / kWarp, available);
    }
    if (!stage) return false;
    // As many segments as run at once: between two of them weights are read twice.
    const int bytes = 2 * stage->bytes;
    const int64_t strips = (p.across.in + stage->columns - 1) / stage->columns;
    const int64_t resident = std::min<int64_t>(
        device_attribute(cudaDevAttrMaxRegistersPerMultiprocessor) / (threads * kGatherRegisters),
        device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / (bytes + kReservedBytes));
    const int64_t enough =
        device_attribute(cudaDevAttrMultiProcessorCount) * resident / (strips * p.B * step);
    const int64_t rows = (p.down.in + step - 1) / step;
    const int64_t parts = std::clamp<int64_t>(rows / kLeastRows, 1, std::max<int64_t>(enough, 1));
    const int64_t segment = (rows + parts - 1) / parts;
    const dim3 grid(strips, (rows + segment - 1) / segment * step, p.B);
    if (grid.y > kMaxGridYZ) return false;
    dispatch_staged(p, [&](auto N, auto K) {
      launch_staged(gather_staged<T, N, K>, grid, threads, bytes, stream, image<T>(grad),
                    weights<T>(weight), mutable_image<T>(out), Windows(p), *stage, int(segment));
    });
    return true;
  }
}

}  // namespace hoconv::high_order::conv2d
