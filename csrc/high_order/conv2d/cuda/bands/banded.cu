// Launches the kernels of banded.cuh where they take a call.

#include <optional>

#include "high_order/conv2d/cuda/bands/banded.cuh"
#include "high_order/conv2d/cuda/staged.cuh"
#include "hoconv/blocks.h"

namespace hoconv::high_order::conv2d {
namespace {

constexpr int64_t kManyChannels = 32;  // of a group
constexpr int64_t kMostDepth = 128;    // columns of a band
// Of the gradient of x with channels last: where bands are deeper, general.cuh is as fast.
constexpr int64_t kMostDepthLast = 64;
constexpr int64_t kLargest = 1 << 20;  // pixels of an axis
constexpr int64_t kPadding = kUnit;    // elements after a row, so that lanes read all banks

constexpr int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Columns of the source that `pixels` neighbours read.
template <bool Adjoint>
int64_t columns_read(const Axis& a, int64_t pixels) {
  if (Adjoint) return ((pixels - 1 + a.reach()) / a.stride + 1) * a.scale;
  return divide_up(pixels - 1, a.scale) * a.stride + a.reach() + 1;
}

// What a load can have of every one of these images.
RowLoads row_loads(std::initializer_list<const Tensor*> images, const Problem& p) {
  const auto all = [&](auto&& f) { return std::all_of(images.begin(), images.end(), f); };
  if (all([](const Tensor* t) { return loads_channels(*t, kUnit); })) return RowLoads::channels;
  if (!p.repeats() && all([](const Tensor* t) { return vectorizable(*t, 2); }))
    return RowLoads::pairs;
  return RowLoads::elements;
}

// Whether offsets within one image fit 32 bits, those of weights from one row of taps.
bool fits(const Tensor& t, std::initializer_list<int64_t> dimensions) {
  int64_t last = 0;
  for (const int64_t i : dimensions) last += (t.size(i) - 1) * t.stride(i);
  return last < int64_t{1} << 31;
}

// Cuts a call into tiles of at most so many strips for blocks of at most so many warps; `sums`:
// to sum the gradient of the weights, for which a block has all channels of a group. Returns none
// where that takes more shared memory.
template <bool Adjoint>
std::optional<Bands> cut(const Problem& p, RowLoads loads, bool sums, int64_t most_strips,
                         int64_t most_warps, int64_t most_bytes) {
  const Axis &down = p.down, &across = p.across;
  const Windows windows(p);
  const int64_t n = p.group_channels(), width = Adjoint ? across.in : across.out;
  const int64_t rows = Adjoint ? down.in : down.out, strips_of_row = divide_up(width, kStrip);
  Bands s{};
  s.strips =
      std::min({strips_of_row > 2 ? int64_t{kMostStrips} : strips_of_row, most_strips, most_warps});
  s.depth = round_up(columns_read<Adjoint>(across, kStrip), kStrip);
  if (s.depth > kMostDepth) return std::nullopt;
  s.pitch = kTileRows * s.depth + kPadding, s.matrix = kStrip * s.pitch + kPadding;
  const int64_t between = columns_read<Adjoint>(across, kStrip * (s.strips - 1) + 1) -
                          columns_read<Adjoint>(across, 1) +
                          (Adjoint ? across.scale : across.stride);
  s.columns = round_up(between + s.depth + 1, 2);
  s.channels = round_up(n, kWarpChannels);
  if (!sums) s.channels = std::min<int64_t>(s.channels, most_warps / s.strips * kWarpChannels);
  s.warps = sums ? most_warps : s.channels / kWarpChannels * s.strips;
  s.parts = divide_up(n, s.channels), s.pixel = s.channels + kPadding;
  s.apart = windows.down.hop * (Adjoint ? down.stride : 1);
  if (!Adjoint && s.apart > 1 && down.scale > 1) return std::nullopt;
  s.turns_apart = windows.down.hop * down.stride / down.step();
  const int64_t later = down.scale == 1 ? kTileRows - 1 : divide_up(kTileRows - 1, down.scale);
  s.most_turns = Adjoint ? (kTileRows + divide_up(down.taps, windows.down.phases) - 1) * down.scale
                         : later * s.turns_apart + down.taps;
  if (s.most_turns > kMostTurns) return std::nullopt;
  s.tiles_down = divide_up(rows, kTileRows * s.apart) * s.apart;
  s.tiles_across = divide_up(strips_of_row, s.strips);
  s.weight_columns = Adjoint ? std::min<int64_t>(s.columns, across.out) : s.strips * kStrip;
  const int64_t row_columns = loads == RowLoads::pairs ? s.columns / 2 : s.columns;
  s.row_loads = row_columns * s.units();
  const int64_t gradients = sums ? int64_t{kTileRows} * s.strips * kStrip * s.pixel : 0;
  // A warp may read after the last column.
  const int64_t elements =
      bands_elements(s) + int64_t{s.columns} * s.pixel + gradients + kWarpChannels;
  if (2 * elements > most_bytes) return std::nullopt;
  s.bytes = 2 * elements;
  s.by_scale_down = Divisor(down.scale), s.by_scale = Divisor(across.scale);
  s.by_parts = Divisor(s.parts), s.by_across = Divisor(s.tiles_across);
  s.by_down = Divisor(s.tiles_down), s.by_group = Divisor(p.G);
  s.by_column = Divisor(row_columns), s.by_unit = Divisor(s.units());
  s.by_weight_column = Divisor(s.weight_columns), s.by_taps = Divisor(across.taps);
  return s;
}

int64_t blocks_of(const Bands& s, const Problem& p) {
  return p.B * p.G * s.tiles_down * s.tiles_across * s.parts;
}

// As `cut`, so that two blocks, or one, have the shared memory of a multiprocessor.
template <bool Adjoint>
std::optional<Bands> cut(const Tensor& source, const Tensor& weight, const Problem& p,
                         RowLoads loads, bool sums) {
  if (source.element_size() != 2 || p.group_channels() % kUnit != 0 ||
      p.group_channels() < kManyChannels || p.down.scale * p.across.scale == 1)
    return std::nullopt;
  constexpr int64_t divisible = int64_t{1} << 32;  // by Divisor: a position times the scale
  if (p.down.out * p.down.scale >= divisible || p.across.out * p.across.scale >= divisible)
    return std::nullopt;
  if (std::max({p.down.in, p.down.out, p.across.in, p.across.out}) >= kLargest ||
      !fits(source, {1, 3}) || !fits(weight, {0, 4}))
    return std::nullopt;
  check_positions(p);
  const int64_t most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) + kReservedBytes;
  for (const int64_t resident : {2, 1}) {
    for (int64_t part = 1; part <= kMostWarps; part *= 2) {
      const int64_t strips = sums ? kMostStrips / part : kMostStrips;
      const int64_t warps = sums ? kMostWarps : kMostWarps / part;
      if (strips == 0) break;
      const auto s = cut<Adjoint>(p, loads, sums, strips, warps, most / resident - kReservedBytes);
      if (!s) continue;
      const int64_t largest = std::max<int64_t>({s->parts, s->tiles_across, s->tiles_down, p.G});
      if (blocks_of(*s, p) * largest >= int64_t{1} << 31) return std::nullopt;
      return s;
    }
  }
  return std::nullopt;
}

template <typename Kernel, typename... Arguments>
void launch_banded(Kernel kernel, const Bands& s, const Problem& p, cudaStream_t stream,
                   const Arguments&... arguments) {
  launch_staged(kernel, dim3(blocks_of(s, p)), s.warps * kWarp, s.bytes, stream, arguments...,
                Windows(p), s);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Calls f(zero, loads) with the constants of a kernel.
template <typename F>
void dispatch_rows(const Tensor& t, RowLoads loads, F&& f) {
  using std::integral_constant;
  dispatch_cuda(t, [&](auto zero) {
    if constexpr (sizeof(zero) == 2) {
      if (loads == RowLoads::channels)
        f(zero, integral_constant<RowLoads, RowLoads::channels>{});
      else if (loads == RowLoads::pairs)
        f(zero, integral_constant<RowLoads, RowLoads::pairs>{});
      else
        f(zero, integral_constant<RowLoads, RowLoads::elements>{});
    }
  });
}

}  // namespace

template <bool Adjoint>
bool apply_from_bands(const Tensor& source, const Tensor& weight, Tensor& out, const Problem& p,
                      cudaStream_t stream) {
  RowLoads loads = row_loads({&source}, p);
  if (loads == RowLoads::channels && !loads_channels(out, 2)) loads = RowLoads::elements;
  const auto s = cut<Adjoint>(source, weight, p, loads, false);
  if (!s || (Adjoint && loads == RowLoads::channels && s->depth > kMostDepthLast)) return false;
  dispatch_rows(source, loads, [&](auto zero, auto loads) {
    using T = decltype(zero);
    launch_banded(apply_banded<T, Adjoint, loads>, *s, p, stream, image<T>(source),
                  weights<T>(weight), mutable_image<T>(out));
  });
  return true;
}
template bool apply_from_bands<false>(const Tensor&, const Tensor&, Tensor&, const Problem&,
                                      cudaStream_t);
template bool apply_from_bands<true>(const Tensor&, const Tensor&, Tensor&, const Problem&,
                                     cudaStream_t);

bool sum_to_bands(const Tensor& grad, const Tensor& x, Tensor& out, const Problem& p,
                  cudaStream_t stream) {
  const RowLoads loads = row_loads({&x, &grad}, p);
  const auto s = cut<false>(x, out, p, loads, true);
  if (!s) return false;
  dispatch_rows(x, loads, [&](auto zero, auto loads) {
    using T = decltype(zero);
    const auto launch = [&](auto kernel) {
      launch_banded(kernel, *s, p, stream, image<T>(grad), image<T>(x), mutable_weights<T>(out));
    };
    // Rows share what a warp loads of x, where there is work for all warps anyway.
    if (s->strips * (s->depth / kStrip) >= s->warps)
      launch(sum_banded<T, kTileRows, loads>);
    else
      launch(sum_banded<T, 1, loads>);
  });
  return true;
}

}  // namespace hoconv::high_order::conv2d
