// The dynamic 1-D convolution on a GPU as a composition of ATen operations, with hand-written
// gradients. It is part of the CPU library, since it needs no CUDA compiler.
//
// B batch, C channels, H heads, K taps, T time steps.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "dynamic_conv1d/layer.h"
#include "dynamic_conv1d/problem.h"
#include "hoconv/aten_ops.h"

namespace hoconv::dynamic_conv1d {
namespace {

using torch::stable::copy_;
using torch::stable::narrow;
using torch::stable::select;

// (B, C, T) as (B, H, C / H, T): a view
Tensor heads(const Tensor& t, const Problem& p) {
  return torch::stable::view(t, {p.B, p.H, p.head_channels(), t.size(2)});
}

// (B, H, C / H, T + K - 1)
Tensor padded(const Tensor& x, const Problem& p) {
  return heads(torch::stable::pad(widen(x), {p.before, p.K - 1 - p.before}), p);
}

// The steps of a padded sequence that a tap reads: a view
Tensor shifted(Tensor padded, const Problem& p, int64_t tap) { return narrow(padded, 3, tap, p.T); }

// The weights of a tap, (B or 1, H, 1, T or 1)
Tensor tap_weights(const Tensor& weight, int64_t tap) {
  return torch::stable::unsqueeze(widen(select(weight, 2, tap)), 2);
}

Tensor forward(const Tensor& x, const Tensor& weight, int64_t padding) {
  const Problem p(x, weight.sizes(), padding);
  check_alike(weight, x, "weight");
  const Tensor sequence = padded(x, p);
  Tensor sum = multiply(shifted(sequence, p, 0), tap_weights(weight, 0));
  for (int64_t tap = 1; tap < p.K; ++tap)
    sum = add(sum, multiply(shifted(sequence, p, tap), tap_weights(weight, tap)));
  Tensor out = make_like(x);
  Tensor target = heads(out, p);
  copy_(target, sum);
  return out;
}

Tensor grad_input(const Tensor& grad, const Tensor& weight, int64_t padding) {
  const Problem p(grad, weight.sizes(), padding);
  check_alike(weight, grad, "weight");
  const Tensor gradient = heads(widen(grad), p);
  Tensor sum = padded(grad, p);  // for its shape and type
  torch::stable::zero_(sum);
  for (int64_t tap = 0; tap < p.K; ++tap) {
    Tensor target = shifted(sum, p, tap);
    copy_(target, add(target, multiply(gradient, tap_weights(weight, tap))));
  }
  Tensor out = make_like(grad);
  Tensor target = heads(out, p);
  copy_(target, narrow(sum, 3, p.before, p.T));
  return out;
}

Tensor grad_weight(const Tensor& grad, const Tensor& x, std::vector<int64_t> size,
                   std::vector<int64_t> stride, int64_t padding) {
  const Problem p(x, size, padding);
  check_alike(grad, x, "grad");
  check_same_sizes(grad, x, "grad");
  Tensor out = make_strided(x, size, stride);
  const Tensor gradient = heads(widen(grad), p), sequence = padded(x, p);
  std::vector<int64_t> summed{2};  // channels, and what the weights share
  if (p.batch_shared) summed.push_back(0);
  if (p.time_shared) summed.push_back(3);
  for (int64_t tap = 0; tap < p.K; ++tap) {
    const Tensor products = multiply(gradient, shifted(sequence, p, tap));
    Tensor target = select(out, 2, tap);
    copy_(target, select(torch::stable::sum(products, summed, /*keepdim=*/true), 2, 0));
  }
  return out;
}

using OwnLayer = Layer<&forward, &grad_input, &grad_weight>;

}  // namespace
}  // namespace hoconv::dynamic_conv1d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("dynamic_conv1d.cpp", TORCH_BOX(&hoconv::dynamic_conv1d::forward));
  m.impl("dynamic_conv1d_grad_input.cpp", TORCH_BOX(&hoconv::dynamic_conv1d::grad_input));
  m.impl("dynamic_conv1d_grad_weight.cpp", TORCH_BOX(&hoconv::dynamic_conv1d::grad_weight));
  m.impl("dynamic_conv1d_layer.cpp", TORCH_BOX(&hoconv::dynamic_conv1d::OwnLayer::forward));
  m.impl("dynamic_conv1d_layer_backward.cpp",
         TORCH_BOX(&hoconv::dynamic_conv1d::OwnLayer::backward));
}
