// The op that computes both gradients.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "high_order/conv2d/cuda/kernels.cuh"

namespace hoconv::high_order::conv2d {
namespace {

std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                    std::vector<int64_t> window) {
  const Problem p(x.sizes(), weight.sizes(), Window(window));
  check_floating(x, "x");
  check_alike(weight, x, "weight");
  check_gradient(grad, x, p);
  return {cuda_grad_input(make_like(x), grad, weight, p),
          cuda_grad_weight(make_like(weight), grad, x, p)};
}

}  // namespace
}  // namespace hoconv::high_order::conv2d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("high_order_conv2d_backward.cuda", TORCH_BOX(&hoconv::high_order::conv2d::backward));
}
