// The approximate product of each pair of elements, and the matrix product of a gradient with a
// multiplier's own derivative: the definitions, on all threads, in loops that the compiler
// vectorises if it can.
//
// B batch, M, K, N of a matrix product a (M, K) times b (K, N).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>
#include <vector>

#include "approx/multipliers.h"
#include "approx/problem.h"

namespace hoconv::approx {
namespace {

constexpr int64_t kGrain = 4096;  // a thread takes at least this many products

Tensor multiply(const Tensor& a, const Tensor& b, std::string multiplier,
                std::optional<Tensor> entries) {
  check_float(a, "a");
  check_alike(b, a, "b");
  check_same_sizes(b, a, "b");
  STD_TORCH_CHECK(a.is_contiguous() && b.is_contiguous(), "a, b: expected contiguous tensors");
  Tensor out = make_like(a);
  const auto* x = static_cast<const float*>(a.const_data_ptr());
  const auto* y = static_cast<const float*>(b.const_data_ptr());
  auto* z = static_cast<float*>(out.data_ptr());
  const auto multiply_all = [&](auto m) {
    torch::stable::parallel_for(0, a.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) z[i] = m.multiply(x[i], y[i]);
    });
  };
  if (entries)
    multiply_all(Chosen{multiplier, entries}.table(a));
  else
    with_multiplier(multiplier, multiply_all);
  return out;
}

// out[m, k] = sum over n of grad[m, n] * (the product's derivative with respect to a)(a[m, k],
// b[k, n]), in the order of all sums.
Tensor matmul_derivative(const Tensor& grad, const Tensor& a, const Tensor& b,
                         std::string multiplier) {
  const Matmul p(a, b);
  const Matrices of_grad(grad, "grad");
  p.check_grad(of_grad);
  Tensor out = make_tensor(a, p.result(a, p.K));
  const auto *g = static_cast<const float*>(grad.const_data_ptr()),
             *x = static_cast<const float*>(a.const_data_ptr()),
             *y = static_cast<const float*>(b.const_data_ptr());
  auto* target = static_cast<float*>(out.data_ptr());
  const int64_t grad_n = of_grad.column_stride, a_k = p.a.column_stride;
  const int64_t b_k = p.b.row_stride, b_n = p.b.column_stride;
  with_multiplier(multiplier, [&](auto m) {
    torch::stable::parallel_for(0, p.batch * p.M, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> row(p.K), product(p.K), sum(p.K);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t batch = i / p.M, line = i % p.M;
        const float* grad_row = g + batch * of_grad.batch_stride + line * of_grad.row_stride;
        const float* a_row = x + batch * p.a.batch_stride + line * p.a.row_stride;
        const float* matrix = y + batch * p.b.batch_stride;
        float* total = target + i * p.K;
        for (int64_t k = 0; k < p.K; ++k) row[k] = a_row[k * a_k];
        std::fill(total, total + p.K, 0.0f);
        for (int64_t chunk = 0; chunk < p.N; chunk += kChunk) {
          std::fill(sum.begin(), sum.end(), 0.0f);
          for (int64_t n = chunk; n < std::min(chunk + kChunk, p.N); ++n) {
            const float factor = grad_row[n * grad_n];
            const float* column = matrix + n * b_n;
            for (int64_t k = 0; k < p.K; ++k)
              product[k] = factor * m.derivative(row[k], column[k * b_k]);
            asm volatile("" : : "r"(product.data()) : "memory");  // rounded, not fused below
            for (int64_t k = 0; k < p.K; ++k) sum[k] += product[k];
          }
          for (int64_t k = 0; k < p.K; ++k) total[k] += sum[k];
        }
      }
    });
  });
  return out;
}

}  // namespace
}  // namespace hoconv::approx

STABLE_TORCH_LIBRARY_IMPL(hoconv, CPU, m) {
  m.impl("approx_multiply.cpp", TORCH_BOX(&hoconv::approx::multiply));
  m.impl("approx_matmul_derivative.cpp", TORCH_BOX(&hoconv::approx::matmul_derivative));
}
