// The sizes and strides of a call of the dynamic 1-D convolution, taken from its tensors and
// checked.
//
// B batch, C channels, H heads, K taps, T time steps.
#pragma once

#include <cstdint>

#include "hoconv/tensor.h"

namespace hoconv::dynamic_conv1d {

// Element strides of a sequence (B, C, T).
struct Strides {
  int64_t b, c, t;
};
// Element strides of the weights (B or 1, H, K, T or 1). The stride of a shared dimension is 0.
struct WeightStrides {
  int64_t b, h, k, t;
};

inline Strides strides(const Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }
inline WeightStrides weight_strides(const Tensor& t) {
  return {t.size(0) == 1 ? 0 : t.stride(0), t.stride(1), t.stride(2),
          t.size(3) == 1 ? 0 : t.stride(3)};
}

struct Problem {
  int64_t B, C, T, H, K;
  int64_t before;                  // zeros before the first step
  bool batch_shared, time_shared;  // whether sequences, or steps, share the weights

  int64_t head_channels() const { return C / H; }

  int64_t weight_batch() const { return batch_shared ? 1 : B; }

  // `x` is x or the output's gradient; `weight` are the sizes of the weights (B or 1, H, K, T or
  // 1).
  template <typename Sizes>
  Problem(const Tensor& x, const Sizes& weight, int64_t padding) {
    STD_TORCH_CHECK(x.dim() == 3, "x: expected 3 dimensions (B, C, T), got ", x.dim());
    STD_TORCH_CHECK(weight.size() == 4,
                    "weight: expected 4 dimensions (B or 1, H, K, T or 1), got ", weight.size());
    check_floating(x, "x");
    B = x.size(0), C = x.size(1), T = x.size(2), H = weight[1], K = weight[2];
    batch_shared = weight[0] == 1, time_shared = weight[3] == 1;
    STD_TORCH_CHECK((batch_shared || weight[0] == B) && (time_shared || weight[3] == T),
                    "weight: expected the batch and steps of x, or 1");
    STD_TORCH_CHECK(H >= 1 && C % H == 0, "weight: its heads must divide the channels, ", C,
                    "; got ", H);
    STD_TORCH_CHECK(K >= 1, "weight: expected at least 1 tap, got ", K);
    STD_TORCH_CHECK(padding >= 0 && padding < K, "padding: expected 0 to ", K - 1, ", got ",
                    padding);
    before = padding;
  }

  // The input gradient is a convolution of the output's gradient with mirrored taps, which has this
  // many zeros before its first step.
  int64_t mirrored_before() const { return K - 1 - before; }
};

}  // namespace hoconv::dynamic_conv1d
