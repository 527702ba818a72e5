// The high-order layer on the CPU, forward and backward, without its weights ever in memory.
//
// A row of the image at a time, the weights are generated, turned into their softmax where that is
// asked for, and applied. The backward pass generates them again, and of the same row computes the
// weights' gradient; from both it adds to all rows of the gradient of x that the row's pixels
// reach, so that a row of weights or of their gradient is needed once. Only the gradients of the
// weights wait, for a strip of a few rows that stays in the L1 cache, in which the gradient of the
// parameters is summed pixel by pixel. Of that sum each task has its own, and tasks do not depend
// on the number of threads, nor then does the result.
//
// A pixel costs K * C * s * s multiplications a group, four times: generated in the forward and in
// the backward pass, gradient of x, gradient of the parameters. The rest is a few per cent of it.
//
// The gradient of x at the left and right edge is NaN where a parameter is infinite, also one
// that the definition leaves out there: zeros outside the image are multiplied like pixels.
//
// B batch, C channels, G groups of channels, H height, W width, k kernel size, K = k * k taps,
// s kernel size of the generator.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "high_order/padded_image.h"
#include "high_order/problem.h"
#include "high_order_layer/cpu/kernels.h"
#include "huge_pages.h"

namespace hoconv {
namespace {

constexpr int64_t kTasks = 64;
constexpr int64_t kStripBytes = int64_t{1} << 15;  // of what a block of sums reads; L1 cache

struct Layer : Problem {
  int64_t K, s;
  bool softmax, residual;
  int64_t generator_before, generator_after;  // padding of each axis
  int64_t top, bottom;                        // the larger padding, of generator and application
  int64_t registers;                          // of a row

  Layer(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t k,
        int64_t dilation, bool softmax, bool residual)
      : Problem(x, applied_sizes(x, weight, bias, k), dilation),
        K(k * k),
        s(weight.size(2)),
        softmax(softmax),
        residual(residual),
        generator_before((s - 1) / 2),
        generator_after(s - 1 - generator_before),
        top(std::max(before, generator_before)),
        bottom(std::max(after, generator_after)) {
    const int64_t lanes = kVecBytes / (x.scalar_type() == ScalarType::Double ? 8 : 4);
    registers = (W + lanes - 1) / lanes;
  }

  int64_t parameters() const { return K * G * C * s * s; }

  // Of the weights as the application takes them.
  static std::vector<int64_t> applied_sizes(const Tensor& x, const Tensor& weight,
                                            const std::optional<Tensor>& bias, int64_t k) {
    STD_TORCH_CHECK(x.dim() == 4, "x: expected 4 dimensions (B, C, H, W), got ", x.dim());
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

// The generator's parameters in the order of their use.
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
      for (int64_t y = 0; backward && y < p.s; ++y)
        pack(mirrored.data() + (g * p.s + y) * p.C * transposed.size(), p.C, transposed,
             [&](int64_t c, int64_t tap, int64_t, int64_t x) {
               return at(tap, g, c, y, p.s - 1 - x);
             });
    }
  }
};

// All rows of all images, cut into tasks of as equal a number of rows as can be. Where a task
// begins or ends within an image, the backward pass generates a few rows of weights twice.
struct Tasks {
  int64_t count = kTasks, rows;

  explicit Tasks(const Layer& p) : rows(p.W == 0 ? 0 : p.B * p.H) {
    while (count > 1 && rows < count * 4 * (p.top + p.bottom)) count /= 2;
  }

  // Calls run(b, first, last) for the parts of images that make up a task.
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

template <typename T>
struct View {
  T* data;
  ImageStrides s;

  explicit View(const Tensor& t)
      : data(static_cast<T*>(const_cast<void*>(t.const_data_ptr()))), s(image_strides(t)) {}
  T* image(int64_t b) const { return data + b * s.b; }
  T* row(int64_t b, int64_t c, int64_t h) const { return image(b) + c * s.c + h * s.h; }
};

// What a thread works in.
template <typename T>
struct Worker {
  using A = acc_t<T>;
  using V = Vec<A>;

  const Layer& p;
  const Parameters<A>& parameters;
  const int64_t rows;    // of a strip
  PaddedImage<T> x;      // a strip, with all rows that its pixels see
  PaddedRows<A> kernel;  // a row of one group's weights

  Worker(const Layer& p, const Parameters<A>& parameters)
      : p(p),
        parameters(parameters),
        rows(strip_rows(p)),
        x(p.C, rows + p.top + p.bottom, p.W, p.top, p.bottom),
        kernel(p.K, 1, p.W, p.bottom, p.top) {}

