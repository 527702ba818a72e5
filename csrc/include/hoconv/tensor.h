// Checks of tensors and dispatch on their dtypes, for the kernels of every operator.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
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

inline std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(sizes[i], 1))
    strides[i] = stride;
  return strides;
}

// Tensors that are not initialised, on the device of `like`. The dispatcher, through which ATen's
// own functions for them go, takes longer than the allocation.

inline Tensor make_strided(const Tensor& like, const std::vector<int64_t>& sizes,
                           const std::vector<int64_t>& strides, ScalarType type) {
  int32_t device_type;
  AtenTensorHandle handle;
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  STD_TORCH_CHECK(sizes.size() == strides.size(), "stride: expected as many as size");
  STD_TORCH_CHECK(aoti_torch_get_device_type(like.get(), &device_type) == 0);
  STD_TORCH_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), dtype,
                                           device_type, like.get_device_index(), &handle) == 0,
                  "could not allocate a tensor");
  return Tensor(handle);
}

inline Tensor make_strided(const Tensor& like, const std::vector<int64_t>& sizes,
                           const std::vector<int64_t>& strides) {
  return make_strided(like, sizes, strides, like.scalar_type());
}

inline Tensor make_tensor(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType type) {
  return make_strided(like, sizes, contiguous_strides(sizes), type);
}

inline Tensor make_tensor(const Tensor& like, const std::vector<int64_t>& sizes) {
  return make_tensor(like, sizes, like.scalar_type());
}

// One with the sizes of `like`; and with its strides, if it is dense.
inline Tensor make_like(const Tensor& like) {
  if (!like.is_contiguous()) return torch::stable::empty_like(like);
  return make_strided(like, {like.sizes().begin(), like.sizes().end()},
                      {like.strides().begin(), like.strides().end()});
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
