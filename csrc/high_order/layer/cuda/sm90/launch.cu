// Dispatches on the precision (forward.cuh, backward.cuh).

#include "high_order/layer/cuda/sm90/launch.cuh"

namespace hoconv::high_order::layer::sm90 {

void forward(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
             const Layer& l, Tensor& out, cudaStream_t stream) {
  dispatch_precision(x, l, [&](auto precision) {
    Forward<decltype(precision)>::run(x, weight, bias, l, out, stream);
  });
}

void backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
              const std::optional<Tensor>& bias, const Layer& l, Tensor& grad_x,
              Tensor& grad_weight, Tensor& grad_bias, cudaStream_t stream) {
  dispatch_precision(x, l, [&](auto precision) {
    Backward<decltype(precision)>::run(grad, x, weight, bias, l, grad_x, grad_weight, grad_bias,
                                       stream);
  });
}

}  // namespace hoconv::high_order::layer::sm90
