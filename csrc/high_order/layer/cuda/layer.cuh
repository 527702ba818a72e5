// What the kernels of the high-order layer share on every GPU: the sizes of a call, the softmax
// over the taps of a pixel, and what a launch needs.
//
// B batch, C channels, G groups of channels, H height, W width, k kernel size, s kernel size of the
// generator, N = columns / 8 of the product that generates the weights.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "high_order/image.cuh"
#include "high_order/layer/cuda/limits.cuh"
#include "high_order/layer/cuda/precision.cuh"
#include "hoconv/aten_ops.h"

namespace hoconv::high_order::layer {

struct Layer {
  int64_t B;
  int C, G, H, W, k, s, dilation;
  int taps, group_channels;
  // Pixels from the centre that the generator and the taps read; the larger of the two.
  int generator_reach, tap_reach, reach;
  bool softmax, residual, allow_tf32;

  Layer(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t k_,
        int64_t dilation_, bool softmax, bool residual, bool allow_tf32)
      : softmax(softmax), residual(residual), allow_tf32(allow_tf32) {
    STD_TORCH_CHECK(x.dim() == 4, "x: expected 4 dimensions (B, C, H, W), got ", x.dim());
    STD_TORCH_CHECK(
        weight.dim() == 4 && weight.size(1) == x.size(1) && weight.size(2) == weight.size(3),
        "generator_weight: expected (k * k * G, C, s, s)");
    check_alike(weight, x, "generator_weight");
    STD_TORCH_CHECK(serves_kernel_size(k_), "kernel_size: expected 3, 5 or 7, got ", k_);
    STD_TORCH_CHECK(x.size(2) < (1 << 30) && x.size(3) < (1 << 30), "x: image too large");
    B = x.size(0), C = x.size(1), H = x.size(2), W = x.size(3);
    k = k_, taps = k * k, s = weight.size(2);
    STD_TORCH_CHECK(serves_generator_size(s),
                    "generator_weight: expected a size of 1, 3, 5 or 7, got ", s);
    STD_TORCH_CHECK(weight.size(0) > 0 && weight.size(0) % taps == 0,
                    "generator_weight: expected k * k * G output channels");
    G = weight.size(0) / taps;
    STD_TORCH_CHECK(C % G == 0, "generator_weight: its groups must divide the channels");
    if (bias) {
      check_alike(*bias, x, "generator_bias");
      STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0),
                      "generator_bias: expected (k * k * G)");
    }
    STD_TORCH_CHECK(
        dilation_ >= 1 && dilation_ <= kFarTaps && dilation_ * (k - 1) / 2 <= kMostReach,
        "dilation: expected taps that reach up to ", kMostReach, " pixels");
    dilation = dilation_, group_channels = C / G;
    generator_reach = s / 2, tap_reach = dilation * (k / 2);
    reach = std::max(generator_reach, tap_reach);
  }
};

inline Tensor scratch(const Tensor& like, int64_t floats) {
  return make_tensor(like, {std::max<int64_t>(floats, 1)}, ScalarType::Float);
}

// Replaces the weights of each of the lane's two pixels by their softmax over the taps. The four
// lanes that share pixels differ in t. `is_tap(j, e)`: column 8j + 2t + e is a tap.
template <int N, typename IsTap>
__device__ __forceinline__ void softmax_taps(float (&weight)[N][4], const IsTap& is_tap) {
#pragma unroll
  for (int pixel = 0; pixel < 2; ++pixel) {
    float most = -INFINITY, sum = 0;
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (is_tap(j, e)) most = fmaxf(most, weight[j][2 * pixel + e]);
#pragma unroll
    for (int far = 1; far < 4; far *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, far));
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& value = weight[j][2 * pixel + e];
        value = is_tap(j, e) ? expf(value - most) : 0.0f;
        sum += value;
      }
#pragma unroll
    for (int far = 1; far < 4; far *= 2) sum += __shfl_xor_sync(~0u, sum, far);
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) weight[j][2 * pixel + e] /= sum;
  }
}

// Turns dw, the gradient of the softmax `weight`, into the gradient of the softmax's input, for
// each of the lane's two pixels.
template <int N>
__device__ __forceinline__ void softmax_gradient(float (&dw)[N][4], const float (&weight)[N][4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) sum += weight[j][i] * dw[j][i] + weight[j][i + 1] * dw[j][i + 1];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) dw[j][i + e] = weight[j][i + e] * (dw[j][i + e] - sum);
  }
}

// Of two lanes `far` apart, the lane whose bit `far` is clear returns the sum of both `first`, the
// other the sum of both `second`.
__device__ __forceinline__ float exchange(float first, float second, int far) {
  const bool bit = threadIdx.x & far;
  return (bit ? second : first) + __shfl_xor_sync(~0u, bit ? first : second, far);
}

// Calls f with the precision (precision.cuh) of a tensor's dtype.
template <typename F>
void dispatch_precision(const Tensor& x, const Layer& l, F&& f) {
  switch (x.scalar_type()) {
    case ScalarType::Half:
      return f(HalfPrecision<__half>{});
    case ScalarType::BFloat16:
      return f(HalfPrecision<__nv_bfloat16>{});
    case ScalarType::Float:
      return l.allow_tf32 ? f(TF32{}) : f(Float32{});
    default:
      STD_TORCH_CHECK(false, "x: expected float32, float16 or bfloat16");
  }
}

constexpr int kReservedShared = 1024;  // bytes of every block that CUDA keeps for itself

// Bytes of shared memory that a block may use on the current device.
inline int most_shared_memory() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

// What is known of a kernel on a device, so that a call need not ask the driver again.
struct KnownKernel {
  int shared_bytes = -1;  // that its blocks may use
  int asked_bytes = -1;   // for which `resident` is known
  int threads = 0;        // likewise
  int64_t resident = 0;
};

// Calls f with what is known of a kernel on the current device, one thread at a time.
template <typename F>
auto with_known(const void* kernel, F&& f) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, KnownKernel> known;
  int device;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  return f(known[{device, kernel}]);
}

template <typename Kernel>
void allow_shared_memory(Kernel kernel, int bytes) {
  with_known(reinterpret_cast<const void*>(kernel), [&](KnownKernel& known) {
    if (bytes <= known.shared_bytes) return;
    STD_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    known.shared_bytes = bytes;
  });
}

// How many blocks of a kernel the current device runs at the same time.
template <typename Kernel>
int64_t resident_blocks(Kernel kernel, int threads, int bytes) {
  return with_known(reinterpret_cast<const void*>(kernel), [&](KnownKernel& known) {
    if (bytes == known.asked_bytes && threads == known.threads) return known.resident;
    int a_multiprocessor;
    STD_CUDA_CHECK(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&a_multiprocessor, kernel, threads, bytes));
    known.resident = int64_t{a_multiprocessor} * device_attribute(cudaDevAttrMultiProcessorCount);
    known.asked_bytes = bytes, known.threads = threads;
    return known.resident;
  });
}

}  // namespace hoconv::high_order::layer
