// The forward pass of the layer on a CPU (worker.h).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>

#include "high_order/layer/cpu/worker.h"
#include "hoconv/huge_pages.h"

namespace hoconv::high_order::layer::cpu {
namespace {

template <typename T>
struct Forward : Worker<T> {
  using A = acc_t<T>;
  using Worker<T>::p, Worker<T>::x, Worker<T>::weight_row;
  PaddedRows<A> out;  // a row

  Forward(const Layer& p, const Parameters<A>& parameters)
      : Worker<T>(p, parameters), out(p.C, 1, p.W, 0, 0) {}

  // Computes rows first to last - 1 of the output of image b.
  void run(const Image<const T>& image, const Image<T>& output, int64_t b, int64_t first,
           int64_t last) {
    for (int64_t start = first; start < last; start += this->rows) {
      const int64_t count = std::min(this->rows, last - start);
      this->load_x(image, b, start, count);
      for (int64_t r = 0; r < count; ++r) {
        for (int64_t c = 0; c < p.C; ++c) {
          if (p.residual)
            std::copy_n(this->seen(c, r, 0, 0), p.W, out.row(c, 0));
          else
            std::fill_n(out.row(c, 0), p.W, A(0));
        }
        for (int64_t g = 0; g < p.G; ++g) {
          const int64_t c = g * p.group_channels();
          this->generate(g, r);
          apply(out.row(c, 0), out.plane(), p.group_channels(), p.registers,
                weight_row.row(0, 0) + weight_row.left,
                this->seen(c, r, p.down.before, p.across.before), x.plane(),
                {p.k, p.k, weight_row.plane(), p.down.dilation * x.width, p.across.dilation});
        }
        for (int64_t c = 0; c < p.C; ++c)
          store_row<T>(output.row(b, c, start + r), output.s.w, out.row(c, 0), p.W);
      }
    }
  }
};

Tensor forward(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
               int64_t kernel_size, int64_t dilation, bool softmax, bool residual, bool) {
  const Layer p(x, weight, bias, kernel_size, dilation, softmax, residual);
  Tensor out = make_like(x);
  prefer_huge_pages(out);
  const Tasks tasks(p);
  dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    const auto parameters = load_parameters<T>(p, weight, bias, false);
    const Image<const T> image(x);
    const Image<T> output(out);
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

}  // namespace
}  // namespace hoconv::high_order::layer::cpu

STABLE_TORCH_LIBRARY_IMPL(hoconv, CPU, m) {
  m.impl("high_order_layer.cpp", TORCH_BOX(&hoconv::high_order::layer::cpu::forward));
}
