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

}  // namespace hoconv::high_order
