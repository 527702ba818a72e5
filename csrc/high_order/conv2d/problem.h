// The sizes and strides of a call of the high-order convolution, taken from its tensors and
// checked.
//
// B batch, C channels, G groups of channels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "high_order/image.h"
#include "hoconv/tensor.h"

namespace hoconv::high_order::conv2d {

constexpr int64_t kMostTaps = 31;  // along an axis

// Element strides of the weights (taps, B, G, output height, output width).
struct WeightStrides {
  int64_t tap, b, g, h, w;
};

inline WeightStrides weight_strides(const Tensor& t) {
  return {t.stride(0), t.stride(1), t.stride(2), t.stride(3), t.stride(4)};
}

// What a tap reads outside the image. Valid: no tap is outside.
enum class Padding : int64_t { zeros, valid, replicate, reflect };

// The window along an axis of an image: output pixel o reads, by tap i, the pixel at
// o / scale * stride + i * dilation - before.
struct Axis {
  int64_t in, out;  // pixels of x and of the output
  int64_t taps, dilation, stride, scale, before;
  Padding padding;

  // Pixels from a tap to the next; 1 where there is none, whatever the dilation.
  int64_t step() const { return taps > 1 ? dilation : 1; }
  int64_t reach() const { return dilation * (taps - 1); }  // from the first tap to the last
  int64_t after() const { return padding == Padding::valid ? 0 : reach() - before; }
  bool is_dense() const { return stride == 1 && scale == 1; }  // neighbours read neighbours
  bool repeats() const { return padding > Padding::valid; }    // outside, not zeros
  bool is_plain() const { return is_dense() && !repeats(); }

  // The pixel that tap i of output pixel o reads; -1 if that is a zero.
  int64_t source(int64_t o, int64_t i) const {
    return pixel_at(o / scale * stride + i * dilation - before);
  }
  int64_t pixel_at(int64_t position) const {
    if (position >= 0 && position < in) return position;
    if (padding == Padding::replicate) return position < 0 ? 0 : in - 1;
    if (padding == Padding::reflect) return position < 0 ? -position : 2 * (in - 1) - position;
    return -1;
  }
};

// The windows of a call, as its ops take them: nine ints, those of an axis before those of the
// next.
struct Window {
  int64_t taps[2], dilation[2], stride[2], scale[2];
  Padding padding;

  explicit Window(const std::vector<int64_t>& options) {
    STD_TORCH_CHECK(options.size() == 9, "window: expected 9 numbers, got ", options.size());
    for (int i = 0; i < 2; ++i) {
      taps[i] = options[i], dilation[i] = options[2 + i], stride[i] = options[4 + i],
      scale[i] = options[6 + i];
      STD_TORCH_CHECK(taps[i] >= 1 && taps[i] <= kMostTaps, "kernel_size: expected 1 to ",
                      kMostTaps, ", got ", taps[i]);
      STD_TORCH_CHECK(dilation[i] >= 1, "dilation: expected at least 1, got ", dilation[i]);
      STD_TORCH_CHECK(stride[i] >= 1, "stride: expected at least 1, got ", stride[i]);
      STD_TORCH_CHECK(scale[i] >= 1, "scale: expected at least 1, got ", scale[i]);
    }
    STD_TORCH_CHECK(options[8] >= 0 && options[8] <= int64_t(Padding::reflect),
                    "padding: expected 0 to ", int64_t(Padding::reflect), ", got ", options[8]);
    padding = Padding{options[8]};
  }

  // Whether an output is as large as x, whatever that is.
  bool keeps_size() const {
    return stride[0] == 1 && stride[1] == 1 && scale[0] == 1 && scale[1] == 1 &&
           padding != Padding::valid;
  }

