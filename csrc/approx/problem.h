// The sizes of the approximate products, taken from their tensors and checked, and the order of
// their sums.
//
// B batch, C channels of the input, O of the output, G groups, H x W pixels of the input, OH x OW
// of the output, R x S the kernel.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "approx/multipliers.h"
#include "hoconv/tensor.h"

namespace hoconv::approx {

// A sum over k is cut into chunks of this many consecutive k. A chunk is summed from +0 in
// ascending order, then the chunks are summed in ascending order. Terms that are left out count as
// k too.
constexpr int64_t kChunk = 1024;

using Ints = std::vector<int64_t>;

inline void check_float(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float, name, ": expected float32");
}

// A multiplier as an op is given it: a name, or a table of mantissas (2^bits, 2^bits).
struct Chosen {
  std::string name;
  std::optional<Tensor> entries;

  MantissaTable table(const Tensor& like) const {
    const Tensor& t = *entries;
    int32_t bits = 0;
    while (t.numel() > int64_t{1} << 2 * bits) ++bits;
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.is_contiguous() && bits <= 11 &&
                        t.numel() == int64_t{1} << 2 * bits && t.device() == like.device(),
                    "entries: expected (2^n, 2^n) contiguous int32 on the operands' device");
    return {static_cast<const int32_t*>(t.const_data_ptr()), bits, 1 << bits, 1};
  }
};

// Matrices (batch, rows, columns) of any strides, or one of them (rows, columns).
struct Matrices {
  int64_t batch, rows, columns;
  int64_t batch_stride, row_stride, column_stride;

  Matrices(const Tensor& t, const char* name) {
    const int64_t dim = t.dim();
    STD_TORCH_CHECK(dim == 2 || dim == 3, name, ": expected 2 or 3 dimensions, got ", dim);
    check_float(t, name);
    batch = dim == 3 ? t.size(0) : 1, batch_stride = dim == 3 ? t.stride(0) : 0;
    rows = t.size(dim - 2), row_stride = t.stride(dim - 2);
    columns = t.size(dim - 1), column_stride = t.stride(dim - 1);
  }
};

struct Matmul {
  Matrices a, b;
  int64_t batch, M, K, N;

  // a (batch, M, K) and b (batch, K, N), or a (M, K) and b (K, N).
  Matmul(const Tensor& a_, const Tensor& b_)
      : a(a_, "a"), b(b_, "b"), batch(a.batch), M(a.rows), K(a.columns), N(b.columns) {
    STD_TORCH_CHECK(a_.device() == b_.device(), "b: expected the device of a");
    STD_TORCH_CHECK(a_.dim() == b_.dim() && b.batch == batch && b.rows == K, "b: expected (", batch,
                    ", ", K, ", N) as a is, got (", b.batch, ", ", b.rows, ", N)");
  }

  void check_grad(const Matrices& grad) const {
    STD_TORCH_CHECK(grad.batch == batch && grad.rows == M && grad.columns == N,
                    "grad: expected the shape of the product, (", batch, ", ", M, ", ", N, ")");
  }

  // The sizes of a result of so many columns and, as `like`, with or without a batch.
  Ints result(const Tensor& like, int64_t columns) const {
    return like.dim() == 2 ? Ints{M, columns} : Ints{batch, M, columns};
  }
};

// Between which a sum is kept, at each addition.
struct Limits {
  int64_t least, most;

  // Those that are given, of int32.
  static std::optional<Limits> of(std::optional<int64_t> least, std::optional<int64_t> most) {
    if (!least && !most) return std::nullopt;
    const Limits limits{least.value_or(INT32_MIN), most.value_or(INT32_MAX)};
    STD_TORCH_CHECK(
        INT32_MIN <= limits.least && limits.least <= limits.most && limits.most <= INT32_MAX,
        "least, most: expected numbers of int32 in ascending order, got ", limits.least, " and ",
        limits.most);
    return limits;
  }
};

// A matrix product of 8-bit integers whose products come from a table.
struct TableMatmul {
  int64_t batch, M, K, N;

  // a (batch, M, K), b (batch, K, N), any strides; table (256, 256).
  TableMatmul(const Tensor& a, const Tensor& b, const Tensor& table) {
    for (const Tensor* t : {&a, &b})
      STD_TORCH_CHECK(t->scalar_type() == ScalarType::Char || t->scalar_type() == ScalarType::Byte,
                      "a, b: expected int8 or uint8");
    STD_TORCH_CHECK(
        a.dim() == 3 && b.dim() == 3 && a.size(0) == b.size(0) && a.size(2) == b.size(1),
        "b: expected (B, K, N) for a of shape (B, M, K)");
    STD_TORCH_CHECK(
        table.scalar_type() == ScalarType::Int && table.numel() == 65536 && table.is_contiguous(),
        "table: expected 65,536 contiguous int32");
    STD_TORCH_CHECK(a.device() == b.device() && a.device() == table.device(),
                    "b, table: expected the device of a");
    batch = a.size(0), M = a.size(1), K = a.size(2), N = b.size(2);
  }
};

