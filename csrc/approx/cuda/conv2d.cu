// The approximate convolution and its two gradients as matrix products of views: see gemm.cu.
//
// B batch, C channels of the input, O of the output, G groups, H x W pixels of the input, OH x OW
// of the output, R x S the kernel.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>

#include "approx/cuda/view.cuh"
#include "approx/problem.h"

namespace hoconv::approx {
namespace {

const float* data(const Tensor& t) { return static_cast<const float*>(t.const_data_ptr()); }

void check_sizes(const Conv2d& p) {
  for (const int64_t size : {p.H + 2 * p.padding[0], p.W + 2 * p.padding[1], p.OH, p.OW,
                             p.R * p.dilation[0], p.S * p.dilation[1], p.stride[0], p.stride[1]})
    STD_TORCH_CHECK(size < kFar / 4,
                    "height, width, kernel, stride, padding and dilation: expected "
                    "less than 2^28");
}

// A view of images or of a weight; `channels` channels of dimension `split` belong to a group.
View view(const Tensor& t, int split, int64_t channels, const IndexMap& row,
          const IndexMap& column) {
  return {data(t),
          span(t),
          channels * t.stride(split),
          t.stride(2),
          t.stride(3),
          static_cast<int>(t.size(2)),
          static_cast<int>(t.size(3)),
          1,
          1,
          row,
          column,
          false,
          false};
}
IndexMap channel(const Tensor& t, int dimension) { return {Digits(1, 1), t.stride(dimension)}; }

// A view of a weight: its rows are the channels of one side, its columns (C / G, R, S) or (O / G,
// R, S) of the other.
View weights(const Conv2d& p, const Tensor& weight, int rows, int columns) {
  View kernels = view(weight, 0, p.out_channels(), channel(weight, rows),
                      {Digits(p.R, p.S), weight.stride(columns), 1, 1});
  kernels.along_columns = true;
  return kernels;
}

// The windows of x: their pixels (B, OH, OW) as one index, their elements (C / G, R, S) as the
// other.
IndexMap pixels(const Conv2d& p, const Tensor& x) {
  return {Digits(p.OH, p.OW),
          x.stride(0),
          static_cast<int>(p.stride[0]),
          static_cast<int>(p.stride[1]),
          -static_cast<int>(p.padding[0]),
          -static_cast<int>(p.padding[1])};
}
IndexMap elements(const Conv2d& p, const Tensor& x) {
  return {Digits(p.R, p.S), x.stride(1), static_cast<int>(p.dilation[0]),
          static_cast<int>(p.dilation[1])};
}

// Rows of the result are pixels of images (B, H, W), columns their channels.
Target images(Tensor& out, int64_t channels) {
  return {static_cast<float*>(out.mutable_data_ptr()),
          channels * out.stride(1),
          Digits(out.size(2), out.size(3)),
          Digits(1, 1),
          {out.stride(0), out.stride(2), out.stride(3)},
          {out.stride(1), 0, 0}};
}

Tensor forward(Tensor x, Tensor weight, Ints stride, Ints padding, Ints dilation, int64_t groups,
               std::string multiplier, std::optional<Tensor> entries) {
  const Conv2d p(sizes(x), sizes(weight), stride, padding, dilation, groups);
  check_float(x, "x");
  check_alike(weight, x, "weight");
  check_sizes(p);
  x = compact(x), weight = compact(weight);
  Tensor out = make_tensor(x, {p.B, p.O, p.OH, p.OW});
  const Launch launch(x);
  gemm({multiplier, entries},
       {view(x, 1, p.in_channels(), pixels(p, x), elements(p, x)), weights(p, weight, 0, 1),
        images(out, p.out_channels()), p.G, p.B * p.OH * p.OW, p.out_channels(),
        p.in_channels() * p.R * p.S},
       x, launch.stream);
  return out;
}

Tensor backward_input(Tensor grad, Tensor weight, Ints size, Ints stride, Ints padding,
                      Ints dilation, int64_t groups, std::string multiplier,
                      std::optional<Tensor> entries) {
  const Conv2d p(size, sizes(weight), stride, padding, dilation, groups);
  check_float(grad, "grad");
  check_alike(weight, grad, "weight");
  p.check_grad(grad);
  check_sizes(p);
  grad = compact(grad), weight = compact(weight);
  Tensor out = make_tensor(grad, {p.B, p.C, p.H, p.W});
  const Launch launch(grad);
  // A pixel of x (B, H, W) and an element of the weight (O / G, R, S) have one output in common or
  // none; without one, the term is left out.
  View outputs = view(grad, 1, p.out_channels(),
                      {Digits(p.H, p.W), grad.stride(0), 1, 1, static_cast<int>(p.padding[0]),
                       static_cast<int>(p.padding[1])},
                      {Digits(p.R, p.S), grad.stride(1), -static_cast<int>(p.dilation[0]),
                       -static_cast<int>(p.dilation[1])});
  outputs.y_every = p.stride[0], outputs.x_every = p.stride[1];
  outputs.leaves_out = true;
  gemm({multiplier, entries},
       {outputs, weights(p, weight, 1, 0), images(out, p.in_channels()), p.G, p.B * p.H * p.W,
        p.in_channels(), p.out_channels() * p.R * p.S, true},
       grad, launch.stream);
  return out;
}

Tensor backward_weight(Tensor grad, Tensor x, Ints size, Ints stride, Ints padding, Ints dilation,
                       int64_t groups, std::string multiplier, std::optional<Tensor> entries) {
  const Conv2d p(sizes(x), size, stride, padding, dilation, groups);
  check_float(grad, "grad");
  check_alike(x, grad, "x");
  p.check_grad(grad);
  check_sizes(p);
  grad = compact(grad), x = compact(x);
  Tensor out = make_tensor(x, {p.O, p.in_channels(), p.R, p.S});
  const Launch launch(grad);
  View outputs =
      view(grad, 1, p.out_channels(), channel(grad, 1), {Digits(p.OH, p.OW), grad.stride(0), 1, 1});
  View windows = view(x, 1, p.in_channels(), elements(p, x), pixels(p, x));
  outputs.along_columns = windows.along_columns = true;
  gemm({multiplier, entries},
       {outputs,
        windows,
        {static_cast<float*>(out.mutable_data_ptr()),
         p.out_channels() * out.stride(0),
         Digits(1, 1),
         Digits(p.R, p.S),
         {out.stride(0), 0, 0},
         {out.stride(1), out.stride(2), out.stride(3)}},
        p.G,
        p.out_channels(),
        p.in_channels() * p.R * p.S,
        p.B * p.OH * p.OW},
       grad, launch.stream);
  return out;
}

}  // namespace
}  // namespace hoconv::approx

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("approx_conv2d.cuda", TORCH_BOX(&hoconv::approx::forward));
  m.impl("approx_conv2d_backward_input.cuda", TORCH_BOX(&hoconv::approx::backward_input));
  m.impl("approx_conv2d_backward_weight.cuda", TORCH_BOX(&hoconv::approx::backward_weight));
}
