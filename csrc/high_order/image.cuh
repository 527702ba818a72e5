// Images as CUDA kernels take them, and what a launch over their elements needs.
#pragma once

#include <algorithm>

#include "high_order/image.h"
#include "hoconv/cuda_launch.cuh"

namespace hoconv::high_order {

constexpr int kThreads = 128;

inline int64_t blocks_for(int64_t elements) {
  return std::min<int64_t>((elements + kThreads - 1) / kThreads, (int64_t{1} << 31) - 1);
}

template <typename T>
struct Image {  // of x, of the output, or of a gradient of either
  T* data;
  ImageStrides s;
  __device__ T* at(int64_t b, int64_t c, int64_t h, int64_t w) const {
    return data + b * s.b + c * s.c + h * s.h + w * s.w;
  }
};

template <typename T>
Image<const T> image(const Tensor& t) {
  return {static_cast<const T*>(t.const_data_ptr()), image_strides(t)};
}
template <typename T>
Image<T> mutable_image(Tensor& t) {
  return {static_cast<T*>(t.mutable_data_ptr()), image_strides(t)};
}

// Whether V-element accesses to rows of a tensor, its last dimension, are aligned.
inline bool vectorizable(const Tensor& t, int64_t V) {
  const int64_t last = t.dim() - 1;
  if (t.stride(last) != 1 && t.size(last) != 1) return false;
  if (reinterpret_cast<uintptr_t>(t.data_ptr()) % (V * t.element_size())) return false;
  if (t.size(last) % V) return false;
  for (int64_t i = 0; i < last; ++i)
    if (t.size(i) > 1 && t.stride(i) % V) return false;
  return true;
}

}  // namespace hoconv::high_order
