// How the CUDA kernels of the dynamic 1-D convolution cut their work, and how they copy sequences
// to shared memory.
//
// Every kernel computes a tile of kTile steps: a thread has kSteps of them, one after another, and
// kLanes neighbouring threads have neighbouring channels, or taps. It walks along positions of x,
// not along taps: at a distance d from its first step, x[step + d] meets tap d - s of each of its
// steps s. So a value that is read once from shared memory serves kSteps products. Only the copies
// to and from shared memory know strides, shared weights and alignment. There are no atomics: two
// runs give the same bits.
//
// B batch, C channels, H heads, K taps, T time steps.
#pragma once

#include <algorithm>
#include <vector>

#include "dynamic_conv1d/problem.h"
#include "hoconv/cuda_launch.cuh"

namespace hoconv::dynamic_conv1d {

constexpr int kThreads = 128;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kLanes = 16;
constexpr int kGroups = kThreads / kLanes;
constexpr int kSteps = 8;  // of a thread
constexpr int kTile = kGroups * kSteps;
constexpr int kChannels = 4;  // of a thread that computes sequences
constexpr int kSlots = kLanes * kChannels;
constexpr int64_t kMost = int64_t{1} << 30;  // taps, or channels: the kernels count them in int
constexpr int kMostSharedBytes = 48 * 1024;  // without an opt-in
constexpr int kPackBytes = 16;               // that one instruction moves

template <typename T>
struct Sequences {  // x, the output, or the gradient of either
  T* data;
  Strides s;
  __device__ T* at(int64_t b, int64_t c, int64_t t) const {
    return data + b * s.b + c * s.c + t * s.t;
  }
};
template <typename T>
struct Weights {  // or their gradient
  T* data;
  WeightStrides s;
  __device__ T* at(int64_t b, int64_t h, int64_t tap, int64_t t) const {
    return data + b * s.b + h * s.h + tap * s.k + t * s.t;
  }
};

template <typename T>
Sequences<const T> sequences(const Tensor& t) {
  return {static_cast<const T*>(t.const_data_ptr()), strides(t)};
}
template <typename T>
Sequences<T> mutable_sequences(Tensor& t) {
  return {static_cast<T*>(t.mutable_data_ptr()), strides(t)};
}
template <typename T>
Weights<const T> weights(const Tensor& t) {
  return {static_cast<const T*>(t.const_data_ptr()), weight_strides(t)};
}
template <typename T>
Weights<T> mutable_weights(Tensor& t) {
  return {static_cast<T*>(t.mutable_data_ptr()), weight_strides(t)};
}

// The dimension along which packs of kPackBytes lie in memory, aligned; else `none`.
enum class Packed { none, channels, steps };

inline Packed packed(const Tensor& t) {
  const int64_t pack = kPackBytes / t.element_size();
  const auto aligned = [&](int along, int other) {
    const auto whole = [&](int i) { return t.size(i) == 1 || t.stride(i) % pack == 0; };
    return t.stride(along) == 1 && t.size(along) % pack == 0 && whole(other) && whole(0) &&
           reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kPackBytes == 0;
  };
  return aligned(1, 2) ? Packed::channels : aligned(2, 1) ? Packed::steps : Packed::none;
}

// The channels of a tile, in slots. Heads begin at multiples of a thread's slots, so that a thread
// has one head: the slots after a head's last channel are zeros.
struct Slots {
  int heads;     // of a tile
  int of_head;   // slots of a head within a tile
  int channels;  // of a head, all its tiles together
  int tiles;     // of a head that has more channels than a tile has slots; else 1
};

inline Slots slots(const Problem& p) {
  const int64_t padded = (p.head_channels() + kChannels - 1) / kChannels * kChannels;
  Slots s;
  s.of_head = static_cast<int>(std::min<int64_t>(padded, kSlots));
  s.heads = static_cast<int>(std::min<int64_t>(kSlots / s.of_head, p.H));
  s.channels = static_cast<int>(p.head_channels());
  s.tiles = static_cast<int>((padded + kSlots - 1) / kSlots);
  return s;
}

// Slots from one row of shared memory to the next. Rows lie a pack apart in the banks, so that
// neighbouring threads read packs of neighbouring rows without a conflict.
template <typename T>
__host__ __device__ constexpr int pitch_of(int slots) {
  return slots + kPackBytes / static_cast<int>(sizeof(T));
}

// Copies `count` steps of a tile to rows of shared memory, from the step `first` on; those outside
// of the `length` steps of the sequence are zeros. `from` is step 0 of the tile's first channel,
// whose number within its head is `channel`; `heads` of the tile are among the H.
template <typename T>
__device__ __forceinline__ void copy_steps(T* rows, int pitch, const T* from, const Strides& s,
                                           Packed along, const Slots& g, int channel, int heads,
                                           int64_t first, int count, int64_t length) {
  constexpr int pack = kPackBytes / sizeof(T);
  const int used = heads * g.of_head, of_head = min(g.of_head, g.channels - channel);
  const bool dense = g.heads == 1 || g.of_head == g.channels;  // no zeros between heads
  const int channels = heads * of_head;
  if (along == Packed::channels && dense && used % pack == 0 && channels % pack == 0 &&
      reinterpret_cast<uintptr_t>(from) % kPackBytes == 0) {
    const int packs = used / pack, at_once = kThreads / packs;
    const int column = threadIdx.x % packs * pack, own = threadIdx.x / packs;
    if (own >= at_once) return;
#pragma unroll 4
    for (int row = own; row < count; row += at_once) {
      const int64_t t = first + row;
      Pack<T, pack> values{};
      if (t >= 0 && t < length && column < channels) values = load<pack>(from + t * s.t + column);
      *reinterpret_cast<Pack<T, pack>*>(rows + row * pitch + column) = values;
    }
    return;
  }
  const auto source = [&](int slot) -> const T* {  // null for a slot of zeros
    const int head = slot / g.of_head, c = slot - head * g.of_head;
    return c < of_head ? from + (int64_t{head} * g.channels + c) * s.c : nullptr;
  };
  const auto value_at = [&](const T* sequence, int64_t t) {
    return sequence && t >= 0 && t < length ? load<1>(sequence + t * s.t).e[0]
                                            : narrow<T>(acc_t<T>(0));
  };
  // Neighbouring threads have neighbouring slots, so that they store without a conflict of banks.
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  if (along == Packed::steps && dense) {
    constexpr int at_once = kSlots / kLanes;
    const int64_t next = kLanes * s.c;
    const int skew = static_cast<int>((first % pack + pack) % pack);
    for (int row = group * pack - skew; row < count; row += kGroups * pack) {
      const int64_t t = first + row;
      const T* sequence = from + lane * s.c + t;
      Pack<T, pack> values[at_once]{};
#pragma unroll
      for (int n = 0; n < at_once; ++n)
        if (t >= 0 && t < length && lane + n * kLanes < channels)
          values[n] = load<pack>(sequence + n * next);
#pragma unroll
      for (int n = 0; n < at_once; ++n) {
        if (lane + n * kLanes >= used) continue;
#pragma unroll
        for (int i = 0; i < pack; ++i)
          if (row + i >= 0 && row + i < count)
            rows[(row + i) * pitch + lane + n * kLanes] = values[n].e[i];
      }
    }
  } else if (s.t == 1) {  // neighbouring threads read neighbouring steps
    for (int slot = threadIdx.x / kWarp; slot < used; slot += kWarps) {
      const T* sequence = source(slot);
#pragma unroll 4
      for (int row = threadIdx.x % kWarp; row < count; row += kWarp)
        rows[row * pitch + slot] = value_at(sequence, first + row);
    }
  } else {
    for (int slot = lane; slot < used; slot += kLanes) {
      const T* sequence = source(slot);
#pragma unroll 4
      for (int row = group; row < count; row += kGroups)
        rows[row * pitch + slot] = value_at(sequence, first + row);
    }
  }
}

inline void check_counts(const Problem& p) {
  STD_TORCH_CHECK(p.K <= kMost, "weight: expected up to ", kMost, " taps, got ", p.K);
  STD_TORCH_CHECK(p.C <= kMost, "x: expected up to ", kMost, " channels, got ", p.C);
}

inline int64_t step_tiles(const Problem& p) { return (p.T + kTile - 1) / kTile; }

// Steps of a tile whose threads have any within the sequence.
__device__ __forceinline__ int steps_in_use(int64_t start, int64_t T) {
  const int64_t left = (T - start + kSteps - 1) / kSteps * kSteps;
  return left < kTile ? static_cast<int>(left) : kTile;
}

// The operations, in convolve.cu and grad_weight.cu.
Tensor forward(const Tensor& x, const Tensor& weight, int64_t padding);
Tensor grad_input(const Tensor& grad, const Tensor& weight, int64_t padding);
Tensor grad_weight(const Tensor& grad, const Tensor& x, std::vector<int64_t> size,
                   std::vector<int64_t> stride, int64_t padding);

}  // namespace hoconv::dynamic_conv1d
