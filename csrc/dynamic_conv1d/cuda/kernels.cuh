// Tensors and copies that the CUDA kernels of the dynamic 1-D convolution share.
//
// There are two kernels for each operation. The `naive` kernel is the definition and takes any
// number of taps, strides and dtype. The `tuned` kernel takes sequences that are contiguous in
// time, of all dtypes but float64. One of its blocks owns a tile of kTile steps of one sequence and
// head. It copies its inputs to shared memory as float, padded with zeros, and each thread computes
// kSteps neighbouring steps from registers, which it fills with 16-byte loads. Only the copying
// loops know strides, shared weights and alignment. There are no atomics: two runs give the same
// bits.
//
// B batch, C channels, H heads, K taps, T time steps.
#pragma once

#include <algorithm>
#include <tuple>
#include <vector>

#include "dynamic_conv1d/problem.h"
#include "hoconv/cuda_launch.cuh"

namespace hoconv::dynamic_conv1d {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kSteps = 4;  // of a thread: one 16-byte load from shared memory
constexpr int kTile = 32 * kSteps;
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;
constexpr int64_t kMostSharedBytes = 48 * 1024;  // without an opt-in

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

// Loads four floats from shared memory, at a multiple of 16 bytes.
__device__ __forceinline__ void load_four(const float* p, float (&four)[4]) {
  const float4 bits = *reinterpret_cast<const float4*>(p);
  four[0] = bits.x, four[1] = bits.y, four[2] = bits.z, four[3] = bits.w;
}

// Copies rows to shared memory, `pitch` elements apart, with all threads of the block. Element i of
// row r is the value at step first + r * shift + i of from + r * row_stride, or zero if that step
// is out of range. A thread issues `at_once` loads before it waits for the first.
template <typename T>
__device__ __forceinline__ void copy_rows(float* to, int pitch, const T* from, int64_t row_stride,
                                          int64_t stride, int rows, int count, int length,
                                          int first, int shift = 0) {
  constexpr int at_once = 4;
  for (int r = threadIdx.x / 32 * at_once; r < rows; r += kWarps * at_once) {
#pragma unroll 2
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      float value[at_once];
#pragma unroll
      for (int m = 0; m < at_once; ++m) {
        const int t = first + (r + m) * shift + i;
        const bool inside = r + m < rows && t >= 0 && t < length;
        value[m] =
            inside ? widen<float>(load<1>(from + (r + m) * row_stride + t * stride).e[0]) : 0.f;
      }
#pragma unroll
      for (int m = 0; m < at_once; ++m)
        if (r + m < rows) to[(r + m) * pitch + i] = value[m];
    }
  }
}

// From a thread's tap and step on to its next, where threads walk along the taps of each step.
__device__ __forceinline__ void next_tap(int& tap, int& step, int K) {
  tap += kThreads % K, step += kThreads / K;
  if (tap >= K) tap -= K, ++step;
}

// Weights in shared memory are (K, kTile), rows kPitch apart: neighbouring taps of a step, which
// neighbouring threads copy, lie in different banks, four apart.
constexpr int kPitch = kTile + 4;

// Copies the weights of a tile, whose first step is `first`, to shared memory; those out of range
// are zero. `from` are the weights of step 0. Mirrored, row j has tap K - 1 - j, from step first +
// j on. Neighbouring threads load what is contiguous: taps, as a generator gives them, or steps.
template <bool Mirrored, typename T>
__device__ __forceinline__ void load_weights(float* to, const T* from, const WeightStrides& s,
                                             int K, int length, int first) {
  if (s.k != 1) {
    copy_rows(to, kPitch, Mirrored ? from + (K - 1) * s.k : from, Mirrored ? -s.k : s.k, s.t, K,
              kTile, length, first, Mirrored ? 1 : 0);
    return;
  }
  constexpr int at_once = 4;
  const int steps = Mirrored ? kTile + K - 1 : kTile;
  int tap = threadIdx.x % K, step = threadIdx.x / K;
  while (step < steps) {
    float value[at_once];
    int place[at_once];
#pragma unroll
    for (int m = 0; m < at_once; ++m) {
      const int row = Mirrored ? K - 1 - tap : tap, column = Mirrored ? step - row : step;
      const int t = first + step;
      const bool kept = step < steps && column >= 0 && column < kTile;
      place[m] = kept ? row * kPitch + column : -1;
      value[m] =
          kept && t >= 0 && t < length ? widen<float>(load<1>(from + t * s.t + tap).e[0]) : 0.f;
      next_tap(tap, step, K);
    }
#pragma unroll
    for (int m = 0; m < at_once; ++m)
      if (place[m] >= 0) to[place[m]] = value[m];
  }
}

// Writes the first `taps` rows of such weights to memory where the taps of a step are contiguous.
// `to` are the weights of the tile's first step; `steps` of them are within the sequence.
template <typename T>
__device__ __forceinline__ void store_weights(const float* from, T* to, int64_t stride, int taps,
                                              int steps) {
  int tap = threadIdx.x % taps, step = threadIdx.x / taps;
  while (step < min(steps, kTile)) {
    to[step * stride + tap] = narrow<T>(from[tap * kPitch + step]);
    next_tap(tap, step, taps);
  }
}

inline bool contiguous_in_time(const Tensor& t) { return t.size(2) <= 1 || t.stride(2) == 1; }

// Whether steps and channels fit 32 bits, in which the tuned kernels count them.
inline bool counts_fit(const Problem& p) {
  constexpr int64_t most = int64_t{1} << 30;
  return p.T + p.K < most && p.C < most;
}

inline int64_t blocks_for(int64_t elements) {
  return std::min<int64_t>((elements + kThreads - 1) / kThreads, kMostBlocks);
}

// The operations, in convolve.cu and grad_weight.cu.
Tensor forward(const Tensor& x, const Tensor& weight, int64_t padding);
Tensor grad_input(const Tensor& grad, const Tensor& weight, int64_t padding);
Tensor grad_weight(const Tensor& grad, const Tensor& x, std::vector<int64_t> size,
                   std::vector<int64_t> stride, int64_t padding);
// The output, and the weights, which are a softmax of `logits` (B, H, K, T) over the taps.
std::tuple<Tensor, Tensor> convolve_softmax(const Tensor& x, const Tensor& logits, int64_t padding);
// The gradient of what the weights are a softmax of, over the taps.
Tensor grad_logits(const Tensor& grad, const Tensor& x, const Tensor& taps, int64_t padding);

}  // namespace hoconv::dynamic_conv1d
