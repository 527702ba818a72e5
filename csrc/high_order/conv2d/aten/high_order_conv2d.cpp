// The high-order convolution on a GPU as a composition of ATen operations, with hand-written
// gradients. It is part of the CPU library, since it needs no CUDA compiler.
//
// The image is padded once. What a tap reads of it for all output pixels is a strided view of
// (B, G, C / G, windows down, 1, windows across, 1); the output, its gradient and a tap's weights
// are views with the output pixels of a window, `scale`, in place of the ones.
//
// B batch, C channels, G groups of channels.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "high_order/conv2d/problem.h"
#include "hoconv/aten_ops.h"

namespace hoconv::high_order::conv2d {
namespace {

using torch::stable::copy_;
using torch::stable::narrow;

Tensor sum_over(const Tensor& t, const std::vector<int64_t>& dims) {
  return torch::stable::sum(t, torch::headeronly::IntHeaderOnlyArrayRef(dims), /*keepdim=*/true);
}

void add_to(Tensor target, const Tensor& t) { copy_(target, add(target, t)); }

// The pixels that padding adds to an axis. More than the image has are not needed: a tap that reads
// further out reads zeros, or a border's pixel, only.
struct Border {
  int64_t before, after;

  explicit Border(const Axis& a)
      : before(std::min(a.before, a.in)), after(std::min(a.after(), a.in)) {}

