// The kernels of windows with a scale, of groups of many channels in 16-bit types, on tensor cores.
// bands.cuh says how.
//
// An example, CARAFE of 8 images of 256 channels, 64 x 64, k = 5, scale 2, in bfloat16: x is 17 MB,
// the output 67, the weights 7, 22 us of an H200's memory; 840 million products, 25 us of its
// arithmetic in float32, but as bands of 16 columns, of which 5 are taps, 7 us of its tensor cores.
// It takes 110 us with channels last. What binds it is latency: the sums of 16 warps fill the
// registers of a multiprocessor, and these wait in each turn for their loads and for each other,
// so that it issues an instruction in a third of all cycles. What did not help: to have all rows in
// shared memory before the products, more warps with fewer sums, and tiles of fewer strips.
//
// B batch, C channels, G groups of channels.
#pragma once

#include "high_order/conv2d/cuda/bands/bands.cuh"

namespace hoconv::high_order::conv2d {

// One sum of `apply_banded`, of those products that it has. In a band the taps of other pixels are
// zeros: where what they read is infinite or no number, they are no zeros in the product.
template <bool Adjoint, typename T>
__device__ __noinline__ float sum_alone(const Image<const T>& source,
                                        const Weights<const T>& weight, const Windows& p, int64_t b,
                                        int c, int h, int w) {
  const int g = c / (p.C / p.G);
  float sum = 0;
  const auto add = [&](int i, int j, int oh, int ow, int y, int x) {
    const bool inside = y >= 0 && x >= 0;
    sum += widen<float>(*weight.at(i * p.across.taps + j, b, g, oh, ow)) *
           (inside ? widen<float>(*source.at(b, c, y, x)) : 0.0f);
  };
  if constexpr (Adjoint) {
    p.down.for_each_reader(h, [&](int i, int oh) {
      p.across.for_each_reader(w, [&](int j, int ow) { add(i, j, oh, ow, oh, ow); });
    });
  } else {
    for (int i = 0; i < p.down.taps; ++i) {
      const int y = p.down.pixel_at(p.down.first_position(h) + i * p.down.step);
      for (int j = 0; j < p.across.taps; ++j)
        add(i, j, h, w, y, p.across.pixel_at(p.across.first_position(w) + j * p.across.step));
    }
  }
  return sum;
}

// Elements of the bands of a block, after which the source's row lies.
__host__ __device__ inline int bands_elements(const Bands& s) { return s.strips * s.matrix; }

// The output, or with `Adjoint` the gradient of x, of which `source` is then the output's gradient.
// A warp computes 32 channels of a strip in each row of the tile.
template <typename T, bool Adjoint, RowLoads Mode>
__global__ void __launch_bounds__(kMostWarps* kWarp, 2)
    apply_banded(const __grid_constant__ Image<const T> source,
                 const __grid_constant__ Weights<const T> weight, Image<T> out,
                 const __grid_constant__ Windows p, const __grid_constant__ Bands s) {
  constexpr int eights = kWarpChannels / 8;
  constexpr int next_row = kUnit * sizeof(T), next_eight = kTileRows * next_row;
  extern __shared__ uint4 shared[];
  __shared__ Turn list[kMostTurns];
  __shared__ int count;
  T* bands = reinterpret_cast<T*>(shared);
  T* row = bands + bands_elements(s);
  const BandBlock at(s);
  const TileColumns<Adjoint> columns(p.across, s, at.strip);
  for (int n = threadIdx.x; n < bands_elements(s) / kUnit; n += blockDim.x) shared[n] = uint4{};
  // Outside the image the output reads zeros: a weight that is no number makes it none, too.
  const int turns = list_turns<Adjoint>(p.down, s, at.row, !Adjoint, p.across.taps * weight.s.tap,
                                        weight.s.h, list, count);

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int strip = warp % s.strips, channel = warp / s.strips * kWarpChannels;
  const uint32_t left =
      shared_address(bands + strip * s.matrix + lane % 16 * s.pitch) + lane / 16 * next_eight;
  const uint32_t right =
      shared_address(row + (columns.first(strip) - columns.staged + lane % 16) * s.pixel + channel +
                     lane / 16 * 8);

  const BandWeights<Adjoint, const T> weights(weight, s, at, p, columns, bands);
  LoadedWeights<Adjoint, T> loaded(weights);
  LoadedRow<Mode, Adjoint, T> staged(source, s, at, p, columns, row);
  float sum[kTileRows][eights][4] = {};
  Turn turn = list[0];
  if (turns > 0) loaded.begin(turn), staged.begin(turn.source);
#pragma unroll 1
  for (int t = 0; t < turns; ++t) {
    loaded.finish(turn), staged.finish(turn.source);
    const unsigned active = turn.active;
    if (t + 1 < turns) {
      turn = list[t + 1];
      loaded.begin(turn), staged.begin(turn.source);
    }
    __syncthreads();
#pragma unroll 1
    for (int depth = 0; depth < s.depth; depth += kStrip) {
      uint32_t pixels[eights / 2][4];
#pragma unroll
      for (int i = 0; i < eights / 2; ++i)
        load_matrix<true>(right + (depth * s.pixel + i * 16) * sizeof(T), pixels[i]);
#pragma unroll
      for (int m = 0; m < kTileRows; ++m) {
        if (!(active >> m & 1)) continue;
        uint32_t band[4];
        load_matrix(left + depth / kUnit * next_eight + m * next_row, band);
#pragma unroll
        for (int n = 0; n < eights; ++n)
          multiply<T>(sum[m][n], band, pixels[n / 2][n % 2 * 2], pixels[n / 2][n % 2 * 2 + 1]);
      }
    }
    __syncthreads();
  }

  // The lane's two pixels, and two channels of each eight.
  const int W = Adjoint ? p.across.in : p.across.out, H = Adjoint ? p.down.in : p.down.out;
  const int w = (at.strip + strip) * kStrip + lane / 4, pixels = w + 8 < W ? 2 : w < W;
  const int last = min(kTileRows, (H - at.row + s.apart - 1) / s.apart);
  const int group_channels = p.C / p.G, of_group = at.channel + channel;
  const int c = at.group * group_channels + of_group + lane % 4 * 2;
  const int existing = min((group_channels - of_group) / 8, eights);
  const int64_t next_pixel = 8 * out.s.w;
  T* eight = out.at(at.b, c, at.row, w);
  bool are_numbers = true;
#pragma unroll
  for (int n = 0; n < eights; ++n, eight += 8 * out.s.c) {
    if (n >= existing) break;
    T* pixel = eight;
#pragma unroll
    for (int m = 0; m < kTileRows; ++m, pixel += s.apart * out.s.h) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float pair[2] = {sum[m][n][2 * half], sum[m][n][2 * half + 1]};
        are_numbers = are_numbers && !isnan(pair[0] + pair[1]);
        if (m >= last || half >= pixels) continue;
        T* to = pixel + half * next_pixel;
        if constexpr (Mode == RowLoads::channels)
          store_sum<2>(to, pair);
        else
          to[0] = narrow<T>(pair[0]), to[out.s.c] = narrow<T>(pair[1]);
      }
    }
  }
  if (are_numbers) return;
  for (int n = 0; n < 2 * existing; ++n)
    for (int half = 0; half < pixels; ++half)
      for (int m = 0; m < last; ++m) {
        const int h = at.row + m * s.apart, channel = c + n / 2 * 8 + n % 2;
        T* pixel = out.at(at.b, channel, h, w + 8 * half);
        if (isnan(widen<float>(*pixel)))
          *pixel = narrow<T>(sum_alone<Adjoint>(source, weight, p, at.b, channel, h, w + 8 * half));
      }
}

