// The backward pass of the layer on a CPU (worker.h).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <tuple>
#include <vector>

#include "high_order/layer/cpu/worker.h"
#include "hoconv/huge_pages.h"

namespace hoconv::high_order::layer::cpu {
namespace {

template <typename T>
struct Backward : Worker<T> {
  using A = acc_t<T>;
  using V = Vec<A>;
  using Worker<T>::p, Worker<T>::x, Worker<T>::weight_row, Worker<T>::parameters;
  PaddedImage<T> grad;         // of the output, for a strip
  PaddedRows<A> grad_kernel;   // of the weights of one group, for a strip
  const int64_t above, below;  // rows around a strip to which its pixels add
  PaddedRows<A> grad_x;        // those and the strip's rows; the channels of a row side by side
  Scratch<A> sums;             // of the parameters' gradients, one register each

  Backward(const Layer& p, const Parameters<A>& parameters)
      : Worker<T>(p, parameters),
        grad(p.C, this->rows, p.W, round_up(p.right, V::size), p.left),
        grad_kernel(p.K, this->rows, p.W, round_up(p.right, V::size), p.left),
        above(std::max(p.generator_before, std::min(p.down.before, p.H))),
        below(std::max(p.generator_after, std::min(p.down.after(), p.H))),
        grad_x(above + this->rows + below, p.C, p.W, 0, 0) {
    sums.resize((p.parameters() + p.K * p.G) * V::size);
  }

  typename V::type* weight_sums() { return reinterpret_cast<typename V::type*>(sums.data); }
  typename V::type* bias_sums() { return weight_sums() + p.parameters(); }

  // Computes the gradient of rows first to last - 1 of x, and adds their share of the parameters'
  // gradients to `sums`.
  void run(const Image<const T>& grad_out, const Image<const T>& image, const Image<T>& grad_image,
           int64_t b, int64_t first, int64_t last) {
    // The rows whose pixels add to those.
    const int64_t begin = std::max<int64_t>(0, first - p.bottom), end = std::min(p.H, last + p.top);
    int64_t done = first;
    std::fill_n(grad_x.row(0, 0), grad_x.channels * grad_x.plane(), A(0));
    for (int64_t start = begin; start < end;) {
      const bool within = start >= first && start < last;
      const int64_t limit = start < first ? first : within ? last : end;
      const int64_t count = std::min(this->rows, limit - start);
      this->load_x(image, b, start, count);
      grad.fill(grad_out.first_row(b), grad_out.s, start, count, p.H, p.W);
      for (int64_t g = 0; g < p.G; ++g) {
        for (int64_t r = 0; r < count; ++r) add_grad_x(g, r, first - start, last - start);
        if (within) add_parameters(g, count);
      }
      const int64_t complete = start + count == end ? last : std::min(last, start + count - above);
      for (; done < complete; ++done)
        for (int64_t c = 0; c < p.C; ++c)
          store_row<T>(grad_image.row(b, c, done), grad_image.s.w,
                       grad_x.row(above + done - start, c), p.W);
      move_up(count);
      start += count;
    }
  }

  // Moves row `count` of grad_x to the front.
  void move_up(int64_t count) {
    A* begin = grad_x.row(0, 0);
    A* end = begin + grad_x.channels * grad_x.plane();
    std::fill(std::copy(begin + count * grad_x.plane(), end, begin), end, A(0));
  }