  // The pixel of the padded axis that tap i of the first window reads.
  int64_t first(const Axis& a, int64_t i) const {
    const int64_t position = i * a.dilation - a.before;
    return a.padding == Padding::valid ? position : std::clamp(position, -before, after) + before;
  }
};

// x, of float32 at least, with its borders.
Tensor padded(const Tensor& x, const Problem& p) {
  const Border down(p.down), across(p.across);
  const char* mode = p.down.padding == Padding::replicate ? "replicate"
                     : p.down.padding == Padding::reflect ? "reflect"
                                                          : "constant";
  return torch::stable::pad(widen(x), {across.before, across.after, down.before, down.after}, mode);
}

// What a tap reads of a padded image.
Tensor pixels(const Tensor& image, const Problem& p, int64_t tap) {
  const int64_t n = p.group_channels(), b = image.stride(0), c = image.stride(1);
  const int64_t h = image.stride(2), w = image.stride(3);
  const int64_t top = Border(p.down).first(p.down, tap / p.across.taps);
  const int64_t left = Border(p.across).first(p.across, tap % p.across.taps);
  return strided_view(
      image, {p.B, p.G, n, p.down.out / p.down.scale, 1, p.across.out / p.across.scale, 1},
      {b, n * c, c, p.down.stride * h, 0, p.across.stride * w, 0}, top * h + left * w);
}

// An output or its gradient by windows, or with n = 1 and c = 0 what its channels share.
Tensor by_window(const Tensor& t, const Problem& p, int64_t n, const WeightStrides& s, int64_t c,
                 int64_t first) {
  const Axis &down = p.down, &across = p.across;
  return strided_view(
      t, {p.B, p.G, n, down.out / down.scale, down.scale, across.out / across.scale, across.scale},
      {s.b, s.g, c, s.h * down.scale, s.h, s.w * across.scale, s.w}, first);
}

Tensor image_by_window(const Tensor& t, const Problem& p) {
  const int64_t n = p.group_channels(), c = t.stride(1);
  return by_window(t, p, n, {0, t.stride(0), n * c, t.stride(2), t.stride(3)}, c, 0);
}

Tensor weights_by_window(const Tensor& weight, const Problem& p, int64_t tap) {
  return by_window(weight, p, 1, weight_strides(weight), 0, tap * weight.stride(0));
}

Tensor forward(const Tensor& x, const Tensor& weight, std::vector<int64_t> window) {
  const Problem p(x.sizes(), weight.sizes(), Window(window));
  check_floating(x, "x");
  check_alike(weight, x, "weight");
  Tensor out = make_output(x, p);
  if (out.numel() == 0) return out;
  const Tensor image = padded(x, p);
  const auto product = [&](int64_t tap) {
    return multiply(pixels(image, p, tap), widen(weights_by_window(weight, p, tap)));
  };
  Tensor sum = product(0);
  for (int64_t tap = 1; tap < p.taps(); ++tap) sum = add(sum, product(tap));
  Tensor target = image_by_window(out, p);
  copy_(target, sum);
  return out;
}

// Adds what was summed for the padding of an axis, dimension `dim`, to the pixels that it repeats.
void fold(Tensor& padded, const Axis& a, int64_t dim) {
  const Border border(a);
  const int64_t first = border.before, end = border.before + a.in;
  const Tensor before = narrow(padded, dim, 0, border.before);
  const Tensor after = narrow(padded, dim, end, border.after);
  const std::vector<int64_t> dims{dim};
  if (a.padding == Padding::replicate) {
    add_to(narrow(padded, dim, first, 1), sum_over(before, dims));
    add_to(narrow(padded, dim, end - 1, 1), sum_over(after, dims));
  } else if (a.padding == Padding::reflect) {
    const auto flip = [&](const Tensor& t) { return call_aten("aten::flip", "", t, dims); };
    add_to(narrow(padded, dim, first + 1, border.before), flip(before));
    add_to(narrow(padded, dim, end - 1 - border.after, border.after), flip(after));
  }
}

Tensor grad_input_into(Tensor out, const Tensor& grad, const Tensor& weight, const Problem& p) {
  if (out.numel() == 0) return out;
  const Tensor gradient = widen(image_by_window(grad, p));
  const Border down(p.down), across(p.across);
  Tensor sum = make_tensor(
      grad,
      {p.B, p.C, down.before + p.down.in + down.after, across.before + p.across.in + across.after},
      gradient.scalar_type());
  torch::stable::zero_(sum);
  for (int64_t tap = 0; tap < p.taps(); ++tap) {
    const Tensor product = multiply(gradient, widen(weights_by_window(weight, p, tap)));
    const bool shared = p.down.scale > 1 || p.across.scale > 1;  // windows, by output pixels
    add_to(pixels(sum, p, tap), shared ? sum_over(product, {4, 6}) : product);
  }
  fold(sum, p.down, 2);
  fold(sum, p.across, 3);
  Tensor rows = narrow(sum, 2, down.before, p.down.in);
  copy_(out, narrow(rows, 3, across.before, p.across.in));
  return out;
}

Tensor grad_input(const Tensor& grad, const Tensor& weight, std::vector<int64_t> size,
                  std::vector<int64_t> stride, std::vector<int64_t> window) {
  const Problem p(size, weight.sizes(), Window(window));
  check_gradient(grad, weight, p);
  return grad_input_into(make_strided(grad, size, stride), grad, weight, p);
}

Tensor grad_weight_into(Tensor out, const Tensor& grad, const Tensor& x, const Problem& p) {
  if (x.numel() == 0) return torch::stable::zero_(out);  // sums of no channels
  const Tensor gradient = widen(image_by_window(grad, p)), image = padded(x, p);
  for (int64_t tap = 0; tap < p.taps(); ++tap) {
    Tensor target = weights_by_window(out, p, tap);
    copy_(target, sum_over(multiply(gradient, pixels(image, p, tap)), {2}));
  }
  return out;
}

Tensor grad_weight(const Tensor& grad, const Tensor& x, std::vector<int64_t> size,
                   std::vector<int64_t> stride, std::vector<int64_t> window) {
  const Problem p(x.sizes(), size, Window(window));
  check_floating(x, "x");
  check_gradient(grad, x, p);
  return grad_weight_into(make_strided(x, size, stride), grad, x, p);
}

std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                    std::vector<int64_t> window) {
  const Problem p(x.sizes(), weight.sizes(), Window(window));
  check_floating(x, "x");
  check_alike(weight, x, "weight");
  check_gradient(grad, x, p);
  return {grad_input_into(make_like(x), grad, weight, p),
          grad_weight_into(make_like(weight), grad, x, p)};
}

}  // namespace
}  // namespace hoconv::high_order::conv2d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("high_order_conv2d.cpp", TORCH_BOX(&hoconv::high_order::conv2d::forward));
  m.impl("high_order_conv2d_backward.cpp", TORCH_BOX(&hoconv::high_order::conv2d::backward));
  m.impl("high_order_conv2d_grad_input.cpp", TORCH_BOX(&hoconv::high_order::conv2d::grad_input));
  m.impl("high_order_conv2d_grad_weight.cpp", TORCH_BOX(&hoconv::high_order::conv2d::grad_weight));
}
