// The device and stream of a launch, conversions of elements, and vectors of elements that one
// instruction loads or stores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <type_traits>

#include "hoconv/accumulate.h"
#include "hoconv/tensor.h"

namespace hoconv {

// Makes the device of a tensor the current one while it lives, and gives the current stream of that
// device.
class Launch {
 public:
  explicit Launch(const torch::stable::Tensor& t) : guard_(t.get_device_index()) {
    void* stream = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream) == 0,
                    "no current CUDA stream");
    this->stream = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream;

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

// An attribute of the current device.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device, value;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// Work is split over at most this many blocks of 128 threads, which fill a GPU: the 132
// multiprocessors of an H100 run 528 to 660 such blocks at once, four or five each, and the rest as
// those end.
constexpr int64_t kEnoughBlocks = 1024;

constexpr int64_t kMaxGridYZ = 65535;  // blocks of a launch in y and in z

// Calls f with a zero of the CUDA type of the tensor's elements.
template <typename F>
void dispatch_cuda(const Tensor& t, F&& f) {
  dispatch_floating(t, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_same_v<T, torch::headeronly::Half>)
      f(__half{});
    else if constexpr (std::is_same_v<T, torch::headeronly::BFloat16>)
      f(__nv_bfloat16{});
    else
      f(zero);
  });
}

template <typename A, typename T>
__device__ __forceinline__ A widen(T value) {
  if constexpr (std::is_same_v<T, __half>)
    return __half2float(value);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat162float(value);
  else
    return value;
}

template <typename T, typename A>
__device__ __forceinline__ T narrow(A value) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(value);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(value);
  else
    return value;
}

// V elements that one instruction loads or stores. Their address is a multiple of their size.
template <typename T, int V>
struct alignas(sizeof(T) * V) Pack {
  T e[V];
};

template <int Bytes>
using bits_t = std::conditional_t<
    Bytes == 16, uint4,
    std::conditional_t<Bytes == 8, uint2,
                       std::conditional_t<Bytes == 4, unsigned, unsigned short>>>;

template <int V, typename T>
__device__ __forceinline__ Pack<T, V> load(const T* p) {
  Pack<T, V> pack;
  using Bits = bits_t<sizeof(pack)>;
  *reinterpret_cast<Bits*>(&pack) = __ldg(reinterpret_cast<const Bits*>(p));
  return pack;
}

// For data that is read or written once: it does not evict from the caches what is read again.
template <int V, typename T>
__device__ __forceinline__ Pack<T, V> load_once(const T* p) {
  Pack<T, V> pack;
  using Bits = bits_t<sizeof(pack)>;
  *reinterpret_cast<Bits*>(&pack) = __ldcs(reinterpret_cast<const Bits*>(p));
  return pack;
}
template <typename T, int V>
__device__ __forceinline__ void store_once(T* p, const Pack<T, V>& pack) {
  using Bits = bits_t<sizeof(pack)>;
  __stcs(reinterpret_cast<Bits*>(p), *reinterpret_cast<const Bits*>(&pack));
}

// Rounds V sums to T and stores them.
template <int V, typename T, typename A>
__device__ __forceinline__ void store_sum(T* p, const A (&sum)[V]) {
  Pack<T, V> pack;
#pragma unroll
  for (int v = 0; v < V; ++v) pack.e[v] = narrow<T>(sum[v]);
  store_once(p, pack);
}

}  // namespace hoconv
