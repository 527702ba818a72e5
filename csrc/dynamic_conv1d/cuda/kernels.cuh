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

}  // namespace hoconv::dynamic_conv1d
