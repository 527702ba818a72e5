// Checks of tensors and dispatch on their dtypes, for the kernels of every operator.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <vector>

namespace hoconv {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check_floating(const Tensor& t, const char* name) {
  const auto dtype = t.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double ||
                      dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                  name, ": expected float32, float64, float16 or bfloat16");
}

inline void check_alike(const Tensor& a, const Tensor& b, const char* name) {
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), name, ": expected the dtype of x");
  STD_TORCH_CHECK(a.device() == b.device(), name, ": expected the device of x");
}

inline void check_same_sizes(const Tensor& a, const Tensor& b, const char* name) {
  STD_TORCH_CHECK(a.dim() == b.dim(), name, ": expected the shape of x");
  for (int64_t i = 0; i < a.dim(); ++i)
    STD_TORCH_CHECK(a.size(i) == b.size(i), name, ": expected the shape of x");
}

// An uninitialised tensor with the dtype and device of `like`.
inline Tensor empty_strided_like(const Tensor& like, const std::vector<int64_t>& size,
                                 const std::vector<int64_t>& stride) {
  int32_t dtype, device_type;
  AtenTensorHandle handle;
  STD_TORCH_CHECK(size.size() == stride.size(), "stride: expected as many as size");
  STD_TORCH_CHECK(aoti_torch_get_dtype(like.get(), &dtype) == 0);
  STD_TORCH_CHECK(aoti_torch_get_device_type(like.get(), &device_type) == 0);
  STD_TORCH_CHECK(aoti_torch_empty_strided(size.size(), size.data(), stride.data(), dtype,
                                           device_type, like.get_device_index(), &handle) == 0,
                  "weight: could not allocate its gradient");
  return Tensor(handle);
}

// Calls f with a zero of the tensor's element type. The tensor has passed check_floating.
template <typename F>
void dispatch_floating(const Tensor& t, F&& f) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return f(float{});
    case ScalarType::Double:
      return f(double{});
    case ScalarType::Half:
      return f(torch::headeronly::Half{});
    default:
      return f(torch::headeronly::BFloat16{});
  }
}

}  // namespace hoconv
