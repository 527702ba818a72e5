// grad_weight[b, h, j, t] = sum over the head's channels c of grad[b, c, t] * x[b, c, t + j -
// before], added up over the sequences, or the steps, that share weights.
//
// A thread has kSteps steps and up to four distances, kLanes apart, and sums kSteps products for
// each value of x: the taps that it needs, and at both ends of its distances a few that it does
// not. The sums go through shared memory, and leave it in the order of the gradient's memory, or,
// where the steps share weights, as one partial sum a block; a second kernel adds those.
//
// An example, 16 sequences of 512 channels and 512 steps in 8 heads, K = 31: a block has 48
// distances of 64 steps. It copies 104 steps of x and 64 of the gradient, and for each pack of
// channels loads 11 packs for 24 sums, of which 15.5 on average are of taps.
//
// Where a head has fewer than kFewChannels channels and steps share weights, there are steps to sum
// over instead: a thread has some of them. few_channels.cuh has the rest.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "dynamic_conv1d/cuda/few_channels.cuh"

namespace hoconv::dynamic_conv1d {
namespace {

constexpr int kRowBytes = 128;       // of a step's channels in shared memory
constexpr int kMostLines = 4;        // distances of a thread
constexpr int64_t kMostParts = 256;  // partial sums of a weight, which one thread adds up
constexpr int64_t kLeastParts = 4;   // fewer do not make up for the second kernel
constexpr int kColumns = kTile + 1;  // of sums in shared memory: rows begin in other banks

struct Plan {
  int64_t H, T, before;
  int channels;        // of a head
  int tile;            // steps that a block sums at once
  unsigned tiles;      // of a sequence
  unsigned own_tiles;  // the same, or 1 where the steps share weights
  unsigned head_groups;
  int64_t batch;        // of the weights
  int64_t steps;        // of the weights: T, or 1 where the steps share them
  int64_t parts;        // that a weight's sum is cut into
  int64_t terms, part;  // tiles, times chunks of channels; of which a block adds this many
  int chunks, chunk;    // of a head's channels; channels of one
  int K, taps;          // all; of a pass
  bool time_shared;
  Packed of_grad, of_x;
};

// What a block computes, and the terms that it adds up: tiles of steps, and of sequences, that
// share weights, and within a tile chunks of channels. blockIdx.x counts its own tile, heads, and
// passes over the taps; `row`, from blockIdx.y on, sequences and parts of a sum.
struct Share {
  int64_t heads, b, part, left;
  int64_t sequence, start;  // of the next term
  int channel, first_tap, taps;

