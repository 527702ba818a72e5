// The op that computes both gradients.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "high_order/conv2d/cuda/kernels.cuh"

namespace hoconv::high_order::conv2d {
namespace {

std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                    int64_t dilation) {
  check_backward(grad, x, weight);
  return {cuda_grad_input(make_like(x), grad, weight, dilation),
          cuda_grad_weight(make_like(weight), grad, x, dilation)};
}

}  // namespace
}  // namespace hoconv::high_order::conv2d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("high_order_conv2d_backward.cuda", TORCH_BOX(&hoconv::high_order::conv2d::backward));
}
