// The sizes and strides of a call of the high-order convolution, taken from its tensors and
// checked.
//
// B batch, C channels, G groups of channels, H height, W width, k kernel size.
#pragma once

#include <algorithm>
#include <cstdint>

#include "high_order/image.h"
#include "hoconv/tensor.h"

namespace hoconv::high_order::conv2d {

// Element strides of the weights (k * k, B, G, H, W).
struct WeightStrides {
  int64_t tap, b, g, h, w;
};

inline WeightStrides weight_strides(const Tensor& t) {
  return {t.stride(0), t.stride(1), t.stride(2), t.stride(3), t.stride(4)};
}

// The taps along an axis of an image: the distance between two, and how many zeros pad both ends.
struct Axis {
  int64_t dilation, before, after;

  // A dilation of 2 * size or more gives the same result as 2 * size: all taps but the centre read
  // zeros.
  static Axis of(int64_t dilation, int64_t size, int64_t k) {
    dilation = std::min(dilation, 2 * size);
    const int64_t before = dilation * (k - 1) / 2;
    return {dilation, before, dilation * (k - 1) - before};
  }
  int64_t reach() const { return before + after; }  // from the first tap to the last
};

struct Problem {
  int64_t B, C, G, H, W, k;
  Axis down, across;

  int64_t group_channels() const { return C / G; }

  // `image` is x or the output's gradient; `weight` are the sizes of the weights (k * k, B, G, H,
  // W).
  template <typename Sizes>
  Problem(const Tensor& image, const Sizes& weight, int64_t dilation) {
    STD_TORCH_CHECK(image.dim() == 4, "x: expected 4 dimensions (B, C, H, W), got ", image.dim());
    STD_TORCH_CHECK(weight.size() == 5, "weight: expected 5 dimensions (k * k, B, G, H, W), got ",
                    weight.size());
    check_floating(image, "x");
    B = image.size(0), C = image.size(1), H = image.size(2), W = image.size(3);
    G = weight[2];
    STD_TORCH_CHECK(weight[1] == B && weight[3] == H && weight[4] == W,
                    "weight: expected the batch, height and width of x");
    STD_TORCH_CHECK(G >= 1 && C % G == 0, "weight: its groups must divide the channels, ", C,
                    "; got ", G);
    for (k = 1; k * k < weight[0]; ++k) {
    }
    STD_TORCH_CHECK(k * k == weight[0] && k <= 11,
                    "weight: its first dimension must be k * k for k from 1 to 11, got ",
                    weight[0]);
    STD_TORCH_CHECK(dilation >= 1, "dilation: expected at least 1, got ", dilation);
    down = Axis::of(dilation, H, k), across = Axis::of(dilation, W, k);
  }
};

inline void check_backward(const Tensor& grad, const Tensor& x, const Tensor& weight) {
  check_alike(grad, x, "grad");
  check_alike(weight, x, "weight");
  check_same_sizes(grad, x, "grad");
}

}  // namespace hoconv::high_order::conv2d
