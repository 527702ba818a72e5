// The layer's kernels for Hopper (compute capability 9.0): see layer.cuh for what they serve.
#pragma once

#include <optional>

#include "high_order/layer/cuda/layer.cuh"

namespace hoconv::high_order::layer::sm90 {

// Whether these kernels compute the forward pass of a layer on the current device.
inline bool serves(const Layer& l) {
  return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         device_attribute(cudaDevAttrComputeCapabilityMinor) == 0 && (l.C == 1 || l.C == 3) &&
         l.G == 1 && l.s == l.k && l.dilation == 1;
}

// Whether they also compute its backward pass: the sums must fit the registers.
inline bool serves_backward(const Layer& l) { return serves(l) && (l.k < 7 || l.C == 1); }

// Writes `out`.
void forward(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
             const Layer& l, Tensor& out, cudaStream_t stream);

// Writes the three gradients; two runs give the same bits.
void backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
              const std::optional<Tensor>& bias, const Layer& l, Tensor& grad_x,
              Tensor& grad_weight, Tensor& grad_bias, cudaStream_t stream);

}  // namespace hoconv::high_order::layer::sm90