  // The axis of an image of `in` pixels, of which `out` are computed.
  Axis along(int axis, int64_t in, int64_t out) const {
    Axis a{in, out, taps[axis], dilation[axis], stride[axis], scale[axis], 0, padding};
    // All taps but the middle one of a dilation that is larger read outside.
    if (padding != Padding::valid) a.dilation = std::min(a.dilation, 2 * in);
    STD_TORCH_CHECK(a.taps == 1 || a.dilation <= (int64_t{1} << 62) / kMostTaps,
                    "dilation: expected a number that fits the image, got ", a.dilation);
    if (padding != Padding::valid) a.before = a.reach() / 2;
    const int64_t span = padding == Padding::valid ? in - a.reach() : in;
    STD_TORCH_CHECK(span >= (in > 0 ? 1 : 0), "x: expected at least ", a.reach() + 1,
                    " pixels for padding='valid', got ", in);
    STD_TORCH_CHECK(padding != Padding::reflect || a.after() < std::max<int64_t>(in, 1),
                    "x: expected more than ", a.after(), " pixels for padding='reflect', got ", in);
    // As often as the stride fits, and for every fraction of a pixel.
    const int64_t computed = (span / a.stride + (span % a.stride ? 1 : 0)) * a.scale;
    STD_TORCH_CHECK(out == computed, "weight: expected ", computed, " pixels for ", in,
                    " of x, got ", out);
    a.stride = std::min(a.stride, std::max<int64_t>(in, 1));
    return a;
  }
};

struct Problem {
  int64_t B, C, G;
  Axis down, across;
  bool keeps_size;

  int64_t group_channels() const { return C / G; }
  int64_t taps() const { return down.taps * across.taps; }
  bool is_dense() const { return down.is_dense() && across.is_dense(); }
  bool repeats() const { return down.repeats(); }  // as across
  bool is_plain() const { return is_dense() && !repeats(); }

  // Sizes of x (B, C, height, width), and of the weights (taps, B, G, output height and width).
  template <typename ImageSizes, typename WeightSizes>
  Problem(const ImageSizes& x, const WeightSizes& weight, const Window& window) {
    STD_TORCH_CHECK(x.size() == 4, "x: expected 4 dimensions (B, C, H, W), got ", x.size());
    STD_TORCH_CHECK(weight.size() == 5, "weight: expected 5 dimensions (taps, B, G, H, W), got ",
                    weight.size());
    B = x[0], C = x[1], G = weight[2], keeps_size = window.keeps_size();
    STD_TORCH_CHECK(weight[1] == B, "weight: expected the batch of x");
    STD_TORCH_CHECK(G >= 1 && C % G == 0, "weight: its groups must divide the channels, ", C,
                    "; got ", G);
    down = window.along(0, x[2], weight[3]), across = window.along(1, x[3], weight[4]);
    STD_TORCH_CHECK(weight[0] == taps(), "weight: its first dimension must be the ", taps(),
                    " taps of the window, got ", weight[0]);
  }
};

inline Tensor make_channels_last(const Tensor& like, const std::vector<int64_t>& sizes) {
  const auto strides = contiguous_strides({sizes[0], sizes[2], sizes[3], sizes[1]});
  return make_strided(like, sizes, {strides[0], strides[3], strides[1], strides[2]});
}

// The output of a problem, or its gradient, in memory as x is.
inline std::vector<int64_t> output_sizes(const Problem& p) {
  return {p.B, p.C, p.down.out, p.across.out};
}

inline Tensor make_output(const Tensor& x, const Problem& p) {
  if (p.keeps_size) return make_like(x);
  const std::vector<int64_t> sizes = output_sizes(p);
  return channels_last(x) ? make_channels_last(x, sizes) : make_tensor(x, sizes);
}

// Checks the gradient of a problem's output, beside x or the weights.
inline void check_gradient(const Tensor& grad, const Tensor& like, const Problem& p) {
  check_floating(grad, "grad");
  check_alike(grad, like, "grad");
  const std::vector<int64_t> sizes = output_sizes(p);
  STD_TORCH_CHECK(grad.dim() == 4 && std::equal(sizes.begin(), sizes.end(), grad.sizes().begin()),
                  "grad: expected the shape of the output");
}

}  // namespace hoconv::high_order::conv2d
