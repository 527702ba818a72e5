// What generated time loops call: PyTorch's products and threads, through its C interface. Nothing
// of C++'s library is included: a generated file is to compile in a second.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "recurrent/math.h"

namespace hoconv::recurrent {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

// A matrix in memory that belongs to somebody else.
class Matrix {
 public:
  Matrix(void* data, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride,
         int32_t dtype) {
    const int64_t sizes[]{rows, columns}, strides[]{row_stride, column_stride};
    failed_ = aoti_torch_create_tensor_from_blob(data, 2, sizes, strides, 0, dtype,
                                                 aoti_torch_device_type_cpu(), 0, &handle_) != 0;
  }
  ~Matrix() {
    if (!failed_) aoti_torch_delete_tensor_object(handle_);
  }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  bool failed() const { return failed_; }
  AtenTensorHandle get() const { return handle_; }

 private:
  AtenTensorHandle handle_ = nullptr;
  bool failed_;
};

// out (rows, columns) = x (rows, inner) times a matrix (inner, columns), plus a bias (columns) if
// there is one; whether it succeeded.
template <typename T>
bool multiply(T* out, const T* x, const Matrix& by, T* bias, int64_t rows, int64_t inner,
              int64_t columns, int32_t dtype) {
  const Matrix a(const_cast<T*>(x), rows, inner, inner, 1, dtype);
  const Matrix result(out, rows, columns, columns, 1, dtype);
  if (a.failed() || by.failed() || result.failed()) return false;
  if (bias == nullptr) return aoti_torch_cpu_mm_out(result.get(), a.get(), by.get()) == 0;
  const Matrix added(bias, rows, columns, 0, 1, dtype);
  return !added.failed() &&
         aoti_torch_cpu_addmm_out(result.get(), added.get(), a.get(), by.get(), 1.0, 1.0) == 0;
}

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

}  // namespace hoconv::recurrent