  __device__ Share(const Plan& g, int64_t row) {
    const unsigned tile = blockIdx.x % g.own_tiles, rest = blockIdx.x / g.own_tiles;
    heads = rest % g.head_groups;
    first_tap = static_cast<int>(rest / g.head_groups) * g.taps;
    taps = min(g.taps, g.K - first_tap);
    b = row, part = 0;
    int64_t tiles = 0;  // before the first term
    channel = 0, left = g.terms;
    if (g.parts > 1) {
      b = row / g.parts, part = row % g.parts;
      const int64_t begin = part * g.part;
      tiles = begin / g.chunks, channel = static_cast<int>(begin % g.chunks) * g.chunk;
      left = min(g.part, g.terms - begin);
    }
    sequence = b + (g.time_shared ? tiles / g.tiles : tiles);
    start = (g.time_shared ? tiles % g.tiles : tile) * g.tile;
  }
  __device__ void next(const Plan& g) {
    --left, channel += g.chunk;
    if (channel < g.channels) return;
    channel = 0;
    if (g.time_shared) start += g.tile;
    if (!g.time_shared || start >= g.T) ++sequence;
    if (g.time_shared && start >= g.T) start = 0;
  }
  // Where the partial sums of a tap of a head are.
  template <typename A>
  __device__ A* sums(A* parts, const Plan& g, int64_t h, int tap) const {
    return parts + (((part * g.batch + b) * g.H + h) * g.K + first_tap + tap) * g.steps;
  }
};

// The bounds are how many blocks a multiprocessor's registers serve at once: blocks wait for memory
// in turns.
template <typename T, int Lines>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1
                                            : Lines == 1   ? 8
                                            : Lines == 2   ? 6
                                                           : 4)
    of_heads(Sequences<const T> grad, Sequences<const T> x, Weights<T> out, acc_t<T>* parts,
             Plan g) {
  using A = acc_t<T>;
  constexpr int pack = kPackBytes / sizeof(T), width = kRowBytes / sizeof(T);  // slots
  constexpr int pitch = pitch_of<T>(width), lines = kTile - kSteps + Lines * kLanes;
  constexpr int copied = (lines + kTile) * pitch * sizeof(T);
  constexpr int summed = (Lines * kLanes - kSteps + 1) * kColumns * sizeof(A);
  __shared__ uint4 shared[(std::max(copied, summed) + sizeof(uint4) - 1) / sizeof(uint4)];
  T* rows = reinterpret_cast<T*>(shared);  // of x
  T* gradients = rows + lines * pitch;
  A* tile = reinterpret_cast<A*>(shared);  // of sums, (taps, kColumns)
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;

  for (int64_t i = blockIdx.y; i < g.batch * g.parts; i += gridDim.y) {
    Share share(g, i);
    const int64_t h = share.heads, own_start = share.start;
    const int used_lines = (share.taps + kSteps - 1 + kLanes - 1) / kLanes;
    A sum[Lines][kSteps] = {};
    for (; share.left > 0; share.next(g)) {
      const int64_t b = share.sequence, start = share.start;
      const int steps = steps_in_use(start, g.T);
      // Past the last step there is no gradient, though there may be values of x.
      const int own_steps = static_cast<int>(min(int64_t{kSteps}, g.T - start - group * kSteps));
      const int c = share.channel, used = min(width, (g.channels - c + pack - 1) / pack * pack);
      const Slots slots{1, used, g.channels, 1};
      const int64_t channel = h * g.channels + c;
      __syncthreads();  // until the rows before are read
      copy_steps(gradients, pitch, grad.at(b, channel, 0), grad.s, g.of_grad, slots, c, 1, start,
                 steps, g.T);
      copy_steps(rows, pitch, x.at(b, channel, 0), x.s, g.of_x, slots, c, 1,
                 start - g.before + share.first_tap, steps - kSteps + used_lines * kLanes, g.T);
      __syncthreads();
      const T* row = rows + (group * kSteps + lane) * pitch;
      const T* gradient = gradients + group * kSteps * pitch;
      for (int slot = 0; slot < used; slot += pack) {
        A value[Lines][pack];
#pragma unroll
        for (int k = 0; k < Lines; ++k) {
          const auto values =
              *reinterpret_cast<const Pack<T, pack>*>(row + k * kLanes * pitch + slot);
#pragma unroll
          for (int i = 0; i < pack; ++i) value[k][i] = widen<A>(values.e[i]);
        }
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          if (s >= own_steps) continue;
          const auto factors = *reinterpret_cast<const Pack<T, pack>*>(gradient + s * pitch + slot);
#pragma unroll
          for (int i = 0; i < pack; ++i) {
            const A factor = widen<A>(factors.e[i]);
#pragma unroll
            for (int k = 0; k < Lines; ++k) sum[k][s] += factor * value[k][i];
          }
        }
      }
    }
    __syncthreads();  // until the last rows are read
#pragma unroll
    for (int k = 0; k < Lines; ++k)
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int tap = lane + k * kLanes - s;
        if (tap >= 0 && tap < share.taps) tile[tap * kColumns + group * kSteps + s] = sum[k][s];
      }
    __syncthreads();
    if (g.time_shared) {
      for (int tap = threadIdx.x; tap < share.taps; tap += kThreads) {
        A total = 0;
        for (int s = 0; s < kTile; ++s) total += tile[tap * kColumns + s];
        *share.sums(parts, g, h, tap) = total;
      }
    } else {
      const int steps = static_cast<int>(min(int64_t{kTile}, g.T - own_start));
      const bool by_tap = out.s.k == 1;  // neighbouring threads write neighbouring elements
      const int along = by_tap ? share.taps : steps;
      for (int n = threadIdx.x; n < share.taps * steps; n += kThreads) {
        const int across = n / along, m = n - across * along;
        const int tap = by_tap ? m : across, step = by_tap ? across : m;
        const A total = tile[tap * kColumns + step];
        if (g.parts > 1)
          share.sums(parts, g, h, tap)[own_start + step] = total;
        else
          *out.at(share.b, h, share.first_tap + tap, own_start + step) = narrow<T>(total);
      }
    }
  }
}

