// out[b, c, t] = sum over j of weight[b, h, j, t] * x[b, c, t + j - before], and the input
// gradient,
//
//   grad_x[b, c, t] = sum over i of weight[b, h, K - 1 - i, s] * grad[b, c, s],
//   s = t + i - (K - 1 - before),
//
// which is the same sum with mirrored taps (`Mirrored`) and with the weights of the step that is
// read. Both gather: no thread adds to the output of another.
//
// The tuned kernel reads the weights from global memory once for all channels of the head. A warp
// computes N channels of the tile. Per four taps a thread loads 16 weights from shared memory, and
// per channel the next 4 of the 8 values that its steps read, for 16 multiply-adds a channel.
//
// Where the weights are a softmax over the taps, a block computes that of its tile in shared
// memory: a thread has a step. The first block of a tile and head writes it.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "dynamic_conv1d/cuda/kernels.cuh"
#include "dynamic_conv1d/layer.h"

namespace hoconv::dynamic_conv1d {
namespace {

// Neighbouring threads compute neighbouring steps, or neighbouring channels where channels are
// contiguous (`channels_last`).
template <typename T, bool Mirrored>
__global__ void naive(Sequences<const T> x, Weights<const T> weight, Sequences<T> out, Problem p,
                      int64_t before, bool channels_last) {
  using A = acc_t<T>;
  const int64_t total = p.B * p.C * p.T, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < total; n += step) {
    const int64_t b = n / (p.C * p.T);
    const int64_t t = channels_last ? n / p.C % p.T : n % p.T;
    const int64_t c = channels_last ? n % p.C : n / p.T % p.C;
    const int64_t h = c / (p.C / p.H);
    A sum = 0;
    for (int64_t j = 0; j < p.K; ++j) {
      const int64_t s = t + j - before;
      const bool inside = s >= 0 && s < p.T;
      if (Mirrored && !inside) continue;
      const A value = inside ? widen<A>(*x.at(b, c, s)) : A(0);
      sum += widen<A>(*weight.at(b, h, Mirrored ? p.K - 1 - j : j, Mirrored ? s : t)) * value;
    }
    *out.at(b, c, t) = narrow<T>(sum);
  }
}

// blockIdx.x counts the tiles of all sequences and heads; blockIdx.y the parts of a head's
// channels.
struct Tiling {
  int T, K, before, H;
  int tiles;                    // of a sequence
  int head_channels, channels;  // of a head; of a part of it, a multiple of kWarps * N
  int row;  // pitch in shared memory: the values that a tile reads, rounded up to four taps
};

// Replaces each column of `taps` by its softmax in the precision of T.
template <typename T>
__device__ void normalize(float* taps, int K) {
  static_assert(kThreads == kTile);
  float* tap = taps + threadIdx.x;
  float most = tap[0], total = 0;
  for (int j = 1; j < K; ++j) most = fmaxf(most, tap[j * kPitch]);
  for (int j = 0; j < K; ++j) total += tap[j * kPitch] = expf(tap[j * kPitch] - most);
  for (int j = 0; j < K; ++j) tap[j * kPitch] = widen<float>(narrow<T>(tap[j * kPitch] / total));
}

// With `Softmax`, `weight` is what the weights are a softmax of, and `normalized`, whose taps are
// contiguous, takes them.
template <typename T, bool Mirrored, bool Softmax, int N>
__global__ void __launch_bounds__(kThreads)
    tuned(Sequences<const T> x, Weights<const T> weight, Weights<T> normalized, Sequences<T> out,
          Tiling g) {
  extern __shared__ float4 shared[];
  float* taps = reinterpret_cast<float*>(shared);  // (K, kTile), rows kPitch apart
  float* rows = taps + g.K * kPitch;               // (kWarps * N, g.row)
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int start = blockIdx.x % g.tiles * kTile;
  const int64_t b = blockIdx.x / g.tiles / g.H, h = blockIdx.x / g.tiles % g.H;

  load_weights<Mirrored>(taps, weight.at(b, h, 0, 0), weight.s, g.K, g.T,
                         Mirrored ? start - g.before : start);
  if constexpr (Softmax) {
    __syncthreads();
    normalize<T>(taps, g.K);
    __syncthreads();
    if (blockIdx.y == 0)
      store_weights(taps, normalized.at(b, h, 0, start), normalized.s.t, g.K, g.T - start);
  }

  const int first = blockIdx.y * g.channels, last = min(first + g.channels, g.head_channels);
  for (int c = first; c < last; c += kWarps * N) {
    __syncthreads();  // until the previous rows are read
    copy_rows(rows, g.row, x.at(b, h * g.head_channels + c, 0), x.s.c, x.s.t,
              min(kWarps * N, last - c), kTile + g.K - 1, g.T, start - g.before);
    __syncthreads();

    const float* row = rows + warp * N * g.row + lane * kSteps;
    const float* tap_weight = taps + lane * kSteps;
    float sum[N][kSteps] = {}, window[N][4];
#pragma unroll
    for (int m = 0; m < N; ++m) load_four(row + m * g.row, window[m]);
    for (int j = 0; j < g.K; j += 4) {
      float factor[4][kSteps], next[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (j + i < g.K) load_four(tap_weight + (j + i) * kPitch, factor[i]);
#pragma unroll
      for (int m = 0; m < N; ++m) {
        load_four(row + m * g.row + j + 4, next);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (j + i >= g.K) continue;
#pragma unroll
          for (int v = 0; v < kSteps; ++v)
            sum[m][v] += factor[i][v] * (i + v < 4 ? window[m][i + v] : next[i + v - 4]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) window[m][i] = next[i];
      }
    }
#pragma unroll
    for (int m = 0; m < N; ++m) {
      const int channel = c + warp * N + m;
      if (channel >= last) continue;
#pragma unroll
      for (int v = 0; v < kSteps; ++v) {
        const int t = start + lane * kSteps + v;
        if (t < g.T) *out.at(b, h * g.head_channels + channel, t) = narrow<T>(sum[m][v]);
      }
    }
  }
}

// Launches the tuned kernel with N channels a warp; with a softmax, if there is a tensor for what
// it gives. Returns false where it does not fit.
template <typename T, bool Mirrored, int N>
bool launch_tuned(const Tensor& x, const Tensor& weight, Tensor* normalized, Tensor& out,
                  const Problem& p, int64_t before, cudaStream_t stream) {
  const int64_t row = kTile + (p.K + 3) / 4 * 4;
  const int64_t bytes = (p.K * kPitch + kWarps * N * row) * sizeof(float);
  const int64_t tiles = (p.T + kTile - 1) / kTile, blocks = p.B * p.H * tiles;
  if (bytes > kMostSharedBytes || blocks > kMostBlocks) return false;
  const int64_t groups = (p.head_channels() + kWarps * N - 1) / (kWarps * N);
  const int64_t parts = std::clamp<int64_t>(kEnoughBlocks / blocks, 1, groups);
  const int64_t channels = (groups + parts - 1) / parts * kWarps * N;
  const auto as_int = [](int64_t n) { return static_cast<int>(n); };
  const Tiling tiling{as_int(p.T),      as_int(p.K),   as_int(before),
                      as_int(p.H),      as_int(tiles), as_int(p.head_channels()),
                      as_int(channels), as_int(row)};
  const dim3 grid(blocks, (p.head_channels() + channels - 1) / channels);
  if (normalized) {
    if constexpr (!Mirrored)
      tuned<T, false, true, N><<<grid, kThreads, bytes, stream>>>(
          sequences<T>(x), weights<T>(weight), mutable_weights<T>(*normalized),
          mutable_sequences<T>(out), tiling);
  } else {
    tuned<T, Mirrored, false, N><<<grid, kThreads, bytes, stream>>>(
        sequences<T>(x), weights<T>(weight), {}, mutable_sequences<T>(out), tiling);
  }
  return true;
}

// Launches the tuned kernel that fits, if one does.
template <typename T, bool Mirrored>
bool launch_fitting(const Tensor& x, const Tensor& weight, Tensor* normalized, Tensor& out,
                    const Problem& p, int64_t before, cudaStream_t stream) {
  if constexpr (sizeof(T) < 8) {
    if (!contiguous_in_time(x) || !contiguous_in_time(out) || !counts_fit(p)) return false;
    // With fewer channels than warps, threads would idle; the weights are most of the bytes then.
    if (p.head_channels() >= 8 * kWarps &&
        launch_tuned<T, Mirrored, 8>(x, weight, normalized, out, p, before, stream))
      return true;
    return p.head_channels() >= kWarps &&
           launch_tuned<T, Mirrored, 2>(x, weight, normalized, out, p, before, stream);
  }
  return false;
}

template <bool Mirrored>
Tensor convolve(const Tensor& x, const Tensor& weight, int64_t padding) {
  const Problem p(x, weight.sizes(), padding);
  check_alike(weight, x, "weight");
  Tensor out = make_like(x);
  if (out.numel() == 0) return out;
  const Launch launch(x);
  const int64_t before = Mirrored ? p.mirrored_before() : p.before;
  dispatch_cuda(x, [&](auto zero) {
    using T = decltype(zero);
    if (!launch_fitting<T, Mirrored>(x, weight, /*normalized=*/nullptr, out, p, before,
                                     launch.stream))
      naive<T, Mirrored><<<blocks_for(out.numel()), kThreads, 0, launch.stream>>>(
          sequences<T>(x), weights<T>(weight), mutable_sequences<T>(out), p, before,
          x.stride(1) == 1 && !contiguous_in_time(x));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return out;
}

}  // namespace

Tensor forward(const Tensor& x, const Tensor& weight, int64_t padding) {
  return convolve<false>(x, weight, padding);
}

Tensor grad_input(const Tensor& grad, const Tensor& weight, int64_t padding) {
  return convolve<true>(grad, weight, padding);
}

std::tuple<Tensor, Tensor> convolve_softmax(const Tensor& x, const Tensor& logits,
                                            int64_t padding) {
  const Problem p(x, logits.sizes(), padding);
  check_alike(logits, x, "weight");
  if (x.numel() > 0) {
    Tensor out = make_like(x);
    Tensor taps = by_head(make_tensor(x, {p.B, p.T, p.H, p.K}));
    const Launch launch(x);
    bool done = false;
    dispatch_cuda(x, [&](auto zero) {
      using T = decltype(zero);
      done = launch_fitting<T, false>(x, logits, &taps, out, p, p.before, launch.stream);
      if (done) STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
    if (done) return {out, taps};
  }
  return normalize_then_convolve<&forward>(x, logits, padding);
}

}  // namespace hoconv::dynamic_conv1d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("dynamic_conv1d.cuda", TORCH_BOX(&hoconv::dynamic_conv1d::forward));
  m.impl("dynamic_conv1d_grad_input.cuda", TORCH_BOX(&hoconv::dynamic_conv1d::grad_input));
}
