// The high-order layer on the CPU. The weights are never written to memory in full: forward.cpp and
// backward.cpp generate them row by row, in the buffers of a thread that are here.
//
// The forward pass takes a row of the image at a time: it generates the weights, replaces them by
// their softmax if asked to, and applies them. The backward pass generates them again and computes
// their gradient for the same row. With both it adds to all rows of x's gradient that the pixels of
// the row reach, so that a row of weights, or of their gradient, is needed once. Only the weights'
// gradients are kept, for a strip of a few rows that fits the L1 cache, over which the parameters'
// gradient is summed pixel by pixel. Each task has a sum of its own. Tasks do not depend on the
// number of threads, so neither does the result.
//
// A pixel and group cost four times K * C * s * s multiplications: to generate in the forward and
// in the backward pass, for x's gradient, and for the parameters' gradient. All else is a few per
// cent. Each of the four is a block of sums in registers, with as many sums as keep both
// multipliers of a core busy, and reaches nine tenths of the peak of those. Registers of 64 bytes
// are no faster.
//
// At the left and right edge, x's gradient is NaN where any of the generator's weights is not
// finite, even one that does not reach that pixel: it is multiplied by zeros there.
//
// B batch, C channels, G groups of channels, H height, W width, k kernel size, K = k * k taps,
// s kernel size of the generator.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>

#include "high_order/conv2d/problem.h"
#include "high_order/layer/cpu/kernels.h"
#include "high_order/layer/cpu/layer.h"
#include "high_order/padded_image.h"

namespace hoconv::high_order::layer::cpu {

// Bytes of a strip that a block of sums reads: they fit the L1 cache.
constexpr int64_t kStripBytes = int64_t{1} << 15;

template <typename T>
struct Image {
  T* data;
  ImageStrides s;

  explicit Image(const Tensor& t)
      : data(static_cast<T*>(const_cast<void*>(t.const_data_ptr()))), s(image_strides(t)) {}
  T* first_row(int64_t b) const { return data + b * s.b; }
  T* row(int64_t b, int64_t c, int64_t h) const { return first_row(b) + c * s.c + h * s.h; }
};

// The buffers of a thread.
template <typename T>
struct Worker {
  using A = acc_t<T>;
  using V = Vec<A>;

  const Layer& p;
  const Parameters<A>& parameters;
  const int64_t rows;        // of a strip
  PaddedImage<T> x;          // a strip with its halo
  PaddedRows<A> weight_row;  // a row of one group's weights

  Worker(const Layer& p, const Parameters<A>& parameters)
      : p(p),
        parameters(parameters),
        rows(strip_rows(p)),
        x(p.C, rows + p.top + p.bottom, p.W, p.left, p.right),
        weight_row(p.K, 1, p.W, round_up(p.right, V::size), p.left) {}

  static int64_t strip_rows(const Layer& p) {
    const int64_t columns = std::max<int64_t>(p.W + p.left + p.right, 1);
    const int64_t row = columns * sizeof(A) * (kTapBlock + 1);
    return std::clamp<int64_t>(kStripBytes / row, 1, std::max<int64_t>(p.H, 1));
  }

  void load_x(const Image<const T>& image, int64_t b, int64_t first, int64_t count) {
    x.fill(image.first_row(b), image.s, first - p.top, count + p.top + p.bottom, p.H, p.W);
  }

  // Channel c of x, `up` rows above row r of the strip and `left` columns to the left.
  const A* seen(int64_t c, int64_t r, int64_t up, int64_t left) const {
    return x.row(c, r + p.top - up) + x.left - left;
  }

  // Generates the weights of group g for row r of the strip.
  void generate(int64_t g, int64_t r) {
    Window window = parameters.generator;
    window.next_plane = x.plane(), window.next_line = x.width;
    A* out = weight_row.row(0, 0) + weight_row.left;
    convolve(out, weight_row.plane(), p.K, p.registers, parameters.bias.data() + g * p.K,
             seen(0, r, p.generator_before, p.generator_before), window,
             parameters.weight.data() + g * p.K * window.size());
    if (p.softmax) softmax(out, weight_row.plane(), p.K, p.registers);
  }
};

template <typename T>
Parameters<acc_t<T>> load_parameters(const Layer& p, const Tensor& weight,
                                     const std::optional<Tensor>& bias, bool backward) {
  const Image<const T> w(weight);
  const T* b = bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr;
  return {p, w.data, w.s, b, bias ? bias->stride(0) : 0, backward};
}

}  // namespace hoconv::high_order::layer::cpu