// Heads have few channels, and steps share weights: a thread sums over the kSteps steps of
// few_channels.cuh. The threads of a warp have neighbouring steps of one head, or, with
// `ByChannel`, neighbouring channels of several heads.
template <typename T, bool ByChannel>
__global__ void __launch_bounds__(kThreads)
    over_steps(Sequences<const T> grad, Sequences<const T> x, acc_t<T>* parts, Plan g) {
  using A = acc_t<T>;
  __shared__ A sums[kFewTaps][kWarps][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int heads = ByChannel ? kWarp / g.channels : 1;  // of a block

  for (int64_t i = blockIdx.y; i < g.batch * g.parts; i += gridDim.y) {
    Share share(g, i);
    const int64_t first_head = share.heads * heads;
    const int own_heads = static_cast<int>(min(int64_t{heads}, g.H - first_head));
    A sum[kFewTaps] = {};
    for (; share.left > 0; share.next(g)) {
      const int64_t t = share.start + (ByChannel ? warp : threadIdx.x) * kSteps;
      const int64_t first = t - g.before + share.first_tap;
      const unsigned own = inside<kSteps>(t, g.T);
      if (!own || (ByChannel && lane >= own_heads * g.channels)) continue;
      for (int c = ByChannel ? lane : 0; c < (ByChannel ? lane + 1 : g.channels); ++c) {
        const int64_t channel = first_head * g.channels + c;
        A gradient[kSteps], window[kWindow];
        load_steps(gradient, grad.at(share.sequence, channel, t), grad.s.t, t, g.T, kSteps,
                   !ByChannel && g.of_grad == Packed::steps);
        load_steps(window, x.at(share.sequence, channel, first), x.s.t, first, g.T,
                   share.taps + kSteps - 1, !ByChannel && g.of_x == Packed::steps);
#pragma unroll
        for (int tap = 0; tap < kFewTaps; ++tap) {
          if (tap >= share.taps) continue;
#pragma unroll
          for (int s = 0; s < kSteps; ++s)  // past the last step x may be infinite
            if (own >> s & 1) sum[tap] += gradient[s] * window[tap + s];
        }
      }
    }
    __syncthreads();  // until the sums before are read
#pragma unroll
    for (int tap = 0; tap < kFewTaps; ++tap) {
      if constexpr (!ByChannel)
#pragma unroll
        for (int far = kWarp / 2; far > 0; far /= 2)
          sum[tap] += __shfl_xor_sync(0xffffffff, sum[tap], far);
      sums[tap][warp][lane] = sum[tap];
    }
    __syncthreads();
    for (int n = threadIdx.x; n < own_heads * share.taps; n += kThreads) {
      const int head = n / share.taps, tap = n % share.taps;
      A total = 0;
      for (int w = 0; w < kWarps; ++w)
        for (int c = 0; c < (ByChannel ? g.channels : 1); ++c)
          total += sums[tap][w][head * g.channels + c];
      *share.sums(parts, g, first_head + head, tap) = total;
    }
  }
}

// Adds up the partial sums (parts, batch, H, K, steps), in order.
template <typename T>
__global__ void add_parts(const acc_t<T>* parts, Weights<T> out, Plan g) {
  const int64_t rows = g.batch * g.H * g.K, total = rows * g.steps;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < total; n += stride) {
    acc_t<T> sum = 0;
#pragma unroll 8
    for (int64_t i = 0; i < g.parts; ++i) sum += parts[i * total + n];
    const int64_t row = n / g.steps, h = row / g.K;
    *out.at(h / g.H, h % g.H, row % g.K, n % g.steps) = narrow<T>(sum);
  }
}

