// How the kernels of banded.cuh cut a call, and how a block gets what it multiplies into shared
// memory.
//
// A strip is 16 neighbouring pixels of a row of what is written. By one row of taps they read a few
// neighbouring columns of one row of the source. So a row of taps is a product of matrices: of the
// band, which has the taps of each pixel at the columns that they read and zeros elsewhere, and of
// the source's row, its columns by its channels. For k = 3, a strip of 4 pixels and one channel:
//
//     out[0]   w00 w01 w02  .   .   .    x[0]
//     out[1] =  .  w10 w11 w12  .   .  * x[1]
//     out[2]    .   .  w20 w21 w22  .    ...
//     out[3]    .   .   .  w30 w31 w32   x[5]
//
// A scale, a stride or a dilation only moves the taps of a pixel to other columns. For the gradient
// of x the strip is of x, and the columns are output pixels that read it.
//
// A tile is a few strips of four rows, and some channels of a group. Its block goes down the rows
// of the source that they read, in turns: one row, and for each row of the tile the row of taps
// that reads it. Rows of a tile are as far apart as lets them read the same rows. What a thread
// moves, and to where, is the same in every turn, so it computes the addresses once; and zeros are
// stored once.
//
// B batch, C channels, G groups of channels.
#pragma once

#include <climits>

#include "high_order/conv2d/cuda/stage.cuh"
#include "high_order/tensor_cores.cuh"

namespace hoconv::high_order::conv2d {

constexpr int kStrip = 16;         // pixels: the rows of a product on tensor cores
constexpr int kTileRows = 4;       // each has sums in a warp's registers
constexpr int kMostStrips = 4;     // of a tile, side by side
constexpr int kWarpChannels = 32;  // that a warp computes of a strip
constexpr int kMostWarps = 8;      // of a block
constexpr int kUnit = 8;           // elements of 16 bytes
constexpr int kMostTurns = 256;
constexpr int kNone = INT_MIN;

// What one load has of a row of the source: 8 channels of a column, or for each of 8 channels an
// element, or those of two columns.
enum class RowLoads { channels, pairs, elements };

// The sizes of a block's work, which the host computes.
struct Bands {
  int strips, warps;
  int depth;  // columns of a band, a multiple of 16
  // Elements of shared memory from a pixel of a strip to the next, and from a strip to the next.
  int pitch, matrix;
  int columns, pixel;            // of a row of the source; elements from one to the next
  int channels, parts;           // of a group, that a block computes; blocks that share a group
  int tiles_down, tiles_across;  // of an image
  int apart;                     // rows of a tile
  int turns_apart;               // from a window to the next, of those of a tile's rows
  int most_turns;
  int weight_columns;  // whose weights are in the bands of a tile
  int row_loads;       // of a row of the source
  int bytes;
  Divisor by_scale_down, by_scale, by_parts, by_across, by_down, by_group, by_column, by_unit,
      by_weight_column, by_taps;

  __host__ __device__ int units() const { return channels / kUnit; }
};

// Where a block is: the first row and strip of its tile, its group and the first of its channels.
struct BandBlock {
  int64_t b;
  int row, strip, group, channel;

