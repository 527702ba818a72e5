// out[b, c, t] = sum over j of weight[b, h, j, t] * x[b, c, t + j - before], and the input
// gradient,
//
//   grad_x[b, c, t] = sum over i of weight[b, h, K - 1 - i, s] * grad[b, c, s],
//   s = t + i - (K - 1 - before),
//
// which is the same sum with mirrored taps (`Mirrored`) and with the weights of the step that is
// read. Both gather: no thread adds to the output of another.
//
// A thread computes kSteps steps of kChannels channels. At each distance it reads kChannels values
// of x, in a row of shared memory, and kSteps weights, which lie side by side in the order in which
// it needs them: 3 loads for 32 products. An example, 16 sequences of 512 channels and 512 steps in
// 8 heads, K = 31, in bfloat16: 1024 blocks, which an H200 runs at once; each copies 94 steps of 64
// channels and 64 x 31 weights, 16 KB, and then walks along 38 distances. few_channels.cuh has what
// serves fewer than four channels a head.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "dynamic_conv1d/cuda/few_channels.cuh"

namespace hoconv::dynamic_conv1d {
namespace {

struct Plan {
  int64_t B, H, T, before;
  unsigned tiles;  // of steps
  int K;
  Slots slots;
  int depth;          // distances between two copies
  bool time_shared;   // whether steps share the weights
  Packed from, into;  // of x and of the output
};

// Where the weight of step s of a group at a distance lies in shared memory.
__device__ __forceinline__ int place(const Plan& g, int head, int group, int distance) {
  const int groups = g.time_shared ? 1 : kGroups;
  return ((head * groups + (g.time_shared ? 0 : group)) * g.depth + distance) * kSteps;
}

// Copies the weights of `count` distances from the distance `first` on, of the steps from `start`
// on, to shared memory. `from` is tap 0 of step 0 of the tile's first head.
template <bool Mirrored, typename T, typename A>
__device__ __forceinline__ void copy_weights(A* to, const T* from, const WeightStrides& s,
                                             const Plan& g, int heads, int64_t start, int first,
                                             int count) {
  constexpr int taps = kWarp / kSteps;  // of a warp at once, for all steps of a group: all banks
  constexpr int at_once = 4;
  const int lane = threadIdx.x % kWarp, step = lane % kSteps;
  const int first_tap = max(0, first - (kSteps - 1)), last_tap = min(g.K, first + count);
  const int rounds = (last_tap - first_tap + taps - 1) / taps;
  const int groups = g.time_shared ? 1 : kGroups;
  for (int n = threadIdx.x / kWarp; n < heads * groups * rounds; n += kWarps * at_once) {
    T value[at_once];
    int target[at_once];
#pragma unroll
    for (int m = 0; m < at_once; ++m) {
      const int item = n + m * kWarps, row = item / rounds;
      const int tap = first_tap + (item - row * rounds) * taps + lane / kSteps;
      const int head = row / groups, group = row - head * groups;
      const int distance = tap + step - first;
      // The step whose weight it is.
      const int64_t t = start + group * kSteps + step + (Mirrored ? tap - g.before : 0);
      const bool kept = head < heads && tap < last_tap && distance >= 0 && distance < count;
      target[m] = kept ? place(g, head, group, distance) + step : -1;
      const bool inside = kept && (g.time_shared || (t >= 0 && t < g.T));
      value[m] =
          inside
              ? load<1>(from + head * s.h + (Mirrored ? g.K - 1 - tap : tap) * s.k + t * s.t).e[0]
              : narrow<T>(A(0));
    }
#pragma unroll
    for (int m = 0; m < at_once; ++m)
      if (target[m] >= 0) to[target[m]] = widen<A>(value[m]);
  }
}

template <typename T, bool Mirrored>
__global__ void __launch_bounds__(kThreads, sizeof(T) < 8 ? 8 : 1)
    convolve(Sequences<const T> x, Weights<const T> weight, Sequences<T> out, Plan g) {
  using A = acc_t<T>;
  extern __shared__ uint4 shared[];
  A* taps = reinterpret_cast<A*>(shared);
  T* rows =
      reinterpret_cast<T*>(taps + g.slots.heads * (g.time_shared ? 1 : kGroups) * g.depth * kSteps);
  constexpr int pitch = pitch_of<T>(kSlots);
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;

  const unsigned head_tile = blockIdx.x / g.tiles, tiles = g.slots.tiles;
  const int64_t start = int64_t{blockIdx.x % g.tiles} * kTile;
  const int64_t first_head = int64_t{head_tile / tiles} * g.slots.heads;
  const int first_channel = static_cast<int>(head_tile % tiles) * g.slots.of_head;
  const int heads = static_cast<int>(min(int64_t{g.slots.heads}, g.H - first_head));
  const int64_t channel = first_head * g.slots.channels + first_channel;
  const int steps = steps_in_use(start, g.T);
  for (int64_t b = blockIdx.y; b < g.B; b += gridDim.y) {
    const bool has_channels = lane * kChannels < heads * g.slots.of_head;
    const bool used = has_channels && group * kSteps < steps;
    const int head = has_channels ? lane * kChannels / g.slots.of_head : 0;

    A sum[kSteps][kChannels] = {};
    const int distances = g.K + kSteps - 1;
    for (int from = 0; from < distances; from += g.depth) {
      const int count = min(g.depth, distances - from);
      __syncthreads();  // until what was copied before is read
      copy_weights<Mirrored>(taps, weight.at(b, first_head, 0, 0), weight.s, g, heads, start, from,
                             count);
      copy_steps(rows, pitch, x.at(b, channel, 0), x.s, g.from, g.slots, first_channel, heads,
                 start - g.before + from, steps - kSteps + count, g.T);
      __syncthreads();
      if (!used) continue;
      const T* row = rows + group * kSteps * pitch + lane * kChannels;
      const A* factors = taps + place(g, head, group, 0);
      const auto multiply = [&](int d, auto all) {
        A value[kChannels], factor[kSteps];
        const auto values = *reinterpret_cast<const Pack<T, kChannels>*>(row + d * pitch);
#pragma unroll
        for (int v = 0; v < kChannels; ++v) value[v] = widen<A>(values.e[v]);
        constexpr int pack = kPackBytes / sizeof(A);
#pragma unroll
        for (int s = 0; s < kSteps; s += pack)
          *reinterpret_cast<Pack<A, pack>*>(factor + s) =
              *reinterpret_cast<const Pack<A, pack>*>(factors + d * kSteps + s);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          if (!all && static_cast<unsigned>(from + d - s) >= static_cast<unsigned>(g.K)) continue;
#pragma unroll
          for (int v = 0; v < kChannels; ++v) sum[s][v] += factor[s] * value[v];
        }
      };
      // Of the gradient, nothing is outside of the sequence: no zeros, which might meet infinity.
      int d = 0, end = count;
      if (Mirrored) {
        const int64_t position = start + group * kSteps - g.before + from;
        d = static_cast<int>(min(int64_t{count}, max(int64_t{0}, -position)));
        end = static_cast<int>(max(int64_t{d}, min(int64_t{count}, g.T - position)));
      }
      // At these distances every step has a tap.
      const int whole = min(end, max(d, kSteps - 1 - from)),
                part = max(whole, min(end, g.K - from));
      for (; d < whole; ++d) multiply(d, std::false_type{});
#pragma unroll 4
      for (; d < part; ++d) multiply(d, std::true_type{});
      for (; d < end; ++d) multiply(d, std::false_type{});
    }

    constexpr int pack = std::min<int>(kSteps, kPackBytes / sizeof(T));
    int64_t t = start + group * kSteps;
    int next = pack;  // from a pack of steps to the next one
    if (pack == kSteps / 2 && g.into == Packed::steps) {
      // Groups of a warp swap halves, so that its stores fill whole sectors of memory.
      const bool second = group % 2 == 1;
#pragma unroll
      for (int s = 0; s < pack; ++s)
#pragma unroll
        for (int v = 0; v < kChannels; ++v) {
          const A given = second ? sum[s][v] : sum[s + pack][v];
          const A taken = __shfl_xor_sync(0xffffffff, given, kLanes);
          if (second)
            sum[s][v] = taken;
          else
            sum[s + pack][v] = taken;
        }
      if (second) t -= pack;
      next = kSteps;
    }
    if (!has_channels) continue;

    const int own =
        lane * kChannels - head * g.slots.of_head + first_channel;  // channel of its head
    T* target = out.at(b, (first_head + head) * g.slots.channels + own, t);
    if (g.into == Packed::channels && own + kChannels <= g.slots.channels &&
        reinterpret_cast<uintptr_t>(target) % (sizeof(T) * kChannels) == 0) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (t + s >= g.T) continue;
        constexpr int part = std::min(kChannels, pack);
#pragma unroll
        for (int v = 0; v < kChannels; v += part) {
          A together[part];
#pragma unroll
          for (int i = 0; i < part; ++i) together[i] = sum[s][v + i];
          store_sum(target + s * out.s.t + v, together);
        }
      }
      continue;
    }
#pragma unroll
    for (int v = 0; v < kChannels; ++v) {
      if (own + v >= g.slots.channels) continue;
      T* sequence = target + v * out.s.c;
#pragma unroll
      for (int s = 0; s < kSteps; s += pack) {
        const int ahead = s / pack * next;
        if (g.into == Packed::steps && t + ahead + pack <= g.T) {
          A together[pack];
#pragma unroll
          for (int i = 0; i < pack; ++i) together[i] = sum[s + i][v];
          store_sum(sequence + ahead, together);
        } else {
#pragma unroll
          for (int i = 0; i < pack; ++i)
            if (t + ahead + i < g.T) sequence[(ahead + i) * out.s.t] = narrow<T>(sum[s + i][v]);
        }
      }
    }
  }
}

