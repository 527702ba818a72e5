// ATen operations that the stable headers do not wrap.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>

#include "hoconv/tensor.h"

namespace hoconv {

inline Tensor multiply(const Tensor& a, const Tensor& b) {
  std::array<StableIValue, 2> stack{torch::stable::detail::from(a), torch::stable::detail::from(b)};
  STD_TORCH_CHECK(
      torch_call_dispatcher("aten::mul", "Tensor", stack.data(), TORCH_ABI_VERSION) == 0,
      "aten::mul failed");
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor add(const Tensor& a, const Tensor& b) { return torch::stable::subtract(a, b, -1.0); }

// float16 and bfloat16 as float32, in which sums are accumulated; other dtypes as they are.
inline Tensor widen(const Tensor& t) {
  const bool half = t.element_size() < 4;
  return half ? torch::stable::to(t, ScalarType::Float) : t;
}

}  // namespace hoconv