  __device__ explicit BandBlock(const Bands& s) {
    unsigned n = blockIdx.x;
    const auto take = [&](const Divisor& by) {
      const unsigned rest = by.quotient(n), digit = n - rest * by.d;
      n = rest;
      return static_cast<int>(digit);
    };
    channel = take(s.by_parts) * s.channels, strip = take(s.by_across) * s.strips;
    const int down = take(s.by_down);
    row = down / s.apart * kTileRows * s.apart + down % s.apart;
    group = take(s.by_group), b = n;
  }
};

// A turn of a tile: the row of the source that it reads, less than 0 for zeros.
struct alignas(16) Turn {
  int source;
  unsigned active;  // a bit for each row of the tile that reads it
  int64_t weights;  // elements to its weights
};

// Fills `turns` with those of a tile in which something is multiplied, and, with `zeros`, those
// that read zeros; returns how many. All threads of the block call it.
template <bool Adjoint>
__device__ int list_turns(const Line& line, const Bands& s, int row, bool zeros,
                          int64_t row_of_taps, int64_t row_of_weights, Turn* turns, int& count) {
  const int lane = threadIdx.x;
  if (lane < kWarp) {
    int first_tap = 0, taps = line.taps, window = s.by_scale_down.quotient(row);
    if constexpr (Adjoint) {
      first_tap = line.phase_of(row);
      taps = first_tap < line.taps ? (line.taps - first_tap + line.phases - 1) / line.phases : 0;
      window = (row + line.before - first_tap * line.step) / line.stride - (taps - 1) * line.hop;
    }
    int found = 0;
    for (int first = 0; first < s.most_turns; first += kWarp) {
      const int n = first + lane, down = s.by_scale_down.quotient(n);
      Turn turn{-1, 0, n * row_of_taps};
      if constexpr (Adjoint) {
        const int at = window + down * line.hop;
        if (at >= 0 && at < line.windows) turn.source = at * line.scale + n - down * line.scale;
        turn.weights = (first_tap + (taps - 1 - down) * line.phases) * row_of_taps +
                       turn.source * row_of_weights;
      } else {
        turn.source = line.pixel_at(window * line.stride - line.before + n * line.step);
      }
      for (int m = 0; m < kTileRows; ++m) {
        const int h = row + m * s.apart;
        if (h >= (Adjoint ? line.in : line.out)) break;
        const int later = Adjoint || line.scale == 1 ? m : s.by_scale_down.quotient(h) - window;
        const int tap = Adjoint ? later + taps - 1 - down : n - later * s.turns_apart;
        if (tap >= 0 && tap < taps) turn.active |= 1u << m;
      }
      const bool is_one = n < s.most_turns && turn.active && (zeros || turn.source >= 0);
      const unsigned those = __ballot_sync(~0u, is_one);
      if (is_one) turns[found + __popc(those & ((1u << lane) - 1))] = turn;
      found += __popc(those);
    }
    if (lane == 0) count = found;
  }
  __syncthreads();
  return count;
}

// The columns that the strips of a tile read, and where in their bands a weight is.
template <bool Adjoint>
struct TileColumns {
  const Line& line;
  const Bands& s;
  int strip;    // the first
  int staged;   // the first column that is staged: an even one, since a load may have two
  int weights;  // the first column with weights in the bands

  __device__ TileColumns(const Line& line, const Bands& s, int strip)
      : line(line), s(s), strip(strip) {
    staged = first(0) & ~1, weights = Adjoint ? max(first(0), 0) : strip * kStrip;
  }
  // The first column that the nth strip of the tile reads.
  __device__ int first(int n) const {
    const int w = (strip + n) * kStrip;
    if constexpr (!Adjoint) return line.first_position(w);
    const int from = w + line.before - (line.taps - 1) * line.step;
    const int window = line.stride == 1 ? from
                       : from > 0       ? (from + line.stride - 1) / line.stride
                                        : -(-from / line.stride);
    return window * line.scale;
  }
  // The column of the source that is staged as the nth; -1 if it is zeros.
  __device__ int source(int n) const {
    const int w = staged + n;
    if constexpr (Adjoint) return w >= 0 && w < line.out ? w : -1;
    return line.pixel_at(w);
  }
  // Elements from the first band of the tile's first row to tap j of output column w; less than 0
  // if no band of the tile has it.
  __device__ int place(int w, int j) const {
    if (w >= line.out) return -1;
    const int read = s.by_scale.quotient(w) * line.stride + j * line.step - line.before;
    const int pixel = (Adjoint ? read : w) - strip * kStrip;
    if (static_cast<unsigned>(pixel) >= static_cast<unsigned>(s.strips * kStrip)) return -1;
    const int n = pixel / kStrip, column = (Adjoint ? w : read) - first(n);
    return n * s.matrix + pixel % kStrip * s.pitch + column / kUnit * kTileRows * kUnit +
           column % kUnit;
  }
};

// The weights of a turn in device memory and in the bands. A thread moves the same columns and taps
// in every turn, for each row of the tile.
template <bool Adjoint, typename T>
struct BandWeights {
  const Weights<T>& weight;
  const Bands& s;
  const TileColumns<Adjoint>& columns;
  T* rows[kTileRows];  // the first weights of the tile's rows, of the turn whose are the first
  uint32_t bands;

