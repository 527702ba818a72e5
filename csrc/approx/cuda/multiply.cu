// The approximate product of each pair of elements, and the matrix product of a gradient with a
// multiplier's own derivative: the definitions, one thread an element.
//
// M, K, N of a matrix product a (M, K) times b (K, N).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>

#include "approx/multipliers.h"
#include "approx/problem.h"
#include "hoconv/cuda_launch.cuh"

namespace hoconv::approx {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1 << 20;  // beyond these, each thread takes several elements

int64_t blocks_for(int64_t elements) {
  return std::clamp<int64_t>((elements + kThreads - 1) / kThreads, 1, kMostBlocks);
}

template <typename Multiplier>
__global__ void products(Multiplier multiplier, const float* a, const float* b, float* out,
                         int64_t size) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += step)
    out[i] = multiplier.multiply(a[i], b[i]);
}

struct Matrix {  // of a batch, any strides
  const float* data;
  int64_t batch, row, column;
  Matrix(const Tensor& t, const Matrices& m)
      : data(static_cast<const float*>(t.const_data_ptr())),
        batch(m.batch_stride),
        row(m.row_stride),
        column(m.column_stride) {}
  __device__ float operator()(int64_t n, int64_t i, int64_t j) const {
    return data[n * batch + i * row + j * column];
  }
};

// out[m, k] = sum over n of grad[m, n] * (the product's derivative with respect to a)(a[m, k],
// b[k, n]), in the order of all sums.
template <typename Multiplier>
__global__ void derivatives(Matrix grad, Matrix a, Matrix b, float* out, Matmul p) {
  const int64_t size = p.batch * p.M * p.K, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += step) {
    const int64_t k = i % p.K, m = i / p.K % p.M, batch = i / p.K / p.M;
    const float value = a(batch, m, k);
    float total = 0;
    for (int64_t chunk = 0; chunk < p.N; chunk += kChunk) {
      float sum = 0;
      for (int64_t n = chunk; n < min(chunk + kChunk, p.N); ++n)
        sum = __fadd_rn(
            sum, __fmul_rn(grad(batch, m, n), Multiplier::derivative(value, b(batch, k, n))));
      total = chunk == 0 ? sum : __fadd_rn(total, sum);
    }
    out[i] = total;
  }
}

Tensor multiply(const Tensor& a, const Tensor& b, std::string multiplier,
                std::optional<Tensor> entries) {
  check_float(a, "a");
  check_alike(b, a, "b");
  check_same_sizes(b, a, "b");
  STD_TORCH_CHECK(a.is_contiguous() && b.is_contiguous(), "a, b: expected contiguous tensors");
  Tensor out = make_like(a);
  if (a.numel() == 0) return out;
  const Launch launch(a);
  const auto multiply_all = [&](auto definition) {
    products<<<blocks_for(a.numel()), kThreads, 0, launch.stream>>>(
        definition, static_cast<const float*>(a.const_data_ptr()),
        static_cast<const float*>(b.const_data_ptr()), static_cast<float*>(out.mutable_data_ptr()),
        a.numel());
  };
  if (entries)
    multiply_all(Chosen{multiplier, entries}.table(a));
  else
    with_multiplier(multiplier, multiply_all);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

Tensor matmul_derivative(const Tensor& grad, const Tensor& a, const Tensor& b,
                         std::string multiplier) {
  const Matmul p(a, b);
  const Matrices g(grad, "grad");
  p.check_grad(g);
  Tensor out = make_tensor(a, p.result(a, p.K));
  if (out.numel() == 0) return out;
  const Launch launch(a);
  with_multiplier(multiplier, [&](auto definition) {
    derivatives<decltype(definition)><<<blocks_for(out.numel()), kThreads, 0, launch.stream>>>(
        Matrix(grad, g), Matrix(a, p.a), Matrix(b, p.b),
        static_cast<float*>(out.mutable_data_ptr()), p);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

}  // namespace
}  // namespace hoconv::approx

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("approx_multiply.cuda", TORCH_BOX(&hoconv::approx::multiply));
  m.impl("approx_matmul_derivative.cuda", TORCH_BOX(&hoconv::approx::matmul_derivative));
}
