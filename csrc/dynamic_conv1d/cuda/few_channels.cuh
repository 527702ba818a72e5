// The dynamic convolution of heads that have fewer than kFewChannels channels, and the gradient of
// weights that each step has to itself. A weight then serves hardly more than one product, so each
// is read where it is needed.
//
// A thread has kSteps neighbouring steps of a channel, or of a head, and takes kFewTaps taps at a
// time: it loads the steps of x that these read, a window, once. The threads of a warp have
// neighbouring steps, or neighbouring channels, whichever lie side by side in the larger tensor.
//
// An example, before a state space: 8 sequences of 2048 channels, each a head, and 512 steps, K = 4
// for all steps, channels last: a thread loads 11 values of x and 4 weights for 32 products.
//
// B batch, C channels, H heads, K taps, T time steps.
#pragma once

#include "dynamic_conv1d/cuda/kernels.cuh"

namespace hoconv::dynamic_conv1d {

constexpr int64_t kFewChannels = 4;
constexpr int kFewTaps = 4;
constexpr int kWindow = kSteps + kFewTaps - 1;
constexpr unsigned kAllSteps = (1u << kSteps) - 1;

// Whether packs of steps lie in memory, aligned; `y` is the output, or its gradient. They are of
// use where threads have neighbouring steps, and elsewhere would cost registers.
struct PackedSteps {
  bool x, weight, y;

  PackedSteps(const Tensor& x, const Tensor& weight, const Tensor& y)
      : x(packed(x) == Packed::steps), y(packed(y) == Packed::steps) {
    const int64_t pack = kPackBytes / weight.element_size();
    this->weight = weight.stride(3) == 1 && weight.size(3) % pack == 0 &&
                   weight.stride(0) % pack == 0 && weight.stride(1) % pack == 0 &&
                   weight.stride(2) % pack == 0 &&
                   reinterpret_cast<uintptr_t>(weight.const_data_ptr()) % kPackBytes == 0;
  }
};

// How the channels or heads of a sequence, `rows`, and its steps are spread over warps.
struct Spread {
  bool by_step;
  unsigned rows, chunks;  // chunks of a row's steps, a warp each

  Spread(bool by_step, int64_t rows, int64_t T) : by_step(by_step) {
    const int64_t steps = by_step ? kWarp * kSteps : kSteps;
    this->rows = static_cast<unsigned>(rows);
    chunks = static_cast<unsigned>((T + steps - 1) / steps);
  }
  dim3 grid(int64_t batch) const {
    const int64_t groups = by_step ? rows : (rows + kWarp - 1) / kWarp;
    return dim3(static_cast<unsigned>((chunks * groups + kWarps - 1) / kWarps),
                static_cast<unsigned>(std::min(batch, kMaxGridYZ)));
  }
};

// A thread's channel, or head, and the first of its steps.
struct Place {
  unsigned row;
  int64_t step;

