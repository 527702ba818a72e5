// grad_weight[b, h, j, t] = sum over c of grad[b, c, t] * x[b, c, t + j - before], summed over the
// batch or the steps where these share weights. The terms of that second sum are never written to
// memory.
//
// A block of the tuned kernel computes kTaps taps of a tile, of which a thread has kWarpTaps taps
// of kSteps steps in registers. It loads kRows channels at a time. Where weights are shared, it
// walks over the tiles and sequences that share them. Where steps share weights, a block adds up
// the sums of its threads and steps and writes one partial sum; a second kernel adds those.
//
// Where the weights are a softmax over the taps, and a block has all of them, it goes on to the
// gradient of what the softmax is of: weight * (grad_weight - sum over j of weight * grad_weight).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "dynamic_conv1d/cuda/kernels.cuh"
#include "dynamic_conv1d/layer.h"

namespace hoconv::dynamic_conv1d {
namespace {

constexpr int kWarpTaps = 8;
constexpr int kTaps = kWarps * kWarpTaps;  // of a block
constexpr int kRows = 16;                  // channels in shared memory at once
constexpr int kLine = kTile + kTaps;       // steps of x that a tile reads
constexpr int64_t kMostParts = 256;        // partial sums of a weight, which one thread adds up

// Each step has weights of its own: one thread an element.
template <typename T>
__global__ void naive_of_steps(Sequences<const T> grad, Sequences<const T> x, Weights<T> out,
                               Problem p) {
  using A = acc_t<T>;
  const int64_t batch = p.batch_shared ? 1 : p.B, head_channels = p.C / p.H;
  const int64_t total = batch * p.H * p.K * p.T, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < total; n += step) {
    const int64_t t = n % p.T, j = n / p.T % p.K, h = n / (p.T * p.K) % p.H;
    const int64_t b = n / (p.T * p.K * p.H), s = t + j - p.before;
    const bool inside = s >= 0 && s < p.T;
    A sum = 0;
    for (int64_t i = b; i < (p.batch_shared ? p.B : b + 1); ++i) {
      for (int64_t c = h * head_channels; c < (h + 1) * head_channels; ++c) {
        const A value = inside ? widen<A>(*x.at(i, c, s)) : A(0);
        sum += widen<A>(*grad.at(i, c, t)) * value;
      }
    }
    *out.at(b, h, j, t) = narrow<T>(sum);
  }
}

// All steps share the weights: one block an element.
template <typename T>
__global__ void naive_over_time(Sequences<const T> grad, Sequences<const T> x, Weights<T> out,
                                Problem p) {
  using A = acc_t<T>;
  __shared__ A sums[kThreads];
  const int64_t batch = p.batch_shared ? 1 : p.B, head_channels = p.C / p.H;
  for (int64_t n = blockIdx.x; n < batch * p.H * p.K; n += gridDim.x) {
    const int64_t j = n % p.K, h = n / p.K % p.H, b = n / (p.K * p.H);
    const int64_t products = (p.batch_shared ? p.B : 1) * head_channels * p.T;
    A sum = 0;
    for (int64_t i = threadIdx.x; i < products; i += kThreads) {
      const int64_t t = i % p.T, c = h * head_channels + i / p.T % head_channels;
      const int64_t sequence = b + i / (p.T * head_channels), s = t + j - p.before;
      const A value = s >= 0 && s < p.T ? widen<A>(*x.at(sequence, c, s)) : A(0);
      sum += widen<A>(*grad.at(sequence, c, t)) * value;
    }
    sums[threadIdx.x] = sum;
    for (int half = kThreads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *out.at(b, h, j, 0) = narrow<T>(sums[0]);
    __syncthreads();
  }
}

// blockIdx.x counts heads, sequences and, if each step has weights of its own, tiles; blockIdx.y
// the partial sums; blockIdx.z the taps, kTaps at a time.
struct Tiling {
  int T, K, before, H;
  int tiles;          // of a sequence
  int head_channels;  // of a head
  int batch;          // of the weights: 1 where the sequences share them
  int64_t summed;     // tiles that are added up
  int64_t part;       // of which a block adds this many
  bool time_shared;
};

// `taps`, of a softmax, are the weights: of each step, and all taps in one block.
//
// The bounds are how many blocks a multiprocessor's registers serve at once. Left to itself, the
// compiler gives float32 without a softmax registers for six, and the kernel takes a quarter longer
// (measured on an H100).
template <typename T, bool Softmax>
__global__ void __launch_bounds__(kThreads, Softmax ? 5 : 7)
    tuned(Sequences<const T> grad, Sequences<const T> x, Weights<const T> taps, Weights<T> out,
          float* parts, Tiling g) {
  static_assert(kTaps * kPitch <= kRows * (kTile + kLine));
  __shared__ float4 shared[kRows * (kTile + kLine) / 4];
  float* gradients = reinterpret_cast<float*>(shared);  // (kRows, kTile)
  float* lines = gradients + kRows * kTile;             // (kRows, kLine), of x
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int own_tiles = g.time_shared ? 1 : g.tiles;
  const int own_tile = blockIdx.x % own_tiles;
  const int64_t h = blockIdx.x / own_tiles % g.H, own_b = blockIdx.x / own_tiles / g.H;
  const int first_tap = blockIdx.z * kTaps, tap = first_tap + warp * kWarpTaps;

  float sum[kWarpTaps][kSteps] = {};
  const int64_t begin = blockIdx.y * g.part;
  const int64_t end = begin + g.part < g.summed ? begin + g.part : g.summed;
  for (int64_t n = begin; n < end; ++n) {
    // The n-th tile of the sum. The sum runs over the tiles of a sequence, over the same tile of
    // all sequences, or over both.
    const int64_t b = own_b + (g.time_shared ? n / g.tiles : n);
    const int start = (g.time_shared ? static_cast<int>(n % g.tiles) : own_tile) * kTile;
    // Past the last step there is no gradient, though there may be values of x.
    const int steps = g.T - start - lane * kSteps;
    for (int c = 0; c < g.head_channels; c += kRows) {
      const int rows = min(kRows, g.head_channels - c);
      __syncthreads();  // until the previous rows are read
      const int64_t channel = h * g.head_channels + c;
      copy_rows(gradients, kTile, grad.at(b, channel, 0), grad.s.c, grad.s.t, rows, kTile, g.T,
                start);
      copy_rows(lines, kLine, x.at(b, channel, 0), x.s.c, x.s.t, rows, kLine, g.T,
                start - g.before + first_tap);
      __syncthreads();
      if (tap >= g.K) continue;
      for (int r = 0; r < rows; ++r) {
        float gradient[kSteps], window[3][4];
        const float* line = lines + r * kLine + lane * kSteps + warp * kWarpTaps;
        load_four(gradients + r * kTile + lane * kSteps, gradient);
#pragma unroll
        for (int i = 0; i < 3; ++i) load_four(line + 4 * i, window[i]);
#pragma unroll
        for (int v = 0; v < kSteps; ++v) {
          if (v >= steps) continue;
#pragma unroll
          for (int i = 0; i < kWarpTaps; ++i)
            sum[i][v] += gradient[v] * window[(i + v) / 4][(i + v) % 4];
        }
      }
    }
  }

  float* tile = gradients;  // of taps from here on, (kTaps, kTile), rows kPitch apart
  float* own = tile + warp * kWarpTaps * kPitch + lane * kSteps;
  if constexpr (Softmax) {
    __syncthreads();  // until the last rows are read
    load_weights<false>(tile, taps.at(own_b, h, 0, 0), taps.s, g.K, g.T, own_tile * kTile);
    __syncthreads();
    float weight[kWarpTaps][kSteps], dot[kSteps] = {};
#pragma unroll
    for (int i = 0; i < kWarpTaps; ++i) {
      if (tap + i >= g.K) continue;
      load_four(own + i * kPitch, weight[i]);
#pragma unroll
      for (int v = 0; v < kSteps; ++v) dot[v] += weight[i][v] * sum[i][v];
    }
    __syncthreads();
    *reinterpret_cast<float4*>(tile + warp * kPitch + lane * kSteps) =
        make_float4(dot[0], dot[1], dot[2], dot[3]);
    __syncthreads();
    float total[kSteps] = {};
    for (int w = 0; w < kWarps; ++w) {
      load_four(tile + w * kPitch + lane * kSteps, dot);
#pragma unroll
      for (int v = 0; v < kSteps; ++v) total[v] += dot[v];
    }
#pragma unroll
    for (int i = 0; i < kWarpTaps; ++i)
#pragma unroll
      for (int v = 0; v < kSteps; ++v)
        if (tap + i < g.K) sum[i][v] = weight[i][v] * (sum[i][v] - total[v]);
  }

  if (g.time_shared) {
#pragma unroll
    for (int i = 0; i < kWarpTaps; ++i) {
      float total = (sum[i][0] + sum[i][1]) + (sum[i][2] + sum[i][3]);
#pragma unroll
      for (int far = 16; far > 0; far /= 2) total += __shfl_xor_sync(0xffffffff, total, far);
      const int64_t row = (blockIdx.y * int64_t{g.batch} + own_b) * g.H + h;
      if (lane == 0 && tap + i < g.K) parts[row * g.K + tap + i] = total;
    }
  } else if (out.s.k == 1) {  // through shared memory: neighbouring threads write neighbouring taps
    __syncthreads();          // until the last rows, or sums, are read
#pragma unroll
    for (int i = 0; i < kWarpTaps; ++i)
      *reinterpret_cast<float4*>(own + i * kPitch) =
          make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    __syncthreads();
    store_weights(tile, out.at(own_b, h, first_tap, own_tile * kTile), out.s.t,
                  min(kTaps, g.K - first_tap), g.T - own_tile * kTile);
  } else {
#pragma unroll
    for (int i = 0; i < kWarpTaps; ++i) {
      if (tap + i >= g.K) continue;
#pragma unroll
      for (int v = 0; v < kSteps; ++v) {
        const int t = own_tile * kTile + lane * kSteps + v;
        if (t < g.T) *out.at(own_b, h, tap + i, t) = narrow<T>(sum[i][v]);
      }
    }
  }
}

// Adds up the partial sums (count, batch, H, K), in order.
template <typename T>
__global__ void add_parts(const float* parts, int64_t count, Weights<T> out, int64_t batch,
                          int64_t H, int64_t K) {
  const int64_t total = batch * H * K, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < total; n += step) {
    float sum = 0;
#pragma unroll 8
    for (int64_t i = 0; i < count; ++i) sum += parts[i * total + n];
    *out.at(n / (H * K), n / K % H, n % K, 0) = narrow<T>(sum);
  }
}

int64_t tiles_of(const Problem& p) { return (p.T + kTile - 1) / kTile; }
int64_t passes_of(const Problem& p) { return (p.K + kTaps - 1) / kTaps; }
int64_t blocks_of(const Problem& p) {
  return p.weight_batch() * p.H * (p.time_shared ? 1 : tiles_of(p));
}

bool tuned_fits(const Tensor& grad, const Tensor& x, const Problem& p) {
  return x.element_size() < 8 && contiguous_in_time(grad) && contiguous_in_time(x) &&
         counts_fit(p) && blocks_of(p) <= kMostBlocks && passes_of(p) <= kMaxGridYZ &&
         p.B <= kMostBlocks;
}

// Launches the tuned kernel; with a softmax, if there are `taps`.
template <typename T>
void launch_tuned(const Tensor& grad, const Tensor& x, const Tensor* taps, Tensor& out,
                  const Problem& p, cudaStream_t stream) {
  const int64_t tiles = tiles_of(p), blocks = blocks_of(p), passes = passes_of(p);
  const int64_t summed = (p.batch_shared ? p.B : 1) * (p.time_shared ? tiles : 1);
  const int64_t wanted = std::min(kMostParts, kEnoughBlocks / (blocks * passes));
  const int64_t count =
      p.time_shared ? std::clamp<int64_t>(wanted, 1, std::max<int64_t>(summed, 1)) : 1;
  const auto as_int = [](int64_t n) { return static_cast<int>(n); };
  const Tiling tiling{as_int(p.T),
                      as_int(p.K),
                      as_int(p.before),
                      as_int(p.H),
                      as_int(tiles),
                      as_int(p.head_channels()),
                      as_int(p.weight_batch()),
                      summed,
                      (summed + count - 1) / count,
                      p.time_shared};
  const dim3 grid(blocks, count, passes);
  const auto gradient = sequences<T>(grad), sequence = sequences<T>(x);
  const auto target = mutable_weights<T>(out);
  if (!p.time_shared) {
    if (taps)
      tuned<T, true><<<grid, kThreads, 0, stream>>>(gradient, sequence, weights<T>(*taps), target,
                                                    nullptr, tiling);
    else
      tuned<T, false>
          <<<grid, kThreads, 0, stream>>>(gradient, sequence, {}, target, nullptr, tiling);
    return;
  }
  Tensor parts = make_tensor(x, {count * blocks * p.K}, ScalarType::Float);
  float* sums = static_cast<float*>(parts.mutable_data_ptr());
  tuned<T, false><<<grid, kThreads, 0, stream>>>(gradient, sequence, {}, target, sums, tiling);
  add_parts<T><<<blocks_for(blocks * p.K), kThreads, 0, stream>>>(sums, count, target,
                                                                  p.weight_batch(), p.H, p.K);
}

}  // namespace

