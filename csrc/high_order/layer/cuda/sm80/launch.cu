// Dispatches on the precision, and the backward pass on k (forward.cuh, backward.cuh).

#include "high_order/layer/cuda/sm80/launch.cuh"

namespace hoconv::high_order::layer::sm80 {

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
    using P = decltype(precision);
    switch (l.k) {
      case 3:
        return Backward<P, 3>::run(grad, x, weight, bias, l, grad_x, grad_weight, grad_bias,
                                   stream);
      case 5:
        return Backward<P, 5>::run(grad, x, weight, bias, l, grad_x, grad_weight, grad_bias,
                                   stream);
      default:
        return Backward<P, 7>::run(grad, x, weight, bias, l, grad_x, grad_weight, grad_bias,
                                   stream);
    }
  });
}

}  // namespace hoconv::high_order::layer::sm80
