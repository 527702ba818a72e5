// grad_weight[b, h, j, t] = sum over c of grad[b, c, t] * x[b, c, t + j - before], summed over the
// batch or the steps where these share weights. The terms of that second sum are never written to
// memory.
//
// A block of the tuned kernel computes kTaps taps of a tile, of which a thread has kWarpTaps taps
// of kSteps steps in registers. It loads kRows channels at a time. Where weights are shared, it
// walks over the tiles and sequences that share them. Where steps share weights, a block adds up
// the sums of its threads and steps and writes one partial sum; a second kernel adds those.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "dynamic_conv1d/cuda/kernels.cuh"

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

template <typename T>
__global__ void __launch_bounds__(kThreads)
    tuned(Sequences<const T> grad, Sequences<const T> x, Weights<T> out, float* parts, Tiling g) {
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

#pragma unroll
  for (int i = 0; i < kWarpTaps; ++i) {
    if (tap + i >= g.K) continue;
    if (g.time_shared) {
      float total = (sum[i][0] + sum[i][1]) + (sum[i][2] + sum[i][3]);
#pragma unroll
      for (int far = 16; far > 0; far /= 2) total += __shfl_xor_sync(0xffffffff, total, far);
      const int64_t row = (blockIdx.y * int64_t{g.batch} + own_b) * g.H + h;
      if (lane == 0) parts[row * g.K + tap + i] = total;
    } else {
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

// Launches the tuned kernel. Returns false where only the naive one fits.
template <typename T>
bool launch_tuned(const Tensor& grad, const Tensor& x, Tensor& out, const Problem& p,
                  cudaStream_t stream) {
  const int64_t tiles = (p.T + kTile - 1) / kTile;
  const int64_t blocks = p.weight_batch() * p.H * (p.time_shared ? 1 : tiles);
  const int64_t passes = (p.K + kTaps - 1) / kTaps;
  if (blocks > kMostBlocks || passes > kMaxGridYZ || p.B > kMostBlocks) return false;
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
  Tensor parts = make_tensor(x, {p.time_shared ? count * blocks * p.K : 0}, ScalarType::Float);
  float* sums = static_cast<float*>(parts.mutable_data_ptr());
  const dim3 grid(blocks, count, passes);
  tuned<T><<<grid, kThreads, 0, stream>>>(sequences<T>(grad), sequences<T>(x),
                                          mutable_weights<T>(out), sums, tiling);
  if (p.time_shared)
    add_parts<T><<<blocks_for(blocks * p.K), kThreads, 0, stream>>>(
        sums, count, mutable_weights<T>(out), p.weight_batch(), p.H, p.K);
  return true;
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
    bool done = false;
    if constexpr (sizeof(T) < 8)
      if (contiguous_in_time(grad) && contiguous_in_time(x) && counts_fit(p))
        done = launch_tuned<T>(grad, x, out, p, launch.stream);
    if (!done && p.time_shared)
      naive_over_time<T><<<std::min(out.numel(), kMostBlocks), kThreads, 0, launch.stream>>>(
          sequences<T>(grad), sequences<T>(x), mutable_weights<T>(out), p);
    if (!done && !p.time_shared)
      naive_of_steps<T><<<blocks_for(out.numel()), kThreads, 0, launch.stream>>>(
          sequences<T>(grad), sequences<T>(x), mutable_weights<T>(out), p);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return out;
}

}  // namespace hoconv::dynamic_conv1d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("dynamic_conv1d_grad_weight.cuda", TORCH_BOX(&hoconv::dynamic_conv1d::grad_weight));
}
