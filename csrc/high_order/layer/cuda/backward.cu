// The gradients of the high-order layer: backward.cuh, instantiated in backward_<precision>.cu.

#include <tuple>

#include "high_order/layer/cuda/sm90/layer.cuh"

namespace hoconv {

template <typename P>
void run_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                  const std::optional<Tensor>& bias, const Layer& l, Tensor& grad_x,
                  Tensor& grad_weight, Tensor& grad_bias, cudaStream_t stream);

namespace {

std::tuple<Tensor, Tensor, Tensor> layer_backward(const Tensor& grad, const Tensor& x,
                                                  const Tensor& weight, std::optional<Tensor> bias,
                                                  int64_t k, int64_t dilation, bool softmax,
                                                  bool residual, bool allow_tf32) {
  const Layer l(x, weight, bias, k, dilation, softmax, residual, allow_tf32);
  check_alike(grad, x, "grad");
  check_same_sizes(grad, x, "grad");
  Tensor grad_x = torch::stable::empty_like(x), grad_weight = torch::stable::empty_like(weight);
  const std::array<int64_t, 1> size{weight.size(0)};
  Tensor grad_bias =
      torch::stable::new_empty(weight, torch::headeronly::IntHeaderOnlyArrayRef(size));
  if (x.numel() == 0) {
    torch::stable::zero_(grad_weight);
    torch::stable::zero_(grad_bias);
    return {grad_x, grad_weight, grad_bias};
  }
  const Launch launch(x);
  if (hopper::serves_backward(l)) {
    hopper::backward(grad, x, weight, bias, l, grad_x, grad_weight, grad_bias, launch.stream);
    return {grad_x, grad_weight, grad_bias};
  }
  dispatch_precision(x, l, [&](auto precision) {
    run_backward<decltype(precision)>(grad, x, weight, bias, l, grad_x, grad_weight, grad_bias,
                                      launch.stream);
  });
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace
}  // namespace hoconv

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("high_order_layer_backward.cuda", TORCH_BOX(&hoconv::layer_backward));
}
