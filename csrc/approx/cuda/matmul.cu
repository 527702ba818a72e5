// Approximate matrix products of tensors of any strides: see gemm.cu.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>

#include "approx/cuda/view.cuh"
#include "approx/problem.h"

namespace hoconv::approx {
namespace {

// Rows and columns that are one digit each.
View matrix(const Tensor& t, int rows, int columns) {
  const Digits one(1, 1);
  return {static_cast<const float*>(t.const_data_ptr()),
          span(t),
          t.stride(0),
          0,
          0,
          1,
          1,
          1,
          1,
          {one, t.stride(rows)},
          {one, t.stride(columns)},
          false,
          t.stride(columns) < t.stride(rows)};
}

// out (B, M, N) of a (B, M, K) and b (B, K, N).
Tensor matmul(Tensor a, Tensor b, std::string multiplier) {
  const Matmul p(a, b);
  a = compact(a), b = compact(b);
  Tensor out = torch::stable::new_empty(a, {p.batch, p.M, p.N});
  const Launch launch(a);
  const Digits one(1, 1);
  gemm(multiplier,
       {matrix(a, 1, 2),
        matrix(b, 2, 1),
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
