// The matrix product of 8-bit integers whose products come from a table of all of them, and its
// gradient by a table of derivatives.
//
// B batch, M, N rows and columns of the product, K what it sums over.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "approx/problem.h"

namespace hoconv::approx {
namespace {

constexpr int64_t kRows = 16;  // rows of a, which share a copy of each row of b

// out (B, M, N) int32, the sum over k of table[a[m, k] mod 256, b[k, n] mod 256]; modulo 2^32, or
// kept within limits at each addition.
Tensor table_matmul(const Tensor& a, const Tensor& b, const Tensor& table,
                    std::optional<int64_t> least, std::optional<int64_t> most) {
  const std::optional<Limits> limits = Limits::of(least, most);
  const TableMatmul p(a, b, table);
  const int64_t B = p.batch, M = p.M, K = p.K, N = p.N;
  Tensor out = make_tensor(table, {B, M, N});
  const auto *left = static_cast<const uint8_t*>(a.const_data_ptr()),
             *right = static_cast<const uint8_t*>(b.const_data_ptr());
  const auto* products = static_cast<const int32_t*>(table.const_data_ptr());
  auto* target = static_cast<int32_t*>(out.data_ptr());
  const int64_t blocks = (M + kRows - 1) / kRows;
  torch::stable::parallel_for(0, B * blocks, 1, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> line(N);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t batch = i / blocks, first = i % blocks * kRows;
      const int64_t rows = std::min(kRows, M - first);
      int32_t* sums = target + (batch * M + first) * N;
      std::fill(sums, sums + rows * N, 0);
      for (int64_t k = 0; k < K; ++k) {
        const uint8_t* source = right + batch * b.stride(0) + k * b.stride(1);
        for (int64_t n = 0; n < N; ++n) line[n] = source[n * b.stride(2)];
        for (int64_t m = 0; m < rows; ++m) {
          const uint8_t factor =
              left[batch * a.stride(0) + (first + m) * a.stride(1) + k * a.stride(2)];
          const int32_t* of_factor = products + 256 * factor;
          int32_t* row = sums + m * N;
          if (limits)
            for (int64_t n = 0; n < N; ++n)
              row[n] =
                  std::clamp(int64_t{row[n]} + of_factor[line[n]], limits->least, limits->most);
          else  // in uint32_t, which may wrap
            for (int64_t n = 0; n < N; ++n)
              row[n] = static_cast<uint32_t>(row[n]) + static_cast<uint32_t>(of_factor[line[n]]);
        }
      }
    }
  });
  return out;
}

// The gradient of a (B, M, K) of bytes, float32: the sum over n of
// grad[m, n] * table[a[m, k], b[k, n]]. A row of the table is looked up while n runs, so that it
// stays in the first cache, as do those of the neighbouring m, whose sums do not wait for another.
Tensor table_derivative(const Tensor& grad, const Tensor& a, const Tensor& b, const Tensor& table) {
  const TableDerivative p(grad, a, b, table);
  const int64_t B = p.batch, M = p.M, K = p.K, N = p.N;
  constexpr int64_t kSums = 8;  // neighbouring m
  Tensor out = make_tensor(grad, {B, M, K});
  const auto *left = static_cast<const uint8_t*>(a.const_data_ptr()),
             *right = static_cast<const uint8_t*>(b.const_data_ptr());
  const auto *derivatives = static_cast<const float*>(table.const_data_ptr()),
             *gradient = static_cast<const float*>(grad.const_data_ptr());
  auto* target = static_cast<float*>(out.data_ptr());
  const int64_t blocks = (M + kSums - 1) / kSums;
  torch::stable::parallel_for(0, B * blocks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> factors(kSums * N);  // of a block; 0 for an m that there is not
    std::vector<uint8_t> line(N);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t batch = i / blocks, first = i % blocks * kSums;
      const int64_t rows = std::min(kSums, M - first);
      for (int64_t n = 0; n < N; ++n)
        for (int64_t m = 0; m < rows; ++m)
          factors[n * kSums + m] =
              gradient[batch * grad.stride(0) + (first + m) * grad.stride(1) + n * grad.stride(2)];
      for (int64_t k = 0; k < K; ++k) {
        const uint8_t* source = right + batch * b.stride(0) + k * b.stride(1);
        for (int64_t n = 0; n < N; ++n) line[n] = source[n * b.stride(2)];
        const float* of_factor[kSums];
        for (int64_t m = 0; m < kSums; ++m)
          of_factor[m] =
              derivatives +
              256 * left[batch * a.stride(0) + (first + std::min(m, rows - 1)) * a.stride(1) +
                         k * a.stride(2)];
        float sums[kSums] = {};
        for (int64_t n = 0; n < N; ++n)
          for (int64_t m = 0; m < kSums; ++m)
            sums[m] += factors[n * kSums + m] * of_factor[m][line[n]];
        for (int64_t m = 0; m < rows; ++m) target[(batch * M + first + m) * K + k] = sums[m];
      }
    }
  });
  return out;
}

}  // namespace
}  // namespace hoconv::approx

STABLE_TORCH_LIBRARY_IMPL(hoconv, CPU, m) {
  m.impl("approx_table_matmul.cpp", TORCH_BOX(&hoconv::approx::table_matmul));
  m.impl("approx_table_derivative.cpp", TORCH_BOX(&hoconv::approx::table_derivative));
}
