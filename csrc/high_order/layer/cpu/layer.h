// A call of the high-order layer on the CPU: its sizes, its packed parameters, and the tasks that
// its work is cut into.
//
// B batch, C channels, G groups of channels, H height, W width, k kernel size, K = k * k taps,
// s kernel size of the generator.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "high_order/conv2d/problem.h"
#include "high_order/layer/cpu/kernels.h"
#include "hoconv/vec.h"

namespace hoconv::high_order::layer::cpu {

// A constant, so that no sum depends on the number of threads. 64 tasks are shared by up to 64
// threads; each has its own copy of the parameters' gradients.
constexpr int64_t kTasks = 64;
// A task has at least this many times the rows that its backward pass generates twice.
constexpr int64_t kRowsPerRepeatedRow = 4;

struct Layer : conv2d::Problem {
  int64_t H, W, k, K, s;
  bool softmax, residual;
  int64_t generator_before, generator_after;  // padding of the generator along each axis
  int64_t top, bottom, left, right;           // the larger padding of generator and application
  int64_t registers;                          // of a row

  Layer(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t k,
        int64_t dilation, bool softmax, bool residual)
      : Problem(x.sizes(), applied_sizes(x, weight, bias, k),
                conv2d::Window({k, k, dilation, dilation, 1, 1, 1, 1, 0})),
        H(down.in),
        W(across.in),
        k(k),
        K(k * k),
        s(weight.size(2)),
        softmax(softmax),
        residual(residual),
        generator_before((s - 1) / 2),
        generator_after(s - 1 - generator_before),
        top(std::max(down.before, generator_before)),
        bottom(std::max(down.after(), generator_after)),
        left(std::max(across.before, generator_before)),
        right(std::max(across.after(), generator_after)) {
    const int64_t lanes = kVecBytes / (x.scalar_type() == ScalarType::Double ? 8 : 4);
    registers = (W + lanes - 1) / lanes;
  }

  int64_t parameters() const { return K * G * C * s * s; }

  // The sizes of the weights that are applied.
  static std::vector<int64_t> applied_sizes(const Tensor& x, const Tensor& weight,
                                            const std::optional<Tensor>& bias, int64_t k) {
    STD_TORCH_CHECK(x.dim() == 4, "x: expected 4 dimensions (B, C, H, W), got ", x.dim());
    check_floating(x, "x");
    STD_TORCH_CHECK(weight.dim() == 4 && weight.size(1) == x.size(1) && weight.size(2) >= 1 &&
                        weight.size(2) == weight.size(3),
                    "weight: expected the shape (k * k * G, C, s, s) with the channels of x");
    STD_TORCH_CHECK(k >= 1 && k <= 11, "kernel_size: expected 1 to 11, got ", k);
    STD_TORCH_CHECK(weight.size(0) % (k * k) == 0, "weight: expected a multiple of ", k * k,
                    " output channels, got ", weight.size(0));
    check_alike(weight, x, "weight");
    if (bias) {
      check_alike(*bias, x, "bias");
      STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0),
                      "bias: expected as many as weight has output channels");
    }
    return {k * k, x.size(0), weight.size(0) / (k * k), x.size(2), x.size(3)};
  }
};

// The generator's parameters, packed in the order in which the loops read them.
template <typename A>
struct Parameters {
  Window generator, transposed;  // with next_plane and next_line zero, for the worker to set
  std::vector<A> weight, mirrored, bias;

  template <typename T>
  Parameters(const Layer& p, const T* w, const ImageStrides& ws, const T* b, int64_t bias_stride,
             bool backward)
      : generator{p.C, p.s, p.s, 0, 0},
        transposed{p.K, 1, p.s, 0, 0},
        weight(p.parameters()),
        mirrored(backward ? p.parameters() : 0),
        bias(p.K * p.G) {
    const auto at = [&](int64_t tap, int64_t g, int64_t c, int64_t y, int64_t x) {
      return static_cast<A>(w[(tap * p.G + g) * ws.b + c * ws.c + y * ws.h + x * ws.w]);
    };
    for (int64_t g = 0; g < p.G; ++g) {
      for (int64_t tap = 0; b && tap < p.K; ++tap)
        bias[g * p.K + tap] = static_cast<A>(b[(tap * p.G + g) * bias_stride]);
      pack(weight.data() + g * p.K * generator.size(), p.K, generator,
           [&](int64_t tap, int64_t c, int64_t y, int64_t x) { return at(tap, g, c, y, x); });
      if (backward)
        pack(mirrored.data() + g * p.s * p.C * transposed.size(), p.s * p.C, transposed,
             [&](int64_t output, int64_t tap, int64_t, int64_t x) {
               return at(tap, g, output % p.C, output / p.C, p.s - 1 - x);
             });
    }
  }
};

// The rows of all images, cut into tasks of nearly equal numbers of rows. Where a task begins or
// ends within an image, the backward pass generates a few rows of weights twice.
struct Tasks {
  int64_t count = kTasks, rows;

  explicit Tasks(const Layer& p) : rows(p.W == 0 ? 0 : p.B * p.H) {
    while (count > 1 && rows < count * kRowsPerRepeatedRow * (p.top + p.bottom)) count /= 2;
  }

  // Calls run(b, first, last) for the parts of images in a task: rows first to last - 1 of image b.
  template <typename Run>
  void for_each_part(int64_t task, int64_t H, Run&& run) const {
    const int64_t end = rows * (task + 1) / count;
    for (int64_t row = rows * task / count; row < end;) {
      const int64_t b = row / H, first = row % H, last = std::min(H, first + end - row);
      run(b, first, last);
      row += last - first;
    }
  }
};

}  // namespace hoconv::high_order::layer::cpu