  __device__ __forceinline__ BandWeights(const Weights<T>& weight, const Bands& s,
                                         const BandBlock& at, const Windows& p,
                                         const TileColumns<Adjoint>& columns, const void* bands)
      : weight(weight), s(s), columns(columns), bands(shared_address(bands)) {
#pragma unroll
    for (int m = 0; m < kTileRows; ++m) {
      const int later =
          Adjoint || p.down.scale == 1
              ? m
              : s.by_scale_down.quotient(at.row + m * s.apart) - s.by_scale_down.quotient(at.row);
      const int taps = Adjoint ? later * p.down.phases : -later * s.turns_apart;
      rows[m] =
          weight.at(taps * p.across.taps, at.b, at.group, Adjoint ? 0 : at.row + m * s.apart, 0);
    }
  }
  // Elements from a row's weights to those of a column and a tap, and their shared address in the
  // first row's band.
  struct Move {
    int from;  // kNone if there is none
    uint32_t to;
  };
  __device__ int moves() const { return s.weight_columns * columns.line.taps; }
  __device__ __forceinline__ Move move(int n) const {
    if (n >= moves()) return {kNone, 0};
    const bool by_pixels = weight.s.w == 1;  // neighbouring threads, as they are in memory
    const Divisor& by = by_pixels ? s.by_weight_column : s.by_taps;
    const int slow = by.quotient(n), fast = n - slow * static_cast<int>(by.d);
    const int j = by_pixels ? slow : fast, w = columns.weights + (by_pixels ? fast : slow);
    const int place = columns.place(w, j);
    if (place < 0) return {kNone, 0};
    return {static_cast<int>(j * weight.s.tap + w * weight.s.w),
            bands + place * static_cast<uint32_t>(sizeof(T))};
  }
  // Calls f(m, weight, address in the bands) for each row of the tile that a turn is for.
  template <typename F>
  __device__ __forceinline__ void for_each_row(const Move& move, const Turn& turn, F&& f) const {
    if (move.from == kNone) return;
#pragma unroll
    for (int m = 0; m < kTileRows; ++m)
      if (turn.active >> m & 1)
        f(m, rows[m] + turn.weights + move.from, move.to + m * kUnit * sizeof(T));
  }
};

// Weights on their way to the bands: those of the first moves are in registers meanwhile.
template <bool Adjoint, typename T>
struct LoadedWeights {
  using W = BandWeights<Adjoint, const T>;
  static constexpr int kMoves = 2;
  const W& weights;
  typename W::Move moves[kMoves];
  unsigned short held[kMoves][kTileRows];

  __device__ __forceinline__ explicit LoadedWeights(const W& weights) : weights(weights) {
#pragma unroll
    for (int i = 0; i < kMoves; ++i) moves[i] = weights.move(threadIdx.x + i * blockDim.x);
  }
  static __device__ __forceinline__ unsigned short load(const T* from) {
    return __ldg(reinterpret_cast<const unsigned short*>(from));
  }
  __device__ __forceinline__ void begin(const Turn& turn) {
#pragma unroll
    for (int i = 0; i < kMoves; ++i)
      weights.for_each_row(moves[i], turn,
                           [&](int m, const T* from, uint32_t) { held[i][m] = load(from); });
  }
  __device__ __forceinline__ void finish(const Turn& turn) {
#pragma unroll
    for (int i = 0; i < kMoves; ++i)
      weights.for_each_row(moves[i], turn,
                           [&](int m, const T*, uint32_t to) { store_half(to, held[i][m]); });
#pragma unroll 1
    for (int n = threadIdx.x + kMoves * blockDim.x; n < weights.moves(); n += blockDim.x)
      weights.for_each_row(weights.move(n), turn,
                           [&](int, const T* from, uint32_t to) { store_half(to, load(from)); });
  }
};

// A row of the source on its way to shared memory, column by column with the channels of the block.
template <RowLoads Mode, bool Adjoint, typename T>
struct LoadedRow {
  static constexpr bool kWide = Mode == RowLoads::channels;
  static constexpr int kLoads = kWide ? 4 : 2;
  static constexpr int kWords = kWide ? 4 : kUnit;
  const Image<const T>& source;
  const Bands& s;
  const TileColumns<Adjoint>& columns;
  const T* image;  // its first channel of the block's group
  int first, group_channels;
  uint32_t staged;
  struct Load {
    int from;  // elements from a row of the first channel; kNone for zeros
    uint32_t to;
    bool exists;
  };
  Load loads[kLoads];
  uint32_t held[kLoads][kWords];