  static int64_t strip_rows(const Layer& p) {
    const int64_t row = (p.W + p.top + p.bottom) * sizeof(A) * (kTapBlock + 1);
    return std::clamp<int64_t>(kStripBytes / row, 1, std::max<int64_t>(p.H, 1));
  }

  void load_x(const View<const T>& image, int64_t b, int64_t first, int64_t count) {
    x.fill(image.image(b), image.s, first - p.top, count + p.top + p.bottom, p.H, p.W);
  }

  // Channel c of x as row r of the strip sees it: `up` rows above and `up` columns to the left.
  const A* seen(int64_t c, int64_t r, int64_t up) const {
    return x.row(c, r + p.top - up) + x.left - up;
  }

  // The weights of group g for row r of the strip.
  void generate(int64_t g, int64_t r) {
    Window window = parameters.generator;
    window.next_plane = x.plane(), window.next_line = x.width;
    A* out = kernel.row(0, 0) + kernel.left;
    convolve(out, kernel.plane(), p.K, p.registers, parameters.bias.data() + g * p.K,
             seen(0, r, p.generator_before), window,
             parameters.weight.data() + g * p.K * window.size());
    if (p.softmax) softmax(out, kernel.plane(), p.K, p.registers);
  }
};

template <typename T>
struct Forward : Worker<T> {
  using A = acc_t<T>;
  using Worker<T>::p, Worker<T>::x, Worker<T>::kernel;
  PaddedRows<A> out;  // a row

  Forward(const Layer& p, const Parameters<A>& parameters)
      : Worker<T>(p, parameters), out(p.C, 1, p.W, 0, 0) {}

  // Rows first .. last of the output of image b.
  void run(const View<const T>& image, const View<T>& output, int64_t b, int64_t first,
           int64_t last) {
    for (int64_t start = first; start < last; start += this->rows) {
      const int64_t count = std::min(this->rows, last - start);
      this->load_x(image, b, start, count);
      for (int64_t r = 0; r < count; ++r) {
        for (int64_t c = 0; c < p.C; ++c) {
          if (p.residual)
            std::copy_n(this->seen(c, r, 0), p.W, out.row(c, 0));
          else
            std::fill_n(out.row(c, 0), p.W, A(0));
        }
        for (int64_t g = 0; g < p.G; ++g) {
          const int64_t c = g * p.group_channels();
          this->generate(g, r);
          apply(out.row(c, 0), out.plane(), p.group_channels(), p.registers,
                kernel.row(0, 0) + kernel.left, this->seen(c, r, p.before), x.plane(),
                {p.k, p.k, kernel.plane(), p.dilation * x.width, p.dilation});
        }
        for (int64_t c = 0; c < p.C; ++c)
          store_row<T>(output.row(b, c, start + r), output.s.w, out.row(c, 0), p.W);
      }
    }
  }
};

template <typename T>
struct Backward : Worker<T> {
  using A = acc_t<T>;
  using V = Vec<A>;
  using Worker<T>::p, Worker<T>::x, Worker<T>::kernel, Worker<T>::parameters;
  PaddedImage<T> grad;        // the output's, of a strip
  PaddedRows<A> grad_kernel;  // the weights' of one group, of a strip
  PaddedRows<A> grad_x;       // row h, while it is summed, is row h % grad_x.rows
  Scratch<A> sums;            // of the parameters' gradients: a register each

  Backward(const Layer& p, const Parameters<A>& parameters)
      : Worker<T>(p, parameters),
        grad(p.C, this->rows, p.W, p.bottom, p.top),
        grad_kernel(p.K, this->rows, p.W, p.bottom, p.top),
        grad_x(p.C, std::min(p.H, this->rows + p.top + p.bottom), p.W, 0, 0) {
    sums.resize((p.parameters() + p.K * p.G) * V::size);
  }

  typename V::type* weight_sums() { return reinterpret_cast<typename V::type*>(sums.data); }
  typename V::type* bias_sums() { return weight_sums() + p.parameters(); }

