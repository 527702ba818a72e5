// Approximate matrix products of tensors of any strides: see gemm.h.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>

#include "approx/cpu/gemm.h"
#include "approx/problem.h"

namespace hoconv::approx {
namespace {

// out (B, M, N) of a (B, M, K) and b (B, K, N), or all of them without B.
Tensor matmul(const Tensor& a, const Tensor& b, std::string multiplier,
              std::optional<Tensor> entries) {
  const Matmul p(a, b);
  Tensor out = make_tensor(a, p.result(a, p.N));
  gemm({multiplier, entries}, a,
       {static_cast<const float*>(a.const_data_ptr()), steps(p.batch, p.a.batch_stride),
        steps(p.M, p.a.row_stride), steps(p.K, p.a.column_stride)},
       {static_cast<const float*>(b.const_data_ptr()), steps(p.batch, p.b.batch_stride),
        steps(p.N, p.b.column_stride), steps(p.K, p.b.row_stride)},
       {static_cast<float*>(out.data_ptr()), steps(p.batch, p.M * p.N), steps(p.M, p.N),
        steps(p.N, 1)});
  return out;
}

}  // namespace
}  // namespace hoconv::approx

STABLE_TORCH_LIBRARY_IMPL(hoconv, CPU, m) {
  m.impl("approx_matmul.cpp", TORCH_BOX(&hoconv::approx::matmul));
}
