// The layer's kernels for compute capability 8.0 and later: every layer that `Layer` accepts.
#pragma once

#include <optional>

#include "high_order/layer/cuda/layer.cuh"

namespace hoconv::high_order::layer::sm80 {

// Writes `out`.
void forward(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
             const Layer& l, Tensor& out, cudaStream_t stream);

// Writes the three gradients; two runs give the same bits.
void backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
              const std::optional<Tensor>& bias, const Layer& l, Tensor& grad_x,
              Tensor& grad_weight, Tensor& grad_bias, cudaStream_t stream);

// What they call for one precision, and for one k.
template <typename P>
struct Forward {
  static void run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                  const Layer& l, Tensor& out, cudaStream_t stream);
};

template <typename P, int k>
struct Backward {
  static void run(const Tensor& grad, const Tensor& x, const Tensor& weight,
                  const std::optional<Tensor>& bias, const Layer& l, Tensor& grad_x,
                  Tensor& grad_weight, Tensor& grad_bias, cudaStream_t stream);
};

}  // namespace hoconv::high_order::layer::sm80