// The gradient of the left operand of such a product, by a table of derivatives.
struct TableDerivative {
  int64_t batch, M, K, N;

  // grad (batch, M, N), a (batch, M, K), b (batch, K, N), any strides; table (256, 256).
  TableDerivative(const Tensor& grad, const Tensor& a, const Tensor& b, const Tensor& table) {
    check_float(grad, "grad");
    for (const Tensor* t : {&a, &b})
      STD_TORCH_CHECK(t->scalar_type() == ScalarType::Byte, "a, b: expected uint8");
    STD_TORCH_CHECK(grad.dim() == 3 && a.dim() == 3 && b.dim() == 3 && a.size(0) == b.size(0) &&
                        a.size(2) == b.size(1) && grad.size(0) == a.size(0) &&
                        grad.size(1) == a.size(1) && grad.size(2) == b.size(2),
                    "grad, b: expected (B, M, N) and (B, K, N) for a of shape (B, M, K)");
    STD_TORCH_CHECK(
        table.scalar_type() == ScalarType::Float && table.numel() == 65536 && table.is_contiguous(),
        "table: expected 65,536 contiguous float32");
    STD_TORCH_CHECK(
        grad.device() == a.device() && b.device() == a.device() && table.device() == a.device(),
        "grad, b, table: expected the device of a");
    batch = a.size(0), M = a.size(1), K = a.size(2), N = b.size(2);
  }
};

struct Conv2d {
  int64_t B, C, H, W, O, R, S, G, OH, OW;
  int64_t stride[2], padding[2], dilation[2];

  int64_t in_channels() const { return C / G; }  // of a group
  int64_t out_channels() const { return O / G; }

  // `input` are the sizes of x (B, C, H, W), `kernel` those of the weight (O, C / G, R, S).
  Conv2d(const Ints& input, const Ints& kernel, const Ints& stride_, const Ints& padding_,
         const Ints& dilation_, int64_t groups)
      : G(groups) {
    STD_TORCH_CHECK(input.size() == 4, "x: expected (B, C, H, W), got ", input.size(),
                    " dimensions");
    STD_TORCH_CHECK(kernel.size() == 4, "weight: expected (O, C / G, R, S), got ", kernel.size(),
                    " dimensions");
    STD_TORCH_CHECK(stride_.size() == 2 && padding_.size() == 2 && dilation_.size() == 2,
                    "stride, padding, dilation: expected 2 numbers each");
    for (int i = 0; i < 2; ++i) {
      stride[i] = stride_[i], padding[i] = padding_[i], dilation[i] = dilation_[i];
      STD_TORCH_CHECK(stride[i] >= 1, "stride: expected at least 1, got ", stride[i]);
      STD_TORCH_CHECK(padding[i] >= 0, "padding: expected at least 0, got ", padding[i]);
      STD_TORCH_CHECK(dilation[i] >= 1, "dilation: expected at least 1, got ", dilation[i]);
    }
    B = input[0], C = input[1], H = input[2], W = input[3];
    O = kernel[0], R = kernel[2], S = kernel[3];
    STD_TORCH_CHECK(G >= 1 && O % G == 0 && C == G * kernel[1], "groups: expected a divisor of ", O,
                    " output channels, with ", kernel[1], " input channels each for the ", C,
                    " of x; got ", G);
    STD_TORCH_CHECK(R >= 1 && S >= 1, "weight: expected a kernel of at least 1 x 1");
    OH = (H + 2 * padding[0] - dilation[0] * (R - 1) - 1) / stride[0] + 1;
    OW = (W + 2 * padding[1] - dilation[1] * (S - 1) - 1) / stride[1] + 1;
    STD_TORCH_CHECK(
        H + 2 * padding[0] > dilation[0] * (R - 1) && W + 2 * padding[1] > dilation[1] * (S - 1),
        "weight: its dilated kernel is larger than the padded x");
  }

  void check_grad(const Tensor& grad) const {
    STD_TORCH_CHECK(grad.dim() == 4 && grad.size(0) == B && grad.size(1) == O &&
                        grad.size(2) == OH && grad.size(3) == OW,
                    "grad: expected the shape of the output, (", B, ", ", O, ", ", OH, ", ", OW,
                    ")");
  }
};

inline Ints sizes(const Tensor& t) { return Ints(t.sizes().begin(), t.sizes().end()); }

}  // namespace hoconv::approx