  __device__ explicit Place(const Spread& g) {
    const unsigned warp = blockIdx.x * kWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const unsigned chunk = warp % g.chunks, group = warp / g.chunks;
    row = g.by_step ? group : group * kWarp + lane;
    step = (g.by_step ? int64_t{chunk} * kWarp + lane : int64_t{chunk}) * kSteps;
  }
};

// Which of `count` positions from the step `first` on are within a sequence: one bit each.
template <int count>
__device__ __forceinline__ unsigned inside(int64_t first, int64_t T) {
  static_assert(count < 32);
  const int low = first < 0 ? static_cast<int>(min(-first, int64_t{count})) : 0;
  const int high = static_cast<int>(max(int64_t{low}, min(T - first, int64_t{count})));
  return ((1u << high) - 1) & ~((1u << low) - 1);
}

// Loads the first `used` of `count` steps, `stride` elements apart, of which `from` is the step
// `first`; zeros where they are outside of a sequence of `length` steps. `packs` says whether packs
// of steps are aligned. A window that begins within a pack is shifted: by the same number of steps
// in all threads, so that only one of the branches below is taken.
template <int count, typename A, typename T>
__device__ __forceinline__ void load_steps(A (&value)[count], const T* from, int64_t stride,
                                           int64_t first, int64_t length, int used, bool packs) {
  constexpr int pack = std::min<int>(kSteps, kPackBytes / sizeof(T));
  if (packs) {
    const int shift = static_cast<int>(first & (pack - 1));
    constexpr int most = (count + pack - 1 + pack - 1) / pack;
    Pack<T, pack> loaded[most]{};
#pragma unroll
    for (int n = 0; n < most; ++n) {
      const int ahead = n * pack - shift;
      if (ahead < used && first + ahead >= 0 && first + ahead < length)
        loaded[n] = load<pack>(from + ahead);
    }
#pragma unroll
    for (int own = 0; own < pack; ++own) {
      if (own != shift) continue;
#pragma unroll
      for (int i = 0; i < count; ++i)
        value[i] = widen<A>(loaded[(own + i) / pack].e[(own + i) % pack]);
    }
    return;
  }
  const unsigned within = inside<count>(first, length);
#pragma unroll
  for (int i = 0; i < count; ++i)
    value[i] = i < used && (within >> i & 1) ? widen<A>(load<1>(from + i * stride).e[0]) : A(0);
}

// Stores the sums of a thread's steps that are `within` the sequence.
template <typename T, typename A>
__device__ __forceinline__ void store_steps(T* to, int64_t stride, unsigned within, bool packs,
                                            const A (&sum)[kSteps]) {
  constexpr int pack = std::min<int>(kSteps, kPackBytes / sizeof(T));
  if (packs && within == kAllSteps) {
#pragma unroll
    for (int s = 0; s < kSteps; s += pack) {
      A together[pack];
#pragma unroll
      for (int i = 0; i < pack; ++i) together[i] = sum[s + i];
      store_sum(to + s, together);
    }
    return;
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    if (within >> s & 1) to[s * stride] = narrow<T>(sum[s]);
}

// The sum that convolve.cu describes.
template <typename T, bool Mirrored, bool time_shared, bool ByStep>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1
                                            : time_shared  ? 8
                                                           : 4)
    convolve_few(Sequences<const T> x, Weights<const T> weight, Sequences<T> out, Problem p,
                 int64_t before, Spread spread, PackedSteps packs) {
  using A = acc_t<T>;
  const Place place(spread);
  if (place.row >= spread.rows || place.step >= p.T) return;
  const unsigned written = inside<kSteps>(place.step, p.T);
  const int64_t h = place.row / static_cast<unsigned>(p.C / p.H);
  const int64_t next = Mirrored ? weight.s.t - weight.s.k : weight.s.k;  // tap
  for (int64_t b = blockIdx.y; b < p.B; b += gridDim.y) {
    A sum[kSteps] = {};
    for (int64_t j = 0; j < p.K; j += kFewTaps) {
      const int taps = static_cast<int>(min(int64_t{kFewTaps}, p.K - j));
      const int64_t first = place.step - before + j;
      const unsigned read = inside<kWindow>(first, p.T);
      A window[kWindow], factor[kFewTaps][kSteps];
      load_steps(window, x.at(b, place.row, first), x.s.t, first, p.T, taps + kSteps - 1,
                 ByStep && packs.x);
      const T* factors =
          Mirrored ? weight.at(b, h, p.K - 1 - j, first) : weight.at(b, h, j, place.step);
#pragma unroll
      for (int tap = 0; tap < kFewTaps; ++tap) {
        const T* own = factors + tap * next;
        if (time_shared)
          factor[tap][0] = tap < taps ? widen<A>(load<1>(own).e[0]) : A(0);
        else if (tap < taps)
          load_steps(factor[tap], own, weight.s.t, Mirrored ? first + tap : place.step, p.T, kSteps,
                     ByStep && packs.weight);
      }
#pragma unroll
      for (int tap = 0; tap < kFewTaps; ++tap)
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          // Of a gradient, nothing is outside of the sequence: no zeros, which might meet infinity.
          if (tap < taps && (!Mirrored || (read >> (tap + s) & 1)))
            sum[s] += factor[tap][time_shared ? 0 : s] * window[tap + s];
        }
    }
    store_steps(out.at(b, place.row, place.step), out.s.t, written, ByStep && packs.y, sum);
  }
}

// The sum that grad_weight.cu describes, where each step has weights of its own.
template <typename T, bool ByStep>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1 : 4)
    grad_weight_few(Sequences<const T> grad, Sequences<const T> x, Weights<T> out, Problem p,
                    Spread spread, PackedSteps packs) {
  using A = acc_t<T>;
  const Place place(spread);
  if (place.row >= spread.rows || place.step >= p.T) return;
  const unsigned written = inside<kSteps>(place.step, p.T);
  const int64_t channels = p.C / p.H, first_channel = place.row * channels;
  const int64_t batch = p.batch_shared ? 1 : p.B, summed = p.batch_shared ? p.B : 1;
  for (int64_t b = blockIdx.y; b < batch; b += gridDim.y) {
    for (int64_t j = 0; j < p.K; j += kFewTaps) {
      const int taps = static_cast<int>(min(int64_t{kFewTaps}, p.K - j));
      const int64_t first = place.step - p.before + j;
      A sum[kFewTaps][kSteps] = {};
      for (int64_t m = b; m < b + summed; ++m)
        for (int64_t c = first_channel; c < first_channel + channels; ++c) {
          A gradient[kSteps], window[kWindow];
          load_steps(gradient, grad.at(m, c, place.step), grad.s.t, place.step, p.T, kSteps,
                     ByStep && packs.y);
          load_steps(window, x.at(m, c, first), x.s.t, first, p.T, taps + kSteps - 1,
                     ByStep && packs.x);
#pragma unroll
          for (int tap = 0; tap < kFewTaps; ++tap)
#pragma unroll
            for (int s = 0; s < kSteps; ++s) sum[tap][s] += gradient[s] * window[tap + s];
        }
#pragma unroll
      for (int tap = 0; tap < kFewTaps; ++tap)
        if (tap < taps)
          store_steps(out.at(b, place.row, j + tap, place.step), out.s.t, written,
                      ByStep && packs.weight, sum[tap]);
    }
  }
}

}  // namespace hoconv::dynamic_conv1d
