// The layer that generates its weights by a linear map of each step: ATen operations around the
// maps of one implementation, forward and backward. In a small call, to go from one operation to
// the next through Python would take longer than the operations.
//
// B batch, C channels, H heads, K taps, T time steps.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "dynamic_conv1d/problem.h"
#include "hoconv/aten_ops.h"

namespace hoconv::dynamic_conv1d {

using Map = Tensor (*)(const Tensor&, const Tensor&, int64_t padding);
using GradWeight = Tensor (*)(const Tensor& grad, const Tensor& x, std::vector<int64_t> size,
                              std::vector<int64_t> stride, int64_t padding);

// (B, C, T) as (B, T, C), and back: a view
inline Tensor transposed(const Tensor& t) {
  return strided_view(t, {t.size(0), t.size(2), t.size(1)},
                      {t.stride(0), t.stride(2), t.stride(1)});
}

// A matrix (M, N) as (N, M): a view
inline Tensor turned(const Tensor& t) {
  return strided_view(t, {t.size(1), t.size(0)}, {t.stride(1), t.stride(0)});
}

// (B, H, K, T) as (B, T, H, K): a view
inline Tensor by_step(const Tensor& t) {
  return strided_view(t, {t.size(0), t.size(3), t.size(1), t.size(2)},
                      {t.stride(0), t.stride(3), t.stride(1), t.stride(2)});
}

// (B, T, H, K) as (B, H, K, T): a view
inline Tensor by_head(const Tensor& t) {
  return strided_view(t, {t.size(0), t.size(2), t.size(3), t.size(1)},
                      {t.stride(0), t.stride(2), t.stride(3), t.stride(1)});
}

// (B, T, N) or (B, T, H, K) as rows (B * T, N) or (B * T, H * K): a view, where the memory allows
// it
inline Tensor as_rows(const Tensor& t) {
  const int64_t rows = t.size(0) * t.size(1), last = t.dim() - 1;
  const int64_t columns = last == 2 ? t.size(2) : t.size(2) * t.size(3);
  const bool one_stride_of_rows = t.size(0) == 1 || t.stride(0) == t.size(1) * t.stride(1);
  const bool one_stride_of_columns = last == 2 || t.stride(2) == t.size(3) * t.stride(3);
  if (one_stride_of_rows && one_stride_of_columns)
    return strided_view(t, {rows, columns}, {t.stride(1), t.stride(last)});
  return torch::stable::reshape(t, {rows, columns});
}

// A matrix (M, N) as B of them: a view
inline Tensor repeated(const Tensor& matrix, int64_t B) {
  return strided_view(matrix, {B, matrix.size(0), matrix.size(1)},
                      {0, matrix.stride(0), matrix.stride(1)});
}

// Returns what the linear map gives, (B, H, K, T).
inline Tensor generate(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                       int64_t heads) {
  const int64_t B = x.size(0), T = x.size(2), K = weight.size(0) / heads;
  if (x.is_cuda()) {
    // A product of two matrices: of more dimensions, ATen takes longer to find out that it is one.
    const Tensor rows = as_rows(transposed(x));
    const Tensor generated =
        bias.has_value() ? linear(rows, weight, bias) : matrix_product(rows, turned(weight));
    const std::vector<int64_t> sizes{B, T, heads, K};
    return by_head(strided_view(generated, sizes, contiguous_strides(sizes)));
  }
  // On a CPU, a product that has the steps of all sequences as rows is slower, since it copies x.
  Tensor generated = batched_product(repeated(weight, B), x);
  if (bias.has_value()) generated = add(generated, torch::stable::view(*bias, {heads * K, 1}));
  return torch::stable::view(generated, {B, heads, K, T});
}

// On a GPU, a softmax over any dimension but the last begins with a copy, which is a kernel of its
// own. On a CPU, the one over the last dimension is slower.
inline Tensor normalize(const Tensor& logits) {
  return logits.is_cuda() ? by_head(softmax(by_step(logits), 3)) : softmax(logits, 2);
}
inline Tensor normalize_backward(const Tensor& d_taps, const Tensor& taps) {
  return taps.is_cuda() ? by_head(softmax_backward(by_step(d_taps), by_step(taps), 3))
                        : softmax_backward(d_taps, taps, 2);
}

template <Map convolve, Map grad_input, GradWeight grad_weight>
struct Layer {
  // Returns the output (B, C, T) and the taps (B, H, K, T), which the backward pass needs.
  static std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& weight,
                                            const std::optional<Tensor>& bias, int64_t heads,
                                            int64_t padding, bool softmax) {
    STD_TORCH_CHECK(x.dim() == 3, "x: expected 3 dimensions (B, C, T), got ", x.dim());
    STD_TORCH_CHECK(heads >= 1 && weight.dim() == 2 && weight.size(0) % heads == 0 &&
                        weight.size(1) == x.size(1),
                    "weight: expected (heads * K, C), C being the channels of x");
    check_alike(weight, x, "weight");
    if (bias.has_value()) {
      STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0),
                      "bias: expected (heads * K)");
      check_alike(*bias, x, "bias");
    }
    Tensor taps = generate(x, weight, bias, heads);
    if (softmax) taps = normalize(taps);
    return {convolve(x, taps, padding), taps};
  }

  // Returns the gradients of x, weight and bias; an empty tensor in place of one that is not
  // needed. The values of the bias are in the taps: only derivatives of higher order need it by
  // itself.
  static std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& x,
                                                     const Tensor& weight,
                                                     const std::optional<Tensor>&,
                                                     const Tensor& taps, int64_t padding,
                                                     bool softmax, bool need_x, bool need_weight,
                                                     bool need_bias) {
    STD_TORCH_CHECK(weight.dim() == 2 && taps.dim() == 4 && x.dim() == 3 &&
                        weight.size(0) == taps.size(1) * taps.size(2) &&
                        weight.size(1) == x.size(1),
                    "weight: expected (heads * K, C), C being the channels of x");
    check_alike(weight, x, "weight");
    const int64_t B = x.size(0), C = x.size(1), T = x.size(2), generated = weight.size(0);
    Tensor d_generated =  // (B, H, K, T), as the taps
        grad_weight(grad, x, taps.sizes().vec(), taps.strides().vec(), padding);
    if (softmax) d_generated = normalize_backward(d_generated, taps);
    const auto rows = [&] { return as_rows(by_step(d_generated)); };
    // Outputs share no memory.
    const auto none = [&] { return make_tensor(x, {0}); };
    const Tensor d_weight =
        need_weight ? matrix_product(turned(rows()), as_rows(transposed(x))) : none();
    const Tensor d_bias =
        need_bias
            ? torch::stable::view(
                  torch::stable::sum(by_step(d_generated), std::vector<int64_t>{0, 1}), {generated})
            : none();
    Tensor d_x = none();
    if (need_x) {
      const Tensor through_taps =
          x.is_cuda() ? transposed(torch::stable::view(matrix_product(rows(), weight), {B, T, C}))
                      : batched_product(repeated(turned(weight), B),
                                        torch::stable::reshape(d_generated, {B, generated, T}));
      d_generated = none();  // frees it before two tensors as large as x are made
      d_x = add(grad_input(grad, taps, padding), through_taps);
    }
    return {d_x, d_weight, d_bias};
  }
};

}  // namespace hoconv::dynamic_conv1d