  // The gradient of rows first .. last of x; adds their share of the parameters' gradients to sums.
  void run(const View<const T>& grad_out, const View<const T>& image, const View<T>& grad_image,
           int64_t b, int64_t first, int64_t last) {
    // The rows whose pixels see those rows.
    const int64_t begin = std::max<int64_t>(0, first - p.bottom), end = std::min(p.H, last + p.top);
    int64_t opened = first, closed = first;
    for (int64_t start = begin; start < end;) {
      const bool within = start >= first && start < last;
      const int64_t limit = start < first ? first : within ? last : end;
      const int64_t count = std::min(this->rows, limit - start);
      this->load_x(image, b, start, count);
      grad.fill(grad_out.image(b), grad_out.s, start, count, p.H, p.W);
      for (; opened < std::min(last, start + count + p.bottom); ++opened) open(grad_out, b, opened);
      for (int64_t g = 0; g < p.G; ++g) {
        for (int64_t r = 0; r < count; ++r) add_grad_x(g, start, r, first, last);
        if (within) add_parameters(g, count);
      }
      start += count;
      const int64_t complete = start == end ? last : std::min(last, start - p.top);
      for (; closed < complete; ++closed)
        for (int64_t c = 0; c < p.C; ++c)
          store_row<T>(grad_image.row(b, c, closed), grad_image.s.w, slot(c, closed), p.W);
    }
  }

  A* slot(int64_t c, int64_t h) { return grad_x.row(c, h % grad_x.rows); }

  void open(const View<const T>& grad_out, int64_t b, int64_t h) {
    for (int64_t c = 0; c < p.C; ++c) {
      if (p.residual)
        load_row<T>(slot(c, h), grad_out.row(b, c, h), grad_out.s.w, p.W);
      else
        std::fill_n(slot(c, h), p.W, A(0));
    }
  }

  // What row r of the strip adds to rows first .. last of the gradient of x, by group g. Leaves the
  // gradient of the row's weights in grad_kernel.
  void add_grad_x(int64_t g, int64_t start, int64_t r, int64_t first, int64_t last) {
    const int64_t k = p.k, channels = p.group_channels(), c = g * channels;
    A* weights = kernel.row(0, 0) + kernel.left;
    A* grads = grad_kernel.row(0, r) + grad_kernel.left;
    const A* pixels = grad.row(c, r) + grad.left;

    this->generate(g, r);
    for (int64_t i = 0; i < k; ++i)
      for_each_block<kOutputBlock>(k, [&](int64_t j, auto N) {
        correlate_pixels<A, N>(grads + (i * k + j) * grad_kernel.plane(), grad_kernel.plane(),
                               p.dilation, channels, p.registers, pixels, grad.plane(),
                               this->seen(c, r, p.before) + p.dilation * (i * x.width + j),
                               x.plane());
      });
    if (p.softmax)
      softmax_backward(grads, grad_kernel.plane(), weights, kernel.plane(), p.K, p.registers);
    // From here on they are read beyond the last column.
    const int64_t rest = p.registers * V::size - p.W;
    for (int64_t tap = 0; tap < p.K; ++tap) {
      std::fill_n(weights + tap * kernel.plane() + p.W, rest, A(0));
      std::fill_n(grads + tap * grad_kernel.plane() + p.W, rest, A(0));
    }

    // A pixel adds to the pixels that it sees, so that to find what a pixel gets one looks the
    // other way.
    for (int64_t i = 0; i < k; ++i) {
      const int64_t h = start + r + i * p.dilation - p.before;
      if (h >= first && h < last)
        apply(slot(c, h), grad_x.plane(), channels, p.registers,
              weights + i * k * kernel.plane() + p.before, pixels + p.before, grad.plane(),
              {1, k, kernel.plane() - p.dilation, 0, -p.dilation});
    }
    Window window = parameters.transposed;
    window.next_plane = grad_kernel.plane();
    for (int64_t y = 0; y < p.s; ++y) {
      const int64_t h = start + r + y - p.generator_before;
      if (h >= first && h < last)
        convolve<A>(slot(0, h), grad_x.plane(), p.C, p.registers, nullptr,
                    grads - p.generator_after, window,
                    parameters.mirrored.data() + (g * p.s + y) * p.C * window.size());
    }
  }

  // Adds the strip's share of the gradient of group g's parameters.
  void add_parameters(int64_t g, int64_t count) {
    const int64_t next_sum = parameters.generator.size(), row = kTapBlock;
    const Area area{count, p.W, grad_kernel.width};
    for (int64_t tap = 0; tap < p.K; tap += row) {  // whose gradients stay in the L1 cache
      const int64_t taps = std::min(row, p.K - tap);
      const A* grads = grad_kernel.row(tap, 0) + grad_kernel.left;
      for (int64_t c = 0; c < p.C; ++c)
        for (int64_t y = 0; y < p.s; ++y)
          correlate(weight_sums() + (g * p.K + tap) * next_sum + (c * p.s + y) * p.s, next_sum,
                    taps, p.s, grads, grad_kernel.plane(), this->seen(c, y, p.generator_before),
                    x.width, area);
      for (int64_t t = 0; t < taps; ++t)
        for (int64_t r = 0; r < count; ++r)
          for (int64_t v = 0; v < p.registers; ++v)
            bias_sums()[g * p.K + tap + t] +=
                V::load(grad_kernel.row(tap + t, r) + grad_kernel.left + v * V::size);
    }
  }