  // Adds to x's gradient what row r of the strip contributes to it through group g; through the
  // application only to rows first to last - 1. Leaves the gradient of the row's weights in
  // grad_kernel.
  void add_grad_x(int64_t g, int64_t r, int64_t first, int64_t last) {
    const int64_t k = p.k, channels = p.group_channels(), c = g * channels;
    A* weights = weight_row.row(0, 0) + weight_row.left;
    A* grads = grad_kernel.row(0, r) + grad_kernel.left;
    const A* pixels = grad.row(c, r) + grad.left;

    this->generate(g, r);
    for (int64_t i = 0; i < k; ++i)
      for_each_block<kOutputBlock>(k, [&](int64_t j, auto N) {
        correlate_pixels<A, N>(grads + (i * k + j) * grad_kernel.plane(), grad_kernel.plane(),
                               p.across.dilation, channels, p.registers, pixels, grad.plane(),
                               this->seen(c, r, p.down.before, p.across.before) +
                                   i * p.down.dilation * x.width + j * p.across.dilation,
                               x.plane());
      });
    if (p.softmax)
      softmax_backward(grads, grad_kernel.plane(), weights, weight_row.plane(), p.K, p.registers);
    // From here on both are read past the last column.
    const int64_t rest = p.registers * V::size - p.W;
    for (int64_t tap = 0; tap < p.K; ++tap) {
      std::fill_n(weights + tap * weight_row.plane() + p.W, rest, A(0));
      std::fill_n(grads + tap * grad_kernel.plane() + p.W, rest, A(0));
    }

    // Gathers: a pixel adds to the pixels that its taps read, so the taps are mirrored to find
    // which pixels add to it.
    for (int64_t i = 0; i < k; ++i) {
      const int64_t h = r + i * p.down.dilation - p.down.before;
      if (h >= first && h < last)
        apply(grad_x.row(above + h, c), grad_x.width, channels, p.registers,
              weights + i * k * weight_row.plane() + p.across.before, pixels + p.across.before,
              grad.plane(), {1, k, weight_row.plane() - p.across.dilation, 0, -p.across.dilation});
    }
    if (p.residual)
      for (int64_t n = 0; n < channels; ++n)
        std::transform(pixels + n * grad.plane(), pixels + n * grad.plane() + p.W,
                       grad_x.row(above + r, c + n), grad_x.row(above + r, c + n), std::plus<A>());
    Window window = parameters.transposed;
    window.next_plane = grad_kernel.plane();
    convolve<A>(grad_x.row(above + r - p.generator_before, 0), grad_x.width, p.s * p.C, p.registers,
                nullptr, grads - p.generator_after, window,
                parameters.mirrored.data() + g * p.s * p.C * window.size());
  }

  // Adds the strip's share of the gradient of group g's parameters to `sums`.
  void add_parameters(int64_t g, int64_t count) {
    const int64_t next_sum = parameters.generator.size(), next_grad = grad_kernel.plane();
    const Area area{count, p.W, grad_kernel.width};
    for_each_block<kTapBlock>(p.K, [&](int64_t tap, auto block) {
      constexpr int64_t N = block;
      const A* grads = grad_kernel.row(tap, 0) + grad_kernel.left;
      auto* sums = weight_sums() + (g * p.K + tap) * next_sum;
      for (int64_t c = 0; c < p.C; ++c)
        for (int64_t y = 0; y < p.s; ++y)
          for_each_block<kColumnBlock>(p.s, [&](int64_t j, auto M) {
            correlate<A, N, M>(sums + (c * p.s + y) * p.s + j, next_sum, grads, next_grad,
                               this->seen(c, y, p.generator_before, p.generator_before) + j,
                               x.width, area);
          });
      add_up(bias_sums() + g * p.K + tap, N, grads, next_grad, area);
    });
  }

  // Adds up the lanes of each sum into `out`, the weight's gradients and then the bias's, and
  // clears the sums.
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

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& x,
                                            const Tensor& weight, const std::optional<Tensor>& bias,
                                            int64_t kernel_size, int64_t dilation, bool softmax,
                                            bool residual, bool) {
  const Layer p(x, weight, bias, kernel_size, dilation, softmax, residual);
  check_alike(grad, x, "grad");
  check_same_sizes(grad, x, "grad");
  Tensor grad_x = make_like(x);
  Tensor grad_weight = make_like(weight);
  Tensor grad_bias = make_tensor(weight, {weight.size(0)});
  prefer_huge_pages(grad_x);
  const Tasks tasks(p);
  dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const auto parameters = load_parameters<T>(p, weight, bias, true);
    const Image<const T> image(x), grad_out(grad);
    const Image<T> grad_image(grad_x), grad_w(grad_weight);
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
        const int64_t output =
            i % p.K * p.G + i / p.K;  // the sums have groups first, the tensors taps
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
}  // namespace hoconv::high_order::layer::cpu

STABLE_TORCH_LIBRARY_IMPL(hoconv, CPU, m) {
  m.impl("high_order_layer_backward.cpp", TORCH_BOX(&hoconv::high_order::layer::cpu::backward));
}
