// Images (B, C, H, W) by their strides, on CPU and GPU.
#pragma once

#include <cstdint>

#include "hoconv/tensor.h"

namespace hoconv::high_order {

// In elements.
struct ImageStrides {
  int64_t b, c, h, w;
};
inline ImageStrides image_strides(const Tensor& t) {
  return {t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

// Whether neighbouring channels of a pixel are neighbours in memory, and not those of a row.
inline bool channels_last(const Tensor& t) {
  return t.stride(1) == 1 && (t.size(3) == 1 || t.stride(3) != 1);
}

}  // namespace hoconv::high_order