// The gradient of the weights: as `apply_banded`'s turns, but what it computes are the bands. The
// tile's pixels of the output's gradient are in shared memory all the time. A warp computes 16
// columns of the bands of `Rows` rows of the tile at once.
template <typename T, int Rows, RowLoads Mode>
__global__ void __launch_bounds__(kMostWarps* kWarp, 2)
    sum_banded(const __grid_constant__ Image<const T> grad,
               const __grid_constant__ Image<const T> x, const __grid_constant__ Weights<T> out,
               const __grid_constant__ Windows p, const __grid_constant__ Bands s) {
  extern __shared__ uint4 shared[];
  __shared__ Turn list[kMostTurns];
  __shared__ int count;
  T* bands = reinterpret_cast<T*>(shared);
  T* row = bands + bands_elements(s);
  T* gradients = row + s.columns * s.pixel;
  const BandBlock at(s);
  const TileColumns<false> columns(p.across, s, at.strip);
  const int turns =
      list_turns<false>(p.down, s, at.row, true, p.across.taps * out.s.tap, out.s.h, list, count);
  LoadedRow<Mode, false, T> staged(x, s, at, p, columns, row);
  if (turns > 0) staged.begin(list[0].source);

  // The output's gradient, of the tile's own pixels.
  constexpr bool wide = Mode == RowLoads::channels;
  const int pixels = s.strips * kStrip, group_channels = p.C / p.G;
  for (int n = threadIdx.x; n < kTileRows * pixels * s.units(); n += blockDim.x) {
    const int slow = wide ? s.by_unit.quotient(n) : n / (kTileRows * pixels);
    const int fast = n - slow * (wide ? s.units() : kTileRows * pixels);
    const int pixel = wide ? slow : fast, c = (wide ? fast : slow) * kUnit;
    const int m = pixel / pixels, w = at.strip * kStrip + pixel - m * pixels;
    const int h = at.row + m * s.apart;
    uint32_t words[4] = {};
    if (c < group_channels && h < p.down.out && w < p.across.out) {
      const T* from = grad.at(at.b, at.group * group_channels + c, h, w);
      if constexpr (wide) {
        const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(from));
        words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
      } else {
#pragma unroll
        for (int e = 0; e < kUnit; ++e, from += grad.s.c)
          words[e / 2] |= uint32_t{__ldg(reinterpret_cast<const unsigned short*>(from))}
                          << e % 2 * 16;
      }
    }
    store_unit(shared_address(gradients + pixel * s.pixel + c), words);
  }

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int depths = s.depth / kStrip;
  constexpr int parts = kTileRows / Rows;
  const BandWeights<false, T> weights(out, s, at, p, columns, bands);
