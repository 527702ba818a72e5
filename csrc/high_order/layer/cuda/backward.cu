// The op `high_order_layer_backward`: its sizes, and which kernels compute it.

#include <tuple>

#include "high_order/layer/cuda/layer.cuh"
#include "high_order/layer/cuda/sm80/launch.cuh"
#include "high_order/layer/cuda/sm90/launch.cuh"

namespace hoconv::high_order::layer {

namespace {

std::tuple<Tensor, Tensor, Tensor> layer_backward(const Tensor& grad, const Tensor& x,
                                                  const Tensor& weight, std::optional<Tensor> bias,
                                                  int64_t k, int64_t dilation, bool softmax,
                                                  bool residual, bool allow_tf32) {
  const Layer l(x, weight, bias, k, dilation, softmax, residual, allow_tf32);
  check_alike(grad, x, "grad");
  check_same_sizes(grad, x, "grad");
  Tensor grad_x = make_like(x), grad_weight = make_like(weight);
  Tensor grad_bias = make_tensor(weight, {weight.size(0)});
  if (x.numel() == 0) {
    torch::stable::zero_(grad_weight);
    torch::stable::zero_(grad_bias);
    return {grad_x, grad_weight, grad_bias};
  }
  const Launch launch(x);
  const auto backward = sm90::serves_backward(l) ? sm90::backward : sm80::backward;
  backward(grad, x, weight, bias, l, grad_x, grad_weight, grad_bias, launch.stream);
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace
}  // namespace hoconv::high_order::layer

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("high_order_layer_backward.cuda", TORCH_BOX(&hoconv::high_order::layer::layer_backward));
}
