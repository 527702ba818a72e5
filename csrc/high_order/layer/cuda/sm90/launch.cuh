// The layer's kernels for Hopper (compute capability 9.0): see limits.cuh for what they compute.
#pragma once

#include <optional>

#include "high_order/layer/cuda/layer.cuh"

namespace hoconv::high_order::layer::sm90 {

// Whether the current device is Hopper.
inline bool is_hopper() {
  return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
}

// Whether these kernels compute the forward pass of a layer on the current device, and the backward
// pass.
inline bool serves(const Layer& l) {
  return is_hopper() && has_hopper_forward(l.k, l.s, l.C, l.G, l.dilation);
}
inline bool serves_backward(const Layer& l) {
  return is_hopper() && has_hopper_backward(l.k, l.s, l.C, l.G, l.dilation);
}

// Writes `out`.
void forward(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
             const Layer& l, Tensor& out, cudaStream_t stream);

// Writes the three gradients; two runs give the same bits.
void backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
              const std::optional<Tensor>& bias, const Layer& l, Tensor& grad_x,
              Tensor& grad_weight, Tensor& grad_bias, cudaStream_t stream);

// What they call for one precision.
template <typename P>
struct Forward {
  static void run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                  const Layer& l, Tensor& out, cudaStream_t stream);
};

template <typename P>
struct Backward {
  static void run(const Tensor& grad, const Tensor& x, const Tensor& weight,
                  const std::optional<Tensor>& bias, const Layer& l, Tensor& grad_x,
                  Tensor& grad_weight, Tensor& grad_bias, cudaStream_t stream);
};

}  // namespace hoconv::high_order::layer::sm90
