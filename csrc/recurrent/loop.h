// What generated time loops call: PyTorch's products and threads, through its C interface. Nothing
// of C++'s library is included: a generated file is to compile in a second.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "recurrent/math.h"

// oneDNN's x W^T, which compiled models call by this name. Its header is not for libraries that are
// to load on later versions of PyTorch. Null where PyTorch was built without oneDNN.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu__linear_pointwise(
    AtenTensorHandle x, AtenTensorHandle w, AtenTensorHandle* bias, const char* function,
    const double** scalars, int64_t scalars_length, const char** algorithm,
    AtenTensorHandle* result);

namespace hoconv::recurrent {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

// Owns one of PyTorch's tensors, or none where PyTorch failed.
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

// A matrix in memory that belongs to somebody else.
class Matrix : public Tensor {
 public:
  Matrix(void* data, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride,
         int32_t dtype) {
    const int64_t sizes[]{rows, columns}, strides[]{row_stride, column_stride};
    aoti_torch_create_tensor_from_blob(data, 2, sizes, strides, 0, dtype,
                                       aoti_torch_device_type_cpu(), 0, put());
  }
};

// A matrix (inner, columns) that every step multiplies by. In float32 oneDNN's product is the
// fastest where the matrix is large; it is copied, once, into the order in which oneDNN reads it.
template <typename T>
class Factor {
 public:
  Factor(void* data, int64_t inner, int64_t columns, int64_t row_stride, int64_t column_stride,
         int32_t dtype, bool onednn, int64_t steps)
      : plain_(data, inner, columns, row_stride, column_stride, dtype) {
    // With less, PyTorch's own product, which is called sooner and needs no copy, is as fast.
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
    AtenTensorHandle passed = nullptr;  // the call takes it
    if (aoti_torch_new_tensor_handle(weight.get(), &passed) != 0) return;
    StableIValue stack[]{reinterpret_cast<StableIValue>(passed), 0};
    if (torch_call_dispatcher("mkldnn::_reorder_linear_weight", "", stack, TORCH_ABI_VERSION) == 0)
      *packed_.put() = reinterpret_cast<AtenTensorHandle>(stack[0]);
  }

  // Of oneDNN, if any.
  AtenTensorHandle packed() const { return packed_.get(); }
  AtenTensorHandle plain() const { return plain_.get(); }

 private:
  Matrix plain_;
  Tensor packed_;
};

// Calls f(begin, end) for ranges that cover n rows, on PyTorch's threads.
template <typename F>
bool for_rows(int64_t n, int64_t grain, const F& f) {
  return torch_parallel_for(
             0, n, grain,
             [](int64_t begin, int64_t end, void* context) {
               (*static_cast<const F*>(context))(begin, end);
             },
             const_cast<F*>(&f)) == 0;
}

// out (rows, columns) = x (rows, inner) times a matrix (inner, columns), plus a bias (columns) if
// there is one; whether it succeeded.
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
  Tensor made;  // no form of oneDNN's writes to a tensor that is given
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
