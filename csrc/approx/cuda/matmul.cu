// Approximate matrix products of tensors of any strides: see gemm.cu.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>

#include "approx/cuda/view.cuh"
#include "approx/problem.h"

namespace hoconv::approx {
namespace {

// Rows and columns, of these strides, that are one digit each.
View matrix(const Tensor& t, int64_t batch, int64_t row, int64_t column) {
  const Digits one(1, 1);
  return {static_cast<const float*>(t.const_data_ptr()),
          span(t),
          batch,
          0,
          0,
          1,
          1,
          1,
          1,
          {one, row},
          {one, column},
          false,
          column < row};
}

// out (B, M, N) of a (B, M, K) and b (B, K, N), or all of them without B.
Tensor matmul(Tensor a, Tensor b, std::string multiplier, std::optional<Tensor> entries) {
  a = compact(a), b = compact(b);
  const Matmul p(a, b);
  Tensor out = make_tensor(a, p.result(a, p.N));
  const Launch launch(a);
  const Digits one(1, 1);
  gemm({multiplier, entries},
       {matrix(a, p.a.batch_stride, p.a.row_stride, p.a.column_stride),
        matrix(b, p.b.batch_stride, p.b.column_stride, p.b.row_stride),
        {static_cast<float*>(out.mutable_data_ptr()), p.M * p.N, one, one, {p.N, 0, 0}, {1, 0, 0}},
        p.batch,
        p.M,
        p.N,
        p.K},
       a, launch.stream);
  return out;
}

}  // namespace
}  // namespace hoconv::approx

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("approx_matmul.cuda", TORCH_BOX(&hoconv::approx::matmul));
}
