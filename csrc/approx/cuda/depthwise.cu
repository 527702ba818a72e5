// Convolutions of 8-bit integers with one channel for each filter, whose products come from a table
// of all of them.
//
// A block computes outputs of one filter. Its taps are the second operand of every product, so that
// a tap needs 256 products only: the block copies those to shared memory, 1 KiB for each tap, and
// looks them up by the pixels, which it reads in place through the L1 cache. A thread has a few
// neighbouring outputs of a row, whose sums do not depend on each other.
//
// At least, 64 x 32 channels of 112 x 112 pixels take 26 MB of loads, 103 MB of stores, 30 us on an
// H200, and 231 million look-ups in shared memory, of which a multiprocessor does 32 a cycle, fewer
// where banks conflict.
//
// B batch, C channels of the input, O of the output, H x W pixels of the input, OH x OW of the
// output, R x S the kernel.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <type_traits>

#include "approx/problem.h"
#include "hoconv/cuda_launch.cuh"

namespace hoconv::approx {
namespace {

constexpr int kThreads = 256;
constexpr int kOutputs = 4;     // of a thread
constexpr int kMostTaps = 64;   // as in ops.py: 64 KiB of products
constexpr int kProducts = 256;  // of a tap
constexpr int kBlocks = 16;     // of a multiprocessor, about, where there is work for so many

// What makes real numbers of the sums; without scales, these are the result.
struct Grids {
  const float *scale_a, *scale_b;
  const int32_t *zero_a, *zero_b;
};

// How a sum is kept: within limits at each addition, or wrapped to them after the last.
struct Kept {
  int64_t least, most;
  bool wraps;
};

// `width`, if it is not 0, is S, of a dilation of 1, and `step` is the stride in a row. Then a
// thread reads each pixel once for a row of taps, into registers; else once for each tap.
template <int width, int step, bool limited, bool real>
__global__ void __launch_bounds__(kThreads)
    convolve(const uint8_t* __restrict__ x, const uint8_t* __restrict__ weight,
             const int32_t* __restrict__ table, int32_t* __restrict__ sums,
             float* __restrict__ reals, Conv2d p, Grids grids, Kept kept, int sign, int parts) {
  extern __shared__ uint4 shared[];
  int32_t* const products = reinterpret_cast<int32_t*>(shared);
  const int taps = static_cast<int>(p.R * p.S);
  const int64_t o = blockIdx.x / parts, part = blockIdx.x % parts;
  const uint8_t* filter = weight + o * taps;
  for (int i = threadIdx.x; i < taps * kProducts; i += kThreads)
    products[i] = table[i % kProducts * kProducts + filter[i / kProducts]];
  // A byte is a number of -sign to 255 - sign.
  const auto number = [sign](uint8_t byte) { return (byte ^ sign) - sign; };
  uint8_t outside = 0;
  int64_t zero_a = 0, zero_b = 0, of_filter = 0;
  double scale = 0;
  if constexpr (real) {
    zero_a = *grids.zero_a, zero_b = *grids.zero_b;
    outside = static_cast<uint8_t>(zero_a);
    scale = static_cast<double>(*grids.scale_a) * *grids.scale_b;
    int32_t sum = 0;
    for (int i = 0; i < taps; ++i) sum += number(filter[i]);
    of_filter = taps * zero_a * zero_b - zero_a * sum;
  }
  __syncthreads();
  const int rows = static_cast<int>(p.R), columns = static_cast<int>(p.S);
  const int down = static_cast<int>(p.dilation[0]), right = static_cast<int>(p.dilation[1]);
  const int stride = static_cast<int>(p.stride[1]);
  const int64_t across = (p.OW + kOutputs - 1) / kOutputs, count = p.B * p.OH * across;
  const int64_t c = o / (p.O / p.C);
  for (int64_t i = part * kThreads + threadIdx.x; i < count; i += int64_t{parts} * kThreads) {
    const int64_t column = i % across * kOutputs, line = i / across;
    const int64_t oh = line % p.OH, b = line / p.OH;
    const uint8_t* image = x + (b * p.C + c) * p.H * p.W;
    const int top = static_cast<int>(oh * p.stride[0] - p.padding[0]);
    const int left = static_cast<int>(column * p.stride[1] - p.padding[1]);
    int32_t sum[kOutputs] = {}, of_pixels[kOutputs] = {};
    const auto add = [&](int j, int32_t product, uint8_t pixel) {
      if constexpr (limited)
        sum[j] = max(kept.least, min(kept.most, int64_t{sum[j]} + product));
      else
        sum[j] =
            static_cast<int32_t>(static_cast<uint32_t>(sum[j]) + static_cast<uint32_t>(product));
      if constexpr (real) of_pixels[j] += number(pixel);
    };
    const int32_t* of_tap = products;
    for (int r = 0; r < rows; ++r) {
      const int y = top + r * down;
      // A row of the padding has no pixels.
      const unsigned there = y >= 0 && y < p.H ? static_cast<unsigned>(p.W) : 0;
      const uint8_t* row = image + y * p.W;
      const auto pixel_at = [&](int at) {
        return static_cast<unsigned>(at) < there ? row[at] : outside;
      };
      if constexpr (width > 0) {
        constexpr int span = (kOutputs - 1) * step + width;
        uint8_t pixels[span];
#pragma unroll
        for (int at = 0; at < span; ++at) pixels[at] = pixel_at(left + at);
#pragma unroll
        for (int s = 0; s < width; ++s, of_tap += kProducts)
#pragma unroll
          for (int j = 0; j < kOutputs; ++j) {
            const uint8_t pixel = pixels[s + j * step];
            add(j, of_tap[pixel], pixel);
          }
      } else {
        for (int s = 0; s < columns; ++s, of_tap += kProducts)
#pragma unroll
          for (int j = 0; j < kOutputs; ++j) {
            const uint8_t pixel = pixel_at(left + s * right + j * stride);
            add(j, of_tap[pixel], pixel);
          }
      }
    }
    const int64_t first = ((b * p.O + o) * p.OH + oh) * p.OW + column;
#pragma unroll
    for (int j = 0; j < kOutputs; ++j) {
      if (column + j >= p.OW) break;
      int64_t total = sum[j];
      if (kept.wraps) total = ((total - kept.least) & (kept.most - kept.least)) + kept.least;
      if constexpr (real)
        reals[first + j] = static_cast<float>(
            scale * static_cast<double>(total - zero_b * of_pixels[j] + of_filter));
      else
        sums[first + j] = static_cast<int32_t>(total);
    }
  }
}

// The convolution of bytes x (B, C, H, W) with weight (O, 1, R, S), each channel with O / C
// filters, (B, O, OH, OW): int32 sums of table[pixel, tap] in ascending (r, s), of pixels that are
// 0 in the padding. With grids, float32: of pixels that are zero_a in the padding, the real numbers
// that integer_total makes of these sums.
Tensor table_depthwise(const Tensor& x, const Tensor& weight, const Tensor& table, Ints stride,
                       Ints padding, Ints dilation, bool is_signed, std::optional<int64_t> least,
                       std::optional<int64_t> most, bool wraps, std::optional<Tensor> scale_a,
                       std::optional<Tensor> zero_a, std::optional<Tensor> scale_b,
                       std::optional<Tensor> zero_b) {
  for (const Tensor* t : {&x, &weight})
    STD_TORCH_CHECK(
        t->dim() == 4 && t->device() == x.device() &&
            (t->scalar_type() == ScalarType::Char || t->scalar_type() == ScalarType::Byte),
        "x, weight: expected 4 dimensions, int8 or uint8, on one device");
  Conv2d p(sizes(x), sizes(weight), stride, padding, dilation, x.size(1));
  // The kernel counts pixels in int32, also those that a thread's last outputs would read where
  // there are no such outputs. A longer step than the image goes as far beyond it.
  for (int i = 0; i < 2; ++i) {
    const int64_t extent = (i == 0 ? p.H : p.W) + 2 * p.padding[i];
    STD_TORCH_CHECK(extent < INT32_MAX / 8, "x: expected fewer pixels in a row or column");
    p.stride[i] = std::min(p.stride[i], extent), p.dilation[i] = std::min(p.dilation[i], extent);
  }
  STD_TORCH_CHECK(p.R * p.S <= kMostTaps, "weight: expected a kernel of up to ", kMostTaps,
                  " taps");
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Int && table.numel() == 65536 &&
                      table.is_contiguous() && table.device() == x.device(),
                  "table: expected 65,536 contiguous int32 on the device of x");
  const bool real = scale_a.has_value();
  Grids grids{};
  if (real) {
    for (const auto* t : {&scale_a, &zero_a, &scale_b, &zero_b}) {
      const auto type = t == &scale_a || t == &scale_b ? ScalarType::Float : ScalarType::Int;
      STD_TORCH_CHECK(
          *t && (*t)->numel() == 1 && (*t)->scalar_type() == type && (*t)->device() == x.device(),
          "scales and zero points: expected a number each, float32 and int32");
    }
    grids = {static_cast<const float*>(scale_a->const_data_ptr()),
             static_cast<const float*>(scale_b->const_data_ptr()),
             static_cast<const int32_t*>(zero_a->const_data_ptr()),
             static_cast<const int32_t*>(zero_b->const_data_ptr())};
  }
  const std::optional<Limits> limits = Limits::of(least, most);
  STD_TORCH_CHECK(limits || !wraps, "wraps: expected least and most");
  const Kept kept{limits ? limits->least : 0, limits ? limits->most : 0, wraps};
  const Ints size{p.B, p.O, p.OH, p.OW};
  Tensor out =
      make_strided(x, size, contiguous_strides(size), real ? ScalarType::Float : ScalarType::Int);
  if (out.numel() == 0) return out;
  const Tensor pixels = torch::stable::contiguous(x), filters = torch::stable::contiguous(weight);
  const Launch current(x);
  const int64_t work = p.B * p.OH * ((p.OW + kOutputs - 1) / kOutputs);
  const int64_t blocks = int64_t{kBlocks} * device_attribute(cudaDevAttrMultiProcessorCount);
  const int64_t parts = std::clamp<int64_t>(blocks / p.O, 1, (work + kThreads - 1) / kThreads);
  STD_TORCH_CHECK(p.O * parts <= INT32_MAX, "weight: too many filters");
  const int bytes = static_cast<int>(p.R * p.S * kProducts * sizeof(int32_t));
  const auto run = [&](auto kernel) {
    STD_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<p.O * parts, kThreads, bytes, current.stream>>>(
        static_cast<const uint8_t*>(pixels.const_data_ptr()),
        static_cast<const uint8_t*>(filters.const_data_ptr()),
        static_cast<const int32_t*>(table.const_data_ptr()),
        real ? nullptr : static_cast<int32_t*>(out.mutable_data_ptr()),
        real ? static_cast<float*>(out.mutable_data_ptr()) : nullptr, p, grids, kept,
        is_signed ? 128 : 0, static_cast<int>(parts));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  };
  const auto run_window = [&](auto width, auto step) {
    if (limits && !wraps)
      real ? run(convolve<width, step, true, true>) : run(convolve<width, step, true, false>);
    else
      real ? run(convolve<width, step, false, true>) : run(convolve<width, step, false, false>);
  };
  const std::integral_constant<int, 0> any;
  const std::integral_constant<int, 1> one;
  const std::integral_constant<int, 2> two;
  const std::integral_constant<int, 3> three;
  if (p.S == 3 && p.dilation[1] == 1 && p.stride[1] == 1)
    run_window(three, one);
  else if (p.S == 3 && p.dilation[1] == 1 && p.stride[1] == 2)
    run_window(three, two);
  else
    run_window(any, any);
  return out;
}

}  // namespace
}  // namespace hoconv::approx

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("approx_table_depthwise.cuda", TORCH_BOX(&hoconv::approx::table_depthwise));
}