template <typename T, bool Mirrored>
void launch(const Tensor& x, const Tensor& weight, Tensor& out, const Problem& p,
            cudaStream_t stream) {
  Plan g;
  g.B = p.B, g.H = p.H, g.T = p.T, g.K = static_cast<int>(p.K);
  g.before = Mirrored ? p.mirrored_before() : p.before;
  g.slots = slots(p);
  g.tiles = static_cast<unsigned>(step_tiles(p));
  g.time_shared = p.time_shared;
  g.from = packed(x), g.into = packed(out);
  const int steps =
      static_cast<int>(std::min<int64_t>(kTile, (p.T + kSteps - 1) / kSteps * kSteps));
  const int row = pitch_of<T>(kSlots) * sizeof(T);
  const int of_distance =
      row + g.slots.heads * (p.time_shared ? 1 : kGroups) * kSteps * sizeof(acc_t<T>);
  const int most = (kMostSharedBytes - (steps - kSteps) * row) / of_distance;
  g.depth = static_cast<int>(std::min<int64_t>(most, p.K + kSteps - 1));
  const int bytes = (steps - kSteps) * row + g.depth * of_distance;
  const int64_t head_tiles = (p.H + g.slots.heads - 1) / g.slots.heads * g.slots.tiles;
  const dim3 grid(static_cast<unsigned>(g.tiles * head_tiles),
                  static_cast<unsigned>(std::min(p.B, kMaxGridYZ)));
  convolve<T, Mirrored><<<grid, kThreads, bytes, stream>>>(sequences<T>(x), weights<T>(weight),
                                                           mutable_sequences<T>(out), g);
}

