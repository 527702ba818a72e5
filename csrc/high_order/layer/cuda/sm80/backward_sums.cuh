// The kernels that add up the partial sums of the backward kernel's warps into the gradients of the
// generator's parameters, in double and in the same order every time.
#pragma once

#include "high_order/layer/cuda/layer.cuh"
#include "high_order/layer/cuda/sums.cuh"

namespace hoconv::high_order::layer::sm80 {

constexpr int kBiasThreads = 64;  // a tap each, of up to 49

// Adds up the generator's gradient. blockIdx.y is a chunk, which has blocks * warps partial sums of
// (rows, columns) in (block, chunk, warp).
template <typename T, int Q>
__global__ void sum_weight(const float* sums, T* out, ImageStrides strides, Layer l, int blocks,
                           int warps, int rows, int columns, int group) {
  const int chunks = gridDim.y, chunk = blockIdx.y;
  const int64_t size = int64_t{rows} * columns, n = int64_t{blockIdx.x} * kSumColumns + threadIdx.x;
  const auto part_sum = [&](int part) {
    const int64_t block = part / warps, warp = part % warps;
    return sums[((block * chunks + chunk) * warps + warp) * size + n];
  };
  double sum;
  if (!sum_parts(blocks * warps, n < size, part_sum, sum)) return;
  const int row = n / columns, tap = n % columns, s2 = l.s * l.s;
  const int c = chunk * Q + row / s2, dy = row / l.s % l.s, dx = row % l.s;
  if (row < Q * s2 && c < l.C && tap < l.taps)
    out[(int64_t{tap} * l.G + group) * strides.b + c * strides.c + dy * strides.h +
        dx * strides.w] = narrow<T>(static_cast<float>(sum));
}

template <typename T>
__global__ void sum_bias(const float* sums, T* out, Layer l, int parts, int columns, int group) {
  const int tap = threadIdx.x;
  if (tap >= l.taps) return;
  double sum = 0;
  for (int part = 0; part < parts; ++part) sum += sums[int64_t{part} * columns + tap];
  out[tap * l.G + group] = narrow<T>(static_cast<float>(sum));
}

}  // namespace hoconv::high_order::layer::sm80
