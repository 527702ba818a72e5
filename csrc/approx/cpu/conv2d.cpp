// The approximate convolution and its two gradients as matrix products over images, which are
// padded if necessary. The offset of a window's element is the sum of an offset of its pixel and
// one of its tap.
//
// B batch, C channels of the input, O of the output, G groups, H x W pixels of the input, OH x OW
// of the output, R x S the kernel.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>
#include <vector>

#include "approx/cpu/gemm.h"
#include "approx/problem.h"

namespace hoconv::approx {
namespace {

// Images (B, channels, height, width) of any strides, so large that no window leaves them.
struct Images {
  const float* data;
  int64_t strides[4];
  std::vector<float> storage;  // of a padded copy

  Images(const Tensor& t) : data(static_cast<const float*>(t.const_data_ptr())) {
    for (int i = 0; i < 4; ++i) strides[i] = t.stride(i);
  }
  Images(int64_t batch, int64_t channels, int64_t height, int64_t width, float value)
      : strides{channels * height * width, height * width, width, 1},
        storage(batch * channels * height * width, value) {
    data = storage.data();
  }
};

// x padded with zeros.
Images padded(const Conv2d& p, const Tensor& x) {
  if (p.padding[0] == 0 && p.padding[1] == 0) return Images(x);
  const Images from(x);
  const int64_t height = p.H + 2 * p.padding[0], width = p.W + 2 * p.padding[1];
  Images to(p.B, p.C, height, width, 0.0f);
  torch::stable::parallel_for(0, p.B * p.C, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* source = from.data + i / p.C * from.strides[0] + i % p.C * from.strides[1];
      float* target = to.storage.data() + i * to.strides[1] + p.padding[0] * width + p.padding[1];
      for (int64_t h = 0; h < p.H; ++h)
        for (int64_t w = 0; w < p.W; ++w)
          target[h * width + w] = source[h * from.strides[2] + w * from.strides[3]];
    }
  });
  return to;
}

// The output's gradient as the transposed convolution reads it: its pixels are `stride` apart, and
// around them is a border, so that every tap of every pixel of x reads an element. Elements that
// belong to no output are marked as left out.
Images spread(const Conv2d& p, const Tensor& grad) {
  const Images from(grad);
  const int64_t height = p.H + p.dilation[0] * (p.R - 1), width = p.W + p.dilation[1] * (p.S - 1);
  Images to(p.B, p.O, height, width, -0.0f);
  // The position of the first output; negative where the padding is wider than the kernel.
  const int64_t top = p.dilation[0] * (p.R - 1) - p.padding[0];
  const int64_t left = p.dilation[1] * (p.S - 1) - p.padding[1];
  torch::stable::parallel_for(0, p.B * p.O, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* source = from.data + i / p.O * from.strides[0] + i % p.O * from.strides[1];
      float* target = to.storage.data() + i * to.strides[1];
      for (int64_t h = 0; h < p.OH; ++h) {
        const int64_t y = top + h * p.stride[0];
        if (y < 0 || y >= height) continue;
        for (int64_t w = 0; w < p.OW; ++w) {
          const int64_t x = left + w * p.stride[1];
          if (x < 0 || x >= width) continue;
          const float value = source[h * from.strides[2] + w * from.strides[3]];
          target[y * width + x] = value == 0 ? 0.0f : value;  // no negative zero
        }
      }
    }
  });
  return to;
}

// The offsets of the windows' first elements (B, OH, OW), and of a window's elements from there (C
// / G, R, S).
Ints pixels(const Conv2d& p, const Images& x) {
  return nested(p.B, x.strides[0], p.OH, p.stride[0] * x.strides[2], p.OW,
                p.stride[1] * x.strides[3]);
}
Ints taps(const Conv2d& p, const Images& x) {
  return nested(p.in_channels(), x.strides[1], p.R, p.dilation[0] * x.strides[2], p.S,
                p.dilation[1] * x.strides[3]);
}

Ints groups_of_x(const Conv2d& p, const Images& x) {
  return steps(p.G, p.in_channels() * x.strides[1]);
}
Ints groups_of_out(const Conv2d& p, const Tensor& t) {
  return steps(p.G, p.out_channels() * t.stride(1));
}
Ints groups_of_weight(const Conv2d& p, const Tensor& t) {
  return steps(p.G, p.out_channels() * t.stride(0));
}
// (B, height, width) of an image
Ints positions(const Tensor& t) {
  return nested(t.size(0), t.stride(0), t.size(2), t.stride(2), t.size(3), t.stride(3));
}

