// Dispatches the backward pass on the precision. backward_<precision>.cu instantiate backward.cuh.

#include "high_order/layer/cuda/sm80/launch.cuh"

namespace hoconv::high_order::layer::sm80 {

template <typename P>
void run_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                  const std::optional<Tensor>& bias, const Layer& l, Tensor& grad_x,
                  Tensor& grad_weight, Tensor& grad_bias, cudaStream_t stream);

void backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
              const std::optional<Tensor>& bias, const Layer& l, Tensor& grad_x,
              Tensor& grad_weight, Tensor& grad_bias, cudaStream_t stream) {
  dispatch_precision(x, l, [&](auto precision) {
    run_backward<decltype(precision)>(grad, x, weight, bias, l, grad_x, grad_weight, grad_bias,
                                      stream);
  });
}

}  // namespace hoconv::high_order::layer::sm80