Tensor grad_weight(const Tensor& grad, const Tensor& x, std::vector<int64_t> size,
                   std::vector<int64_t> stride, int64_t padding) {
  const Problem p(x, size, padding);
  check_alike(grad, x, "grad");
  check_same_sizes(grad, x, "grad");
  Tensor out = make_strided(x, size, stride);
  if (out.numel() == 0) return out;
  const Launch launch(x);
  dispatch_cuda(x, [&](auto zero) {
    using T = decltype(zero);
    if (tuned_fits(grad, x, p)) {
      if constexpr (sizeof(T) < 8)
        launch_tuned<T>(grad, x, /*taps=*/nullptr, out, p, launch.stream);
    } else if (p.time_shared) {
      naive_over_time<T><<<std::min(out.numel(), kMostBlocks), kThreads, 0, launch.stream>>>(
          sequences<T>(grad), sequences<T>(x), mutable_weights<T>(out), p);
    } else {
      naive_of_steps<T><<<blocks_for(out.numel()), kThreads, 0, launch.stream>>>(
          sequences<T>(grad), sequences<T>(x), mutable_weights<T>(out), p);
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return out;
}

Tensor grad_logits(const Tensor& given, const Tensor& x, const Tensor& taps, int64_t padding) {
  const Problem p(x, taps.sizes(), padding);
  check_alike(given, x, "grad");
  check_alike(taps, x, "taps");
  check_same_sizes(given, x, "grad");
  // The gradient of a sum is one number, expanded.
  const bool copied = contiguous_in_time(x) && !contiguous_in_time(given);
  const Tensor grad = copied ? torch::stable::contiguous(given) : given;
  if (taps.numel() == 0 || p.time_shared || passes_of(p) > 1 || !tuned_fits(grad, x, p))
    return grad_weight_then_logits<&grad_weight>(grad, x, taps, padding);
  Tensor out = make_strided(taps, taps.sizes().vec(), taps.strides().vec());
  const Launch launch(x);
  dispatch_cuda(x, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (sizeof(T) < 8) launch_tuned<T>(grad, x, &taps, out, p, launch.stream);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return out;
}

}  // namespace hoconv::dynamic_conv1d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("dynamic_conv1d_grad_weight.cuda", TORCH_BOX(&hoconv::dynamic_conv1d::grad_weight));
}
