// Approximate matrix products of tensors of any strides: see gemm.h.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>

#include "approx/cpu/gemm.h"
#include "approx/problem.h"

namespace hoconv::approx {
namespace {

// out (B, M, N) of a (B, M, K) and b (B, K, N).
Tensor matmul(const Tensor& a, const Tensor& b, std::string multiplier) {
  const Matmul p(a, b);
  Tensor out = torch::stable::new_empty(a, {p.batch, p.M, p.N});
  gemm(multiplier,
       {static_cast<const float*>(a.const_data_ptr()), steps(p.batch, a.stride(0)),
        steps(p.M, a.stride(1)), steps(p.K, a.stride(2))},
       {static_cast<const float*>(b.const_data_ptr()), steps(p.batch, b.stride(0)),
        steps(p.N, b.stride(2)), steps(p.K, b.stride(1))},
       {static_cast<float*>(out.data_ptr()), steps(p.batch, p.M * p.N), steps(p.M, p.N),
        steps(p.N, 1)});
  return out;
}

}  // namespace
}  // namespace hoconv::approx

STABLE_TORCH_LIBRARY_IMPL(hoconv, CPU, m) {
  m.impl("approx_matmul.cpp", TORCH_BOX(&hoconv::approx::matmul));
}
