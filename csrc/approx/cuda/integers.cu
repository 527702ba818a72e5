// What is done around a sum of products of integers: ranges of real numbers become scales, the
// numbers integers, windows of an image the rows of a matrix, and sums of products real numbers
// again. Each is one kernel that reads and writes every number once. Those of a range have a thread
// or two: what they save is the time in which a host would start a dozen of PyTorch's kernels.
//
// B batch, C channels of the input, O of the output, G groups, L pixels of the output, R x S the
// kernel; M, N rows and columns of a matrix product, K what it sums over.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "approx/problem.h"
#include "hoconv/cuda_launch.cuh"

namespace hoconv::approx {
namespace {

constexpr int kThreads = 256;
constexpr int kSide = 32;  // of a tile that is transposed
constexpr int64_t kMostBlocks = 1 << 16;
constexpr int64_t kMostBits = 16;  // of an integer

int64_t blocks_of(int64_t count, int64_t each) {
  return std::min((count + each - 1) / each, kMostBlocks);
}

void check_number(const Tensor& t, ScalarType type, const Tensor& like, const char* name) {
  STD_TORCH_CHECK(t.numel() == 1 && t.scalar_type() == type && t.device() == like.device(), name,
                  ": expected one number, float32 of a scale and int32 of a zero point");
}

const float* number(const Tensor& t, const Tensor& like) {
  check_number(t, ScalarType::Float, like, "least, most");
  return static_cast<const float*>(t.const_data_ptr());
}

float* mutable_number(Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

struct Range {
  const float *least, *most;
};

// Thread 0 computes the least number, thread 1 the largest. Every operation rounds, as on a CPU.
__global__ void join_ranges(Range batch, Range seen, bool averages, float momentum,
                            float* least_out, float* most_out) {
  const bool is_least = threadIdx.x == 0;
  const float known = is_least ? *seen.least : *seen.most;
  const float found = is_least ? *batch.least : *batch.most;
  float joined = known;
  if (isfinite(*batch.least) && isfinite(*batch.most)) {
    if (isnan(known))
      joined = found;
    else if (averages)
      joined = __fadd_rn(known, __fmul_rn(momentum, __fsub_rn(found, known)));
    else
      joined = is_least ? fminf(known, found) : fmaxf(known, found);
  }
  *(is_least ? least_out : most_out) = joined;
}

// The range seen so far, NaN at first, joined by that of a batch; a batch that is not finite
// changes nothing.
std::tuple<Tensor, Tensor> range_of_batches(const Tensor& least, const Tensor& most,
                                            const Tensor& seen_least, const Tensor& seen_most,
                                            std::optional<double> momentum) {
  const Range batch{number(least, least), number(most, least)};
  const Range seen{number(seen_least, least), number(seen_most, least)};
  Tensor joined_least = make_tensor(least, sizes(least), ScalarType::Float);
  Tensor joined_most = make_tensor(least, sizes(least), ScalarType::Float);
  const Launch current(least);
  join_ranges<<<1, 2, 0, current.stream>>>(
      batch, seen, momentum.has_value(), static_cast<float>(momentum.value_or(0)),
      mutable_number(joined_least), mutable_number(joined_most));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {joined_least, joined_most};
}

__global__ void cover_range(Range range, float lowest, float highest, float tiny, float* scale_out,
                            int32_t* zero_out) {
  const float least = *range.least > 0 ? 0 : *range.least;
  const float most = *range.most < 0 ? 0 : *range.most;
  const float exact = __fdiv_rn(__fsub_rn(most, least), highest - lowest);
  const float scale = exact < tiny ? tiny : exact;
  const float zero = rintf(__fsub_rn(lowest, __fdiv_rn(least, scale)));
  *scale_out = scale;
  *zero_out = static_cast<int32_t>(fminf(fmaxf(zero, lowest), highest));
}

// The scale and zero point with which integers of so many bits cover a range and 0.
std::tuple<Tensor, Tensor> affine(const Tensor& least, const Tensor& most, int64_t bits,
                                  bool is_signed) {
  STD_TORCH_CHECK(bits >= 1 && bits <= kMostBits, "bits: expected 1 to ", kMostBits, ", got ",
                  bits);
  const Range range{number(least, least), number(most, least)};
  Tensor scale = make_tensor(least, sizes(least), ScalarType::Float);
  Tensor zero = make_tensor(least, sizes(least), ScalarType::Int);
  const float steps = static_cast<float>((int64_t{1} << bits) - 1);
  const float lowest = is_signed ? -static_cast<float>(int64_t{1} << (bits - 1)) : 0;
  const Launch current(least);
  cover_range<<<1, 1, 0, current.stream>>>(range, lowest, lowest + steps,
                                           std::numeric_limits<float>::min(), mutable_number(scale),
                                           static_cast<int32_t*>(zero.mutable_data_ptr()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {scale, zero};
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    to_integers(const float* __restrict__ real, const float* __restrict__ scale,
                const int32_t* __restrict__ zero, T* __restrict__ out, int64_t count) {
  const float divisor = *scale;
  const int32_t shift = *zero;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads)
    out[i] = static_cast<T>(static_cast<int32_t>(rintf(real[i] / divisor)) + shift);
}

// The integers of real numbers on a grid, int32; or their lowest bytes, uint8.
Tensor integers(const Tensor& real, const Tensor& scale, const Tensor& zero, bool is_byte) {
  check_float(real, "real");
  check_number(scale, ScalarType::Float, real, "scale");
  check_number(zero, ScalarType::Int, real, "zero");
  const Tensor from = torch::stable::contiguous(real);
  const int64_t count = real.numel();
  Tensor out = make_tensor(real, sizes(real), is_byte ? ScalarType::Byte : ScalarType::Int);
  if (count == 0) return out;
  const Launch current(real);
  const auto run = [&](auto zero_of_type) {
    using T = decltype(zero_of_type);
    to_integers<T><<<blocks_of(count, 4 * kThreads), kThreads, 0, current.stream>>>(
        static_cast<const float*>(from.const_data_ptr()),
        static_cast<const float*>(scale.const_data_ptr()),
        static_cast<const int32_t*>(zero.const_data_ptr()), static_cast<T*>(out.mutable_data_ptr()),
        count);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  };
  if (is_byte)
    run(uint8_t{});
  else
    run(int32_t{});
  return out;
}

// A thread has a pixel of the output, and all taps of some channels: neighbouring threads store
// neighbours in memory.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    to_windows(const T* __restrict__ x, const int32_t* __restrict__ fill, T* __restrict__ out,
               Conv2d p) {
  const T outside = fill == nullptr ? T{0} : static_cast<T>(*fill);
  const int64_t M = p.B * p.OH * p.OW;
  for (int64_t m = int64_t{blockIdx.x} * kThreads + threadIdx.x; m < M;
       m += int64_t{gridDim.x} * kThreads) {
    const int64_t b = m / p.OW / p.OH;
    const int64_t top = m / p.OW % p.OH * p.stride[0] - p.padding[0];
    const int64_t left = m % p.OW * p.stride[1] - p.padding[1];
    for (int64_t c = blockIdx.y; c < p.C; c += gridDim.y) {
      const T* image = x + (b * p.C + c) * p.H * p.W;
      T* to = out + c * p.R * p.S * M + m;
      for (int64_t r = 0; r < p.R; ++r) {
        const int64_t y = top + r * p.dilation[0];
        for (int64_t s = 0; s < p.S; ++s, to += M) {
          const int64_t column = left + s * p.dilation[1];
          const bool exists = y >= 0 && y < p.H && column >= 0 && column < p.W;
          *to = exists ? image[y * p.W + column] : outside;
        }
      }
    }
  }
}

// The windows of integers x (B, C, H, W), of 1 or 4 bytes each: (G, C / G * R * S, B * L). Pixels
// of the padding are `fill`, or 0.
Tensor windows(const Tensor& x, std::optional<Tensor> fill, Ints kernel, Ints stride, Ints padding,
               Ints dilation, int64_t groups) {
  STD_TORCH_CHECK(x.dim() == 4 && kernel.size() == 2,
                  "x, kernel: expected 4 dimensions, and 2 numbers");
  const Conv2d p(sizes(x), {groups, x.size(1) / groups, kernel[0], kernel[1]}, stride, padding,
                 dilation, groups);
  if (fill) check_number(*fill, ScalarType::Int, x, "fill");
  const auto type = x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Char || type == ScalarType::Byte || type == ScalarType::Int,
                  "x: expected int8, uint8 or int32");
  const Ints size{groups, p.in_channels() * p.R * p.S, p.B * p.OH * p.OW};
  Tensor out = make_tensor(x, size, type);
  if (out.numel() == 0) return out;
  const Tensor from = torch::stable::contiguous(x);
  const Launch current(x);
  const auto run = [&](auto zero_of_type) {
    using T = decltype(zero_of_type);
    const dim3 grid(blocks_of(size[2], kThreads), std::min(p.C, kMaxGridYZ));
    to_windows<T><<<grid, kThreads, 0, current.stream>>>(
        static_cast<const T*>(from.const_data_ptr()),
        fill ? static_cast<const int32_t*>(fill->const_data_ptr()) : nullptr,
        static_cast<T*>(out.mutable_data_ptr()), p);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  };
  if (type == ScalarType::Int)
    run(int32_t{});
  else
    run(uint8_t{});
  return out;
}

// The sizes of sums of products (batch, M, N), and what makes real numbers of them.
struct Sums {
  const int64_t *rows, *columns;  // sums of the integers: (batch, M) and (batch, N)
  const float *scale_a, *scale_b;
  const int32_t *zero_a, *zero_b;
  int64_t batch, M, N, K, pixels;
};

// A block transposes a tile in shared memory, so that neighbouring threads both load and store
// neighbours in memory.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    to_real(const T* __restrict__ products, float* __restrict__ out, Sums p) {
  __shared__ float values[kSide][kSide + 1];
  const int64_t zero_a = *p.zero_a, zero_b = *p.zero_b, last = p.K * zero_a * zero_b;
  const double scale = static_cast<double>(*p.scale_a) * *p.scale_b;
  const int lane = threadIdx.x % kSide, first = threadIdx.x / kSide;
  constexpr int step = kThreads / kSide;
  const int64_t row = int64_t{blockIdx.x} * kSide;
  const int64_t b = (row + lane) / p.pixels, pixel = (row + lane) % p.pixels;
  for (int64_t n = blockIdx.z; n < p.batch; n += gridDim.z)
    for (int64_t column = int64_t{blockIdx.y} * kSide; column < p.N;
         column += int64_t{gridDim.y} * kSide) {
      __syncthreads();
      for (int i = first; i < kSide; i += step) {
        const int64_t m = row + i, o = column + lane;
        if (m >= p.M || o >= p.N) continue;
        const int64_t total = products[(n * p.M + m) * p.N + o] - zero_b * p.rows[n * p.M + m] -
                              zero_a * p.columns[n * p.N + o] + last;
        const float value = static_cast<float>(scale * static_cast<double>(total));
        if (p.pixels == 1)  // nothing to transpose
          out[(m * p.batch + n) * p.N + o] = value;
        else
          values[i][lane] = value;
      }
      if (p.pixels == 1) continue;
      __syncthreads();
      for (int i = first; i < kSide; i += step) {
        const int64_t o = column + i;
        if (row + lane >= p.M || o >= p.N) continue;
        out[((b * p.batch + n) * p.N + o) * p.pixels + pixel] = values[lane][i];
      }
    }
}

// The real numbers (M / pixels, batch * N, pixels) of sums of products (batch, M, N) of integers.
Tensor integer_total(const Tensor& products, const Tensor& rows, const Tensor& columns,
                     const Tensor& scale_a, const Tensor& zero_a, const Tensor& scale_b,
                     const Tensor& zero_b, int64_t K, int64_t pixels) {
  STD_TORCH_CHECK(products.dim() == 3 && (products.scalar_type() == ScalarType::Int ||
                                          products.scalar_type() == ScalarType::Long),
                  "products: expected (B, M, N), int32 or int64");
  const int64_t batch = products.size(0), M = products.size(1), N = products.size(2);
  for (const Tensor* t : {&rows, &columns})
    STD_TORCH_CHECK(t->scalar_type() == ScalarType::Long &&
                        t->numel() == batch * (t == &rows ? M : N) &&
                        t->device() == products.device(),
                    "rows, columns: expected (B, M) and (B, N) int64");
  for (const Tensor* t : {&scale_a, &scale_b})
    check_number(*t, ScalarType::Float, products, "scale_a, scale_b");
  for (const Tensor* t : {&zero_a, &zero_b})
    check_number(*t, ScalarType::Int, products, "zero_a, zero_b");
  STD_TORCH_CHECK(pixels >= 1 && M % pixels == 0, "pixels: expected a divisor of ", M, ", got ",
                  pixels);
  const Ints size{M / pixels, batch * N, pixels};
  Tensor out = make_tensor(products, size, ScalarType::Float);
  if (out.numel() == 0) return out;
  const Tensor from = torch::stable::contiguous(products);
  const Tensor of_a = torch::stable::contiguous(rows), of_b = torch::stable::contiguous(columns);
  const Launch current(products);
  const Sums p{static_cast<const int64_t*>(of_a.const_data_ptr()),
               static_cast<const int64_t*>(of_b.const_data_ptr()),
               static_cast<const float*>(scale_a.const_data_ptr()),
               static_cast<const float*>(scale_b.const_data_ptr()),
               static_cast<const int32_t*>(zero_a.const_data_ptr()),
               static_cast<const int32_t*>(zero_b.const_data_ptr()),
               batch,
               M,
               N,
               K,
               pixels};
  const auto run = [&](auto zero_of_type) {
    using T = decltype(zero_of_type);
    const int64_t down = (M + kSide - 1) / kSide, across = (N + kSide - 1) / kSide;
    STD_TORCH_CHECK(down <= INT32_MAX, "products: too many rows");
    const dim3 grid(down, std::min(across, kMaxGridYZ), std::min(batch, kMaxGridYZ));
    to_real<T><<<grid, kThreads, 0, current.stream>>>(static_cast<const T*>(from.const_data_ptr()),
                                                      static_cast<float*>(out.mutable_data_ptr()),
                                                      p);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  };
  if (products.scalar_type() == ScalarType::Int)
    run(int32_t{});
  else
    run(int64_t{});
  return out;
}

}  // namespace
}  // namespace hoconv::approx

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("approx_range_of_batches.cuda", TORCH_BOX(&hoconv::approx::range_of_batches));
  m.impl("approx_affine.cuda", TORCH_BOX(&hoconv::approx::affine));
  m.impl("approx_integers.cuda", TORCH_BOX(&hoconv::approx::integers));
  m.impl("approx_windows.cuda", TORCH_BOX(&hoconv::approx::windows));
  m.impl("approx_integer_total.cuda", TORCH_BOX(&hoconv::approx::integer_total));
}