#pragma unroll 1
  for (int t = 0; t < turns; ++t) {
    const Turn turn = list[t];
    staged.finish(turn.source);
    if (t + 1 < turns) staged.begin(list[t + 1].source);
    __syncthreads();
#pragma unroll 1
    for (int n = warp; n < s.strips * depths * parts; n += blockDim.x / kWarp) {
      const int first_row = n % parts * Rows, depth = n / parts % depths * kStrip;
      const int strip = n / parts / depths;
      const uint32_t left = shared_address(
          gradients + (first_row * pixels + strip * kStrip + lane % 16) * s.pixel + lane / 16 * 8);
      const uint32_t right = shared_address(
          row +
          (columns.first(strip) - columns.staged + depth + lane % 8 + lane / 16 * 8) * s.pixel +
          lane / 8 % 2 * 8);
      float sum[Rows][2][4] = {};
#pragma unroll 2
      for (int c = 0; c < s.channels; c += 16) {
        uint32_t columns[4];
        load_matrix(right + c * sizeof(T), columns);
#pragma unroll
        for (int m = 0; m < Rows; ++m) {
          if (!(turn.active >> (first_row + m) & 1)) continue;
          uint32_t gradient[4];
          load_matrix(left + (m * pixels * s.pixel + c) * sizeof(T), gradient);
          multiply<T>(sum[m][0], gradient, columns[0], columns[1]);
          multiply<T>(sum[m][1], gradient, columns[2], columns[3]);
        }
      }
      T* band = bands + strip * s.matrix + lane / 4 * s.pitch + depth * kTileRows +
                first_row * kUnit + lane % 4 * 2;
#pragma unroll
      for (int m = 0; m < Rows; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const Pack<T, 2> pair = {narrow<T>(sum[m][i][2 * half]),
                                     narrow<T>(sum[m][i][2 * half + 1])};
            *reinterpret_cast<Pack<T, 2>*>(band + (i * kTileRows + m) * kUnit +
                                           8 * half * s.pitch) = pair;
          }
    }
    __syncthreads();
    for (int n = threadIdx.x; n < weights.moves(); n += blockDim.x)
      weights.for_each_row(weights.move(n), turn, [&](int, T* to, uint32_t from) {
        *reinterpret_cast<unsigned short*>(to) = load_half(from);
      });
  }
}

}  // namespace hoconv::high_order::conv2d
