// PyTorch's matrix product, through its C interface, which generated time loops call where a
// weight is used too seldom to pack it.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <cstdint>

namespace hoconv::recurrent {

// A matrix in memory that it does not own, as a tensor of PyTorch; none if PyTorch failed.
class Matrix {
 public:
  Matrix(const void* data, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride,
         int32_t dtype) {
    const int64_t sizes[]{rows, columns}, strides[]{row_stride, column_stride};
    aoti_torch_create_tensor_from_blob(const_cast<void*>(data), 2, sizes, strides, 0, dtype,
                                       aoti_torch_device_type_cpu(), 0, &handle_);
  }
  ~Matrix() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;

  AtenTensorHandle get() const { return handle_; }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// out (rows, columns) = x (rows, inner) times `by` (inner, columns), plus `added` (columns) unless
// it is null. Returns whether it succeeded.
template <typename T>
bool multiply(T* out, const T* x, const Matrix& by, const T* added, int64_t rows, int64_t inner,
              int64_t columns, int32_t dtype) {
  const Matrix a(x, rows, inner, inner, 1, dtype), result(out, rows, columns, columns, 1, dtype);
  if (a.get() == nullptr || by.get() == nullptr || result.get() == nullptr) return false;
  if (added == nullptr) return aoti_torch_cpu_mm_out(result.get(), a.get(), by.get()) == 0;
  const Matrix bias(added, rows, columns, 0, 1, dtype);
  return bias.get() != nullptr &&
         aoti_torch_cpu_addmm_out(result.get(), bias.get(), a.get(), by.get(), 1.0, 1.0) == 0;
}

}  // namespace hoconv::recurrent