  // Adds up the lanes of the sums, into weight and bias gradients one after the other, and clears
  // them.
  void take_sums(A* out) {
    for (int64_t i = 0; i < p.parameters() + p.K * p.G; ++i) {
      A* lanes = sums.data + i * V::size;
      A sum = 0;
      for (int64_t lane = 0; lane < V::size; ++lane) sum += lanes[lane];
      out[i] = sum;
      std::fill_n(lanes, V::size, A(0));
    }
  }
};

template <typename T>
Parameters<acc_t<T>> load_parameters(const Layer& p, const Tensor& weight,
                                     const std::optional<Tensor>& bias, bool backward) {
  const View<const T> w(weight);
  const T* b = bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr;
  return {p, w.data, w.s, b, bias ? bias->stride(0) : 0, backward};
}

Tensor forward(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
               int64_t kernel_size, int64_t dilation, bool softmax, bool residual, bool) {
  const Layer p(x, weight, bias, kernel_size, dilation, softmax, residual);
  Tensor out = torch::stable::empty_like(x);
  prefer_huge_pages(out);
  const Tasks tasks(p);
  dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    const auto parameters = load_parameters<T>(p, weight, bias, false);
    const View<const T> image(x);
    const View<T> output(out);
    torch::stable::parallel_for(0, tasks.count, 1, [&](int64_t begin, int64_t end) {
      Forward<T> worker(p, parameters);
      for (int64_t task = begin; task < end; ++task)
        tasks.for_each_part(task, p.H, [&](int64_t b, int64_t first, int64_t last) {
          worker.run(image, output, b, first, last);
        });
    });
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& x,
                                            const Tensor& weight, const std::optional<Tensor>& bias,
                                            int64_t kernel_size, int64_t dilation, bool softmax,
                                            bool residual, bool) {
  const Layer p(x, weight, bias, kernel_size, dilation, softmax, residual);
  check_alike(grad, x, "grad");
  check_same_sizes(grad, x, "grad");
  Tensor grad_x = torch::stable::empty_like(x);
  Tensor grad_weight = torch::stable::empty_like(weight);
  Tensor grad_bias = torch::stable::new_empty(weight, {weight.size(0)});
  prefer_huge_pages(grad_x);
  const Tasks tasks(p);
  dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const auto parameters = load_parameters<T>(p, weight, bias, true);
    const View<const T> image(x), grad_out(grad);
    const View<T> grad_image(grad_x), grad_w(grad_weight);
    const int64_t share = p.parameters() + p.K * p.G;
    std::vector<A> shares(tasks.count * share);
    torch::stable::parallel_for(0, tasks.count, 1, [&](int64_t begin, int64_t end) {
      Backward<T> worker(p, parameters);
      for (int64_t task = begin; task < end; ++task) {
        tasks.for_each_part(task, p.H, [&](int64_t b, int64_t first, int64_t last) {
          worker.run(grad_out, image, grad_image, b, first, last);
        });
        worker.take_sums(shares.data() + task * share);
      }
    });
    const auto total = [&](int64_t i) {
      A sum = 0;
      for (int64_t task = 0; task < tasks.count; ++task) sum += shares[task * share + i];
      return static_cast<T>(sum);
    };
    torch::stable::parallel_for(0, p.K * p.G, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t output = i % p.K * p.G + i / p.K;  // groups come first in the sums
        for (int64_t c = 0, j = i * p.C * p.s * p.s; c < p.C; ++c)
          for (int64_t y = 0; y < p.s; ++y)
            for (int64_t z = 0; z < p.s; ++z, ++j)
              grad_w.row(output, c, y)[z * grad_w.s.w] = total(j);
        static_cast<T*>(grad_bias.data_ptr())[output] = total(p.parameters() + i);
      }
    });
  });
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace
}  // namespace hoconv

STABLE_TORCH_LIBRARY_IMPL(hoconv, CPU, m) {
  m.impl("high_order_layer.cpp", TORCH_BOX(&hoconv::forward));
  m.impl("high_order_layer_backward.cpp", TORCH_BOX(&hoconv::backward));
}