// The plan of blocks that sum `tile` steps of `chunk` channels at once, and have `heads` heads and
// at most `most` taps.
Plan plan(const Tensor& grad, const Tensor& x, const Problem& p, int tile, int64_t chunk,
          int64_t heads, int64_t most, dim3& grid) {
  Plan g;
  g.H = p.H, g.T = p.T, g.K = static_cast<int>(p.K), g.before = p.before;
  g.channels = static_cast<int>(p.head_channels());
  g.batch = p.weight_batch(), g.steps = p.time_shared ? 1 : p.T;
  g.tile = tile, g.tiles = static_cast<unsigned>((p.T + tile - 1) / tile);
  g.own_tiles = p.time_shared ? 1 : g.tiles;
  g.head_groups = static_cast<unsigned>((p.H + heads - 1) / heads);
  g.chunk = static_cast<int>(chunk);
  g.chunks = static_cast<int>((p.head_channels() + chunk - 1) / chunk);
  const int64_t passes = (p.K + most - 1) / most;
  g.taps = static_cast<int>((p.K + passes - 1) / passes);
  g.terms = (p.batch_shared ? p.B : 1) * (p.time_shared ? g.tiles : 1) * g.chunks;
  const int64_t blocks = g.own_tiles * g.head_groups * passes;
  const int64_t wanted = std::min({kMostParts, kEnoughBlocks / (blocks * g.batch), g.terms});
  g.parts = wanted >= kLeastParts || p.time_shared ? std::max<int64_t>(wanted, 1) : 1;
  g.part = (g.terms + g.parts - 1) / g.parts;
  g.time_shared = p.time_shared;
  g.of_grad = packed(grad), g.of_x = packed(x);
  grid = dim3(static_cast<unsigned>(blocks),
              static_cast<unsigned>(std::min(g.batch * g.parts, kMaxGridYZ)));
  return g;
}

template <typename T>
void launch(const Tensor& grad, const Tensor& x, Tensor& out, const Problem& p,
            cudaStream_t stream) {
  using A = acc_t<T>;
  const bool few = p.head_channels() < kFewChannels;
  const auto gradient = sequences<T>(grad), sequence = sequences<T>(x);
  const auto target = mutable_weights<T>(out);
  if (few && !p.time_shared) {
    const Spread spread(out.stride(3) == 1, p.H, p.T);
    const auto add_up = spread.by_step ? grad_weight_few<T, true> : grad_weight_few<T, false>;
    add_up<<<spread.grid(p.weight_batch()), kThreads, 0, stream>>>(
        gradient, sequence, target, p, spread, PackedSteps(x, out, grad));
    return;
  }
  dim3 grid;
  const bool by_channel = x.stride(2) != 1;
  constexpr int64_t chunk = kRowBytes / sizeof(T);
  const Plan g =
      few ? plan(grad, x, p, kSteps * (by_channel ? kWarps : kThreads), p.head_channels(),
                 by_channel ? kWarp / p.head_channels() : 1, kFewTaps, grid)
          : plan(grad, x, p, kTile, chunk, 1, kMostLines * kLanes - (kSteps - 1), grid);
  const bool partial = g.time_shared || g.parts > 1;
  const int64_t elements = out.numel();
  Tensor parts = make_tensor(x, {partial ? g.parts * elements : 0},
                             sizeof(A) == 8 ? ScalarType::Double : ScalarType::Float);
  A* sums = static_cast<A*>(parts.mutable_data_ptr());
  if (few) {
    const auto add_up = by_channel ? over_steps<T, true> : over_steps<T, false>;
    add_up<<<grid, kThreads, 0, stream>>>(gradient, sequence, sums, g);
  } else {
    const int lines = (g.taps + kSteps - 1 + kLanes - 1) / kLanes;
    const auto add_up = lines == 1   ? of_heads<T, 1>
                        : lines == 2 ? of_heads<T, 2>
                        : lines == 3 ? of_heads<T, 3>
                                     : of_heads<T, kMostLines>;
    add_up<<<grid, kThreads, 0, stream>>>(gradient, sequence, target, sums, g);
  }
  if (partial) {
    const int64_t blocks = std::min((elements + kThreads - 1) / kThreads, kEnoughBlocks);
    add_parts<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(sums, target, g);
  }
}

}  // namespace

Tensor grad_weight(const Tensor& grad, const Tensor& x, std::vector<int64_t> size,
                   std::vector<int64_t> stride, int64_t padding) {
  const Problem p(x, size, padding);
  check_alike(grad, x, "grad");
  check_same_sizes(grad, x, "grad");
  check_counts(p);
  Tensor out = make_strided(x, size, stride);
  if (out.numel() == 0 || x.numel() == 0) return torch::stable::zero_(out);
  const Launch launched(x);
  dispatch_cuda(x, [&](auto zero) {
    launch<decltype(zero)>(grad, x, out, p, launched.stream);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return out;
}

}  // namespace hoconv::dynamic_conv1d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("dynamic_conv1d_grad_weight.cuda", TORCH_BOX(&hoconv::dynamic_conv1d::grad_weight));
}
