// The matrix products and threads of PyTorch that generated time loops call, through its C
// interface. No header of the C++ library is included, so that a generated file compiles in a
// second.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "recurrent/math.h"

// oneDNN's x W^T, declared here under the name by which compiled models call it, since its header
// is not for libraries that must load beside later versions of PyTorch. Null if PyTorch was built
// without oneDNN.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu__linear_pointwise(
    AtenTensorHandle x, AtenTensorHandle w, AtenTensorHandle* bias, const char* function,
    const double** scalars, int64_t scalars_length, const char** algorithm,
    AtenTensorHandle* result);

namespace hoconv::recurrent {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

// Owns a tensor of PyTorch, or none if PyTorch failed to make it.
class Tensor {
 public:
  Tensor() = default;
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle* put() { return &handle_; }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// A matrix in memory that it does not own.
class Matrix : public Tensor {
 public:
  Matrix(void* data, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride,
         int32_t dtype) {
    const int64_t sizes[]{rows, columns}, strides[]{row_stride, column_stride};
    aoti_torch_create_tensor_from_blob(data, 2, sizes, strides, 0, dtype,
                                       aoti_torch_device_type_cpu(), 0, put());
  }
};

// A matrix (inner, columns) that every step multiplies by. For a large float32 matrix oneDNN's
// product is the fastest; its constructor packs the matrix once, in the order in which oneDNN reads
// it.
template <typename T>
class Factor {
 public:
  Factor(void* data, int64_t inner, int64_t columns, int64_t row_stride, int64_t column_stride,
         int32_t dtype, bool onednn, int64_t steps)
      : plain_(data, inner, columns, row_stride, column_stride, dtype) {
    // Below these, PyTorch's own product is as fast: its call is cheaper and it needs no copy.
    constexpr int64_t kLarge = 1 << 18, kOften = 16;
    if (!onednn || sizeof(T) != 4 || inner * columns < kLarge || steps < kOften) return;
    if (&aoti_torch_cpu__linear_pointwise == nullptr) return;
    const Matrix given(data, columns, inner, column_stride, row_stride, dtype);
    const int64_t sizes[]{columns, inner}, strides[]{inner, 1};
    Tensor weight;
    if (given.get() == nullptr ||
        aoti_torch_empty_strided(2, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0,
                                 weight.put()) != 0 ||
        aoti_torch_copy_(weight.get(), given.get(), 0) != 0)
      return;
    AtenTensorHandle passed = nullptr;  // the call below takes ownership
    if (aoti_torch_new_tensor_handle(weight.get(), &passed) != 0) return;
    StableIValue stack[]{reinterpret_cast<StableIValue>(passed), 0};
    if (torch_call_dispatcher("mkldnn::_reorder_linear_weight", "", stack, TORCH_ABI_VERSION) == 0)
      *packed_.put() = reinterpret_cast<AtenTensorHandle>(stack[0]);
  }

  // The matrix as oneDNN packed it, or null.
  AtenTensorHandle packed() const { return packed_.get(); }
  AtenTensorHandle plain() const { return plain_.get(); }

 private:
  Matrix plain_;
  Tensor packed_;
};

// Calls f(begin, end) for ranges that cover n rows, on the threads of PyTorch. Returns whether it
// succeeded.
template <typename F>
bool for_rows(int64_t n, int64_t grain, const F& f) {
  return torch_parallel_for(
             0, n, grain,
             [](int64_t begin, int64_t end, void* context) {
               (*static_cast<const F*>(context))(begin, end);
             },
             const_cast<F*>(&f)) == 0;
}

// out (rows, columns) = x (rows, inner) times a matrix (inner, columns), plus `bias` (columns)
// unless it is null. Returns whether it succeeded.
template <typename T>
bool multiply(T* out, const T* x, const Factor<T>& by, T* bias, int64_t rows, int64_t inner,
              int64_t columns, int32_t dtype) {
  const Matrix a(const_cast<T*>(x), rows, inner, inner, 1, dtype);
  if (a.get() == nullptr || by.plain() == nullptr) return false;
  if (by.packed() == nullptr || rows == 0) {
    const Matrix result(out, rows, columns, columns, 1, dtype);
    if (result.get() == nullptr) return false;
    if (bias == nullptr) return aoti_torch_cpu_mm_out(result.get(), a.get(), by.plain()) == 0;
    const Matrix added(bias, rows, columns, 0, 1, dtype);
    return added.get() != nullptr &&
           aoti_torch_cpu_addmm_out(result.get(), added.get(), a.get(), by.plain(), 1.0, 1.0) == 0;
  }
  Tensor made;  // oneDNN's call cannot write to a given tensor
  void* data;
  if (aoti_torch_cpu__linear_pointwise(a.get(), by.packed(), nullptr, "none", nullptr, 0, nullptr,
                                       made.put()) != 0 ||
      aoti_torch_get_data_ptr(made.get(), &data) != 0)
    return false;
  return for_rows(rows, (1 << 14) / columns + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = static_cast<T*>(data) + row * columns;
      T* to = out + row * columns;
      if (bias == nullptr)
        __builtin_memcpy(to, from, columns * sizeof(T));
      else
        for (int64_t j = 0; j < columns; ++j) to[j] = from[j] + bias[j];
    }
  });
}

}  // namespace hoconv::recurrent