Tensor forward(const Tensor& x, const Tensor& weight, Ints stride, Ints padding, Ints dilation,
               int64_t groups, std::string multiplier, std::optional<Tensor> entries) {
  const Conv2d p(sizes(x), sizes(weight), stride, padding, dilation, groups);
  check_float(x, "x");
  check_alike(weight, x, "weight");
  Tensor out = make_tensor(x, {p.B, p.O, p.OH, p.OW});
  const Images image = padded(p, x);
  const auto* w = static_cast<const float*>(weight.const_data_ptr());
  gemm({multiplier, entries}, x,
       {image.data, groups_of_x(p, image), pixels(p, image), taps(p, image)},
       {w, groups_of_weight(p, weight), steps(p.out_channels(), weight.stride(0)),
        nested(p.in_channels(), weight.stride(1), p.R, weight.stride(2), p.S, weight.stride(3))},
       {static_cast<float*>(out.data_ptr()), groups_of_out(p, out), positions(out),
        steps(p.out_channels(), out.stride(1))});
  return out;
}

Tensor backward_input(const Tensor& grad, const Tensor& weight, Ints size, Ints stride,
                      Ints padding, Ints dilation, int64_t groups, std::string multiplier,
                      std::optional<Tensor> entries) {
  const Conv2d p(size, sizes(weight), stride, padding, dilation, groups);
  check_float(grad, "grad");
  check_alike(weight, grad, "weight");
  p.check_grad(grad);
  Tensor out = make_tensor(grad, {p.B, p.C, p.H, p.W});
  const Images image = spread(p, grad);
  const Ints s{image.strides[0], image.strides[1], image.strides[2], image.strides[3]};
  const auto* w = static_cast<const float*>(weight.const_data_ptr());
  // The first tap reads the last element of a window.
  const int64_t last = (p.R - 1) * p.dilation[0] * s[2] + (p.S - 1) * p.dilation[1] * s[3];
  gemm(
      {multiplier, entries}, grad,
      {image.data, steps(p.G, p.out_channels() * s[1]), nested(p.B, s[0], p.H, s[2], p.W, s[3]),
       nested(p.out_channels(), s[1], p.R, -p.dilation[0] * s[2], p.S, -p.dilation[1] * s[3], last),
       /*gaps=*/true},
      {w, groups_of_weight(p, weight), steps(p.in_channels(), weight.stride(1)),
       nested(p.out_channels(), weight.stride(0), p.R, weight.stride(2), p.S, weight.stride(3))},
      {static_cast<float*>(out.data_ptr()), steps(p.G, p.in_channels() * out.stride(1)),
       positions(out), steps(p.in_channels(), out.stride(1))});
  return out;
}

Tensor backward_weight(const Tensor& grad, const Tensor& x, Ints size, Ints stride, Ints padding,
                       Ints dilation, int64_t groups, std::string multiplier,
                       std::optional<Tensor> entries) {
  const Conv2d p(sizes(x), size, stride, padding, dilation, groups);
  check_float(grad, "grad");
  check_alike(x, grad, "x");
  p.check_grad(grad);
  Tensor out = make_tensor(x, {p.O, p.in_channels(), p.R, p.S});
  const Images image = padded(p, x);
  const auto* g = static_cast<const float*>(grad.const_data_ptr());
  gemm({multiplier, entries}, grad,
       {g, groups_of_out(p, grad), steps(p.out_channels(), grad.stride(1)), positions(grad)},
       {image.data, groups_of_x(p, image), taps(p, image), pixels(p, image)},
       {static_cast<float*>(out.data_ptr()), groups_of_weight(p, out),
        steps(p.out_channels(), out.stride(0)), steps(p.in_channels() * p.R * p.S, 1)});
  return out;
}

}  // namespace
}  // namespace hoconv::approx

STABLE_TORCH_LIBRARY_IMPL(hoconv, CPU, m) {
  m.impl("approx_conv2d.cpp", TORCH_BOX(&hoconv::approx::forward));
  m.impl("approx_conv2d_backward_input.cpp", TORCH_BOX(&hoconv::approx::backward_input));
  m.impl("approx_conv2d_backward_weight.cpp", TORCH_BOX(&hoconv::approx::backward_weight));
}
