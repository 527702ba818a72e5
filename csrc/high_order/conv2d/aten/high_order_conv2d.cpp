// The high-order convolution on a GPU as a composition of ATen operations, with hand-written
// gradients. It is part of the CPU library, since it needs no CUDA compiler.
//
// B batch, C channels, G groups of channels, H height, W width, k kernel size.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <tuple>

#include "high_order/conv2d/problem.h"
#include "hoconv/aten_ops.h"

namespace hoconv::high_order::conv2d {
namespace {

using torch::stable::copy_;
using torch::stable::narrow;
using torch::stable::select;

// (B, C, H, W) as (B, G, C / G, H, W): a view
Tensor grouped(const Tensor& t, const Problem& p) {
  return torch::stable::view(t, {p.B, p.G, p.group_channels(), t.size(2), t.size(3)});
}

Tensor padded(const Tensor& image, const Problem& p) {
  return grouped(torch::stable::pad(widen(image),
                                    {p.across.before, p.across.after, p.down.before, p.down.after}),
                 p);
}

// The pixels that a tap reads of a padded image (B, G, C / G, H + before + after, W + before +
// after): a view
Tensor shifted(Tensor image, const Problem& p, int64_t tap) {
  Tensor rows = narrow(image, 3, tap / p.k * p.down.dilation, p.H);
  return narrow(rows, 4, tap % p.k * p.across.dilation, p.W);
}

// The weights of a tap, (B, G, 1, H, W)
Tensor tap_weights(const Tensor& weight, int64_t tap) {
  return torch::stable::unsqueeze(widen(select(weight, 0, tap)), 2);
}

Tensor forward(const Tensor& x, const Tensor& weight, int64_t dilation) {
  const Problem p(x, weight.sizes(), dilation);
  check_alike(weight, x, "weight");
  const Tensor image = padded(x, p);
  Tensor sum = multiply(shifted(image, p, 0), tap_weights(weight, 0));
  for (int64_t tap = 1; tap < p.k * p.k; ++tap)
    sum = add(sum, multiply(shifted(image, p, tap), tap_weights(weight, tap)));
  Tensor out = make_like(x);
  Tensor target = grouped(out, p);
  copy_(target, sum);
  return out;
}

Tensor grad_input_into(Tensor out, const Tensor& grad, const Tensor& weight, int64_t dilation) {
  const Problem p(grad, weight.sizes(), dilation);
  check_alike(weight, grad, "weight");
  const Tensor gradient = grouped(widen(grad), p);
  Tensor sum = padded(grad, p);  // for its shape and type
  torch::stable::zero_(sum);
  for (int64_t tap = 0; tap < p.k * p.k; ++tap) {
    Tensor target = shifted(sum, p, tap);
    copy_(target, add(target, multiply(gradient, tap_weights(weight, tap))));
  }
  Tensor target = grouped(out, p);
  Tensor rows = narrow(sum, 3, p.down.before, p.H);
  copy_(target, narrow(rows, 4, p.across.before, p.W));
  return out;
}

Tensor grad_input(const Tensor& grad, const Tensor& weight, int64_t dilation) {
  return grad_input_into(make_like(grad), grad, weight, dilation);
}

Tensor grad_weight_into(Tensor out, const Tensor& grad, const Tensor& x, int64_t dilation) {
  const Problem p(x, out.sizes(), dilation);
  check_alike(grad, x, "grad");
  check_same_sizes(grad, x, "grad");
  const Tensor gradient = grouped(widen(grad), p), image = padded(x, p);
  const std::array<int64_t, 1> channels{2};
  for (int64_t tap = 0; tap < p.k * p.k; ++tap) {
    Tensor target = select(out, 0, tap);
    copy_(target, torch::stable::sum(multiply(gradient, shifted(image, p, tap)),
                                     torch::headeronly::IntHeaderOnlyArrayRef(channels)));
  }
  return out;
}

Tensor grad_weight(const Tensor& grad, const Tensor& x, std::vector<int64_t> size,
                   std::vector<int64_t> stride, int64_t dilation) {
  return grad_weight_into(make_strided(x, size, stride), grad, x, dilation);
}

std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                    int64_t dilation) {
  check_backward(grad, x, weight);
  return {grad_input_into(make_like(x), grad, weight, dilation),
          grad_weight_into(make_like(weight), grad, x, dilation)};
}

}  // namespace
}  // namespace hoconv::high_order::conv2d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("high_order_conv2d.cpp", TORCH_BOX(&hoconv::high_order::conv2d::forward));
  m.impl("high_order_conv2d_backward.cpp", TORCH_BOX(&hoconv::high_order::conv2d::backward));
  m.impl("high_order_conv2d_grad_input.cpp", TORCH_BOX(&hoconv::high_order::conv2d::grad_input));
  m.impl("high_order_conv2d_grad_weight.cpp", TORCH_BOX(&hoconv::high_order::conv2d::grad_weight));
}