template <typename T, bool Mirrored>
void launch_few(const Tensor& x, const Tensor& weight, Tensor& out, const Problem& p,
                cudaStream_t stream) {
  const bool by_step = (p.time_shared ? x.stride(2) : weight.stride(3)) == 1;
  const Spread spread(by_step, p.C, p.T);
  const auto choose = [&](auto time_shared) {
    constexpr bool shared = decltype(time_shared)::value;
    return by_step ? convolve_few<T, Mirrored, shared, true>
                   : convolve_few<T, Mirrored, shared, false>;
  };
  const auto convolve = p.time_shared ? choose(std::true_type{}) : choose(std::false_type{});
  convolve<<<spread.grid(p.B), kThreads, 0, stream>>>(
      sequences<T>(x), weights<T>(weight), mutable_sequences<T>(out), p,
      Mirrored ? p.mirrored_before() : p.before, spread, PackedSteps(x, weight, out));
}

template <bool Mirrored>
Tensor apply(const Tensor& x, const Tensor& weight, int64_t padding) {
  const Problem p(x, weight.sizes(), padding);
  check_alike(weight, x, "weight");
  check_counts(p);
  Tensor out = make_like(x);
  if (out.numel() == 0) return out;
  const Launch launched(x);
  dispatch_cuda(x, [&](auto zero) {
    using T = decltype(zero);
    if (p.head_channels() < kFewChannels)
      launch_few<T, Mirrored>(x, weight, out, p, launched.stream);
    else
      launch<T, Mirrored>(x, weight, out, p, launched.stream);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return out;
}

}  // namespace

Tensor forward(const Tensor& x, const Tensor& weight, int64_t padding) {
  return apply<false>(x, weight, padding);
}

Tensor grad_input(const Tensor& grad, const Tensor& weight, int64_t padding) {
  return apply<true>(grad, weight, padding);
}

}  // namespace hoconv::dynamic_conv1d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("dynamic_conv1d.cuda", TORCH_BOX(&hoconv::dynamic_conv1d::forward));
  m.impl("dynamic_conv1d_grad_input.cuda", TORCH_BOX(&hoconv::dynamic_conv1d::grad_input));
}
