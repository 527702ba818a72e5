// ATen operations that the stable headers do not wrap.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>
#include <vector>

#include "hoconv/tensor.h"

namespace hoconv {

// Calls an operation that returns one tensor.
template <typename... Arguments>
Tensor call_aten(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(arguments)> stack{torch::stable::detail::from(arguments)...};
  STD_TORCH_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION) == 0, name,
                  " failed");
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor multiply(const Tensor& a, const Tensor& b) {
  return call_aten("aten::mul", "Tensor", a, b);
}

inline Tensor matrix_product(const Tensor& a, const Tensor& b) {
  return call_aten("aten::mm", "", a, b);
}

inline Tensor batched_product(const Tensor& a, const Tensor& b) {
  return call_aten("aten::bmm", "", a, b);
}

inline Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  return call_aten("aten::linear", "", x, weight, bias);
}

inline Tensor softmax(const Tensor& t, int64_t dim) {
  return call_aten("aten::_softmax", "", t, dim, /*half_to_float=*/false);
}

inline Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim) {
  const ScalarType dtype = output.scalar_type();
  return call_aten("aten::_softmax_backward_data", "", grad, output, dim, dtype);
}

// A view of a tensor's memory, from an element on.
inline Tensor strided_view(const Tensor& t, const std::vector<int64_t>& size,
                           const std::vector<int64_t>& stride, int64_t first = 0) {
  AtenTensorHandle handle;
  STD_TORCH_CHECK(aoti_torch__reinterpret_tensor(t.get(), size.size(), size.data(), stride.data(),
                                                 first, &handle) == 0,
                  "could not view a tensor");
  return Tensor(handle);
}

inline Tensor add(const Tensor& a, const Tensor& b) { return torch::stable::subtract(a, b, -1.0); }

// float16 and bfloat16 as float32, in which sums are accumulated; other dtypes as they are.
inline Tensor widen(const Tensor& t) {
  const bool half = t.element_size() < 4;
  return half ? torch::stable::to(t, ScalarType::Float) : t;
}

}  // namespace hoconv