  __device__ __forceinline__ LoadedRow(const Image<const T>& source, const Bands& s,
                                       const BandBlock& at, const Windows& p,
                                       const TileColumns<Adjoint>& columns, const void* staged)
      : source(source),
        s(s),
        columns(columns),
        first(at.channel),
        group_channels(p.C / p.G),
        staged(shared_address(staged)) {
    image = source.at(at.b, at.group * group_channels, 0, 0);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) loads[i] = load_at(threadIdx.x + i * blockDim.x);
  }
  __device__ __forceinline__ Load load_at(int n) const {
    const Divisor& by = kWide ? s.by_unit : s.by_column;
    const int slow = by.quotient(n), fast = n - slow * static_cast<int>(by.d);
    const int unit = kWide ? fast : slow;
    const int column = (kWide ? slow : fast) * (Mode == RowLoads::pairs ? 2 : 1);
    const int w = columns.source(column), c = first + unit * kUnit;
    const bool zeros = w < 0 || c >= group_channels;
    return {zeros ? kNone : static_cast<int>(c * source.s.c + w * source.s.w),
            staged + (column * s.pixel + unit * kUnit) * static_cast<uint32_t>(sizeof(T)),
            n < s.row_loads};
  }
  __device__ __forceinline__ void load(const T* row, int from, uint32_t (&to)[kWords]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) to[i] = 0;
    if (from == kNone) return;
    const T* at = row + from;
    if constexpr (kWide) {
      const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(at));
      to[0] = loaded.x, to[1] = loaded.y, to[2] = loaded.z, to[3] = loaded.w;
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; ++i, at += source.s.c) {
        if constexpr (Mode == RowLoads::pairs)
          to[i] = __ldg(reinterpret_cast<const uint32_t*>(at));
        else
          to[i] = __ldg(reinterpret_cast<const unsigned short*>(at));
      }
    }
  }
  __device__ __forceinline__ void store(const uint32_t (&from)[kWords], uint32_t to) const {
    if constexpr (kWide) {
      store_unit(to, from);
    } else {
      uint32_t low[4], high[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        low[i] = __byte_perm(from[2 * i], from[2 * i + 1], 0x5410);
        high[i] = __byte_perm(from[2 * i], from[2 * i + 1], 0x7632);
      }
      store_unit(to, low);
      if constexpr (Mode == RowLoads::pairs) store_unit(to + s.pixel * sizeof(T), high);
    }
  }
  // Row h; zeros if it is less than 0.
  __device__ __forceinline__ void begin(int h) {
    const T* row = image + h * source.s.h;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (loads[i].exists) load(row, h < 0 ? kNone : loads[i].from, held[i]);
  }
  __device__ __forceinline__ void finish(int h) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (loads[i].exists) store(held[i], loads[i].to);
    const T* row = image + h * source.s.h;
#pragma unroll 1
    for (int n = threadIdx.x + kLoads * blockDim.x; n < s.row_loads; n += blockDim.x) {
      const Load next = load_at(n);
      uint32_t loaded[kWords];
      load(row, h < 0 ? kNone : next.from, loaded);
      store(loaded, next.to);
    }
  }
};

}  // namespace hoconv::high_order::conv2d
