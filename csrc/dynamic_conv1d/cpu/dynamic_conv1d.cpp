// The dynamic 1-D convolution on the CPU, forward and backward.
//
// The work is cut into strips: some steps of one sequence and head. A worker copies the weights of
// a strip, tap by tap, and a few channels of its sequence at a time, both padded with zeros and
// converted to the type of the arithmetic. The inner loops therefore know no borders, strides,
// shared weights or dtypes. All channels of the head read the copied weights, which stay in the L2
// cache.
//
// The input gradient is the same loop: a convolution of the output's gradient, with mirrored taps
// and the weights of the step that is read. Strips depend on sizes only and every sum has a fixed
// order, so that the result does not depend on the number of threads.
//
// B batch, C channels, H heads, K taps, T time steps.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "dynamic_conv1d/layer.h"
#include "dynamic_conv1d/problem.h"
#include "hoconv/blocks.h"
#include "hoconv/huge_pages.h"
#include "hoconv/vec.h"

namespace hoconv::dynamic_conv1d {
namespace {

constexpr int64_t kChannels = 4;  // computed at once: they share registers of weights
// Registers of steps at once: independent sums hide the latency of an addition.
constexpr int64_t kRegisters = 2;
constexpr int64_t kTaps = 4;                       // whose sums over time are computed at once
constexpr int64_t kStripBytes = int64_t{1} << 17;  // of weights: a small part of the L2 cache
// How many strips there should be for the threads to share. It is a constant, since no sum may
// depend on the number of threads.
constexpr int64_t kStrips = 64;
// Steps of a strip. At least so many that the halo is a small part of what is copied; at most so
// many that the copied rows of x and of the output, kChannels each, take 32 KiB in float32.
constexpr int64_t kFewestSteps = 64, kMostSteps = 1024;

template <typename A>
constexpr int64_t kBlock = kRegisters * Vec<A>::size;  // steps computed at once

// Rows of numbers, padded so that a register may be loaded past the end of one.
template <typename A>
struct Rows {
  int64_t width;
  std::vector<A> storage;
  Rows(int64_t rows, int64_t columns)
      : width(round_up(columns, kBlock<A>)), storage(rows * width, A(0)) {}
  A* row(int64_t r) { return storage.data() + r * width; }
};

struct Strips {
  int64_t steps, count;  // of a strip; in a sequence

  Strips(const Problem& p, int64_t element_size) {
    const int64_t cached = kStripBytes / (p.K * element_size);
    const int64_t fair = p.T * p.B * p.H / kStrips;
    steps = std::clamp<int64_t>(std::min(cached, fair), kFewestSteps, kMostSteps);
    count = (p.T + steps - 1) / steps;
  }
};

// dst[i] = src[(first + i) * stride], zero where first + i is not in [0, length)
template <typename T>
void load_padded(acc_t<T>* dst, const T* src, int64_t stride, int64_t first, int64_t n,
                 int64_t length) {
  using A = acc_t<T>;
  const int64_t begin = std::clamp<int64_t>(-first, 0, n);
  const int64_t end = std::clamp<int64_t>(length - first, begin, n);
  std::fill(dst, dst + begin, A(0));
  std::fill(dst + end, dst + n, A(0));
  if (begin == end) return;
  if (stride == 0)
    std::fill(dst + begin, dst + end, static_cast<A>(*src));
  else
    load_row<T>(dst + begin, src + (first + begin) * stride, stride, end - begin);
}

// The buffers and loops of one thread.
template <typename T>
struct Worker {
  using A = acc_t<T>;
  using V = Vec<A>;

  const Problem& p;
  Rows<A> weights;             // (K, steps): the weights, or their gradient
  Rows<A> in;                  // (channels, steps + K - 1)
  Rows<A> out;                 // (channels, steps): sums, or the output's gradient
  std::vector<double> totals;  // of each tap, over time

  Worker(const Problem& p, int64_t steps)
      : p(p),
        weights(p.K, steps),
        in(kChannels, round_up(steps, kBlock<A>) + p.K - 1 + kTaps),
        out(kChannels, steps),
        totals(p.K) {}

  // out[c, t] = sum over j of weight[j, t] * x[c, t + j - before]
  void forward(const T* weight, const WeightStrides& ws, const T* x, const Strides& xs, T* y,
               const Strides& ys, int64_t first, int64_t steps) {
    for (int64_t j = 0; j < p.K; ++j)
      load_padded(weights.row(j), weight + j * ws.k, ws.t, first, steps, p.T);
    convolve(x, xs, first - p.before, y, ys, first, steps);
  }

  // grad_x[c, t] = sum over i of weight[K - 1 - i, s] * grad[c, s] with s = t + i - (K - 1 -
  // before)
  void grad_input(const T* weight, const WeightStrides& ws, const T* grad, const Strides& gs, T* y,
                  const Strides& ys, int64_t first, int64_t steps) {
    const int64_t start = first - p.mirrored_before();
    for (int64_t i = 0; i < p.K; ++i)
      load_padded(weights.row(i), weight + (p.K - 1 - i) * ws.k, ws.t, start + i, steps, p.T);
    convolve(grad, gs, start, y, ys, first, steps);
  }

  // Adds to `weights`: sum over c of grad[c, t] * x[c, t + j - before]
  void add_products(const T* grad, const Strides& gs, const T* x, const Strides& xs, int64_t first,
                    int64_t steps) {
    for_each_block<kChannels>(p.head_channels(), [&](int64_t c, auto N) {
      load<N>(in, x + c * xs.c, xs, first - p.before, steps + p.K - 1);
      load<N>(out, grad + c * gs.c, gs, first, steps);
      for (int64_t t = 0; t < steps; t += V::size) {
        typename V::type g[N];
        for (int64_t m = 0; m < N; ++m) g[m] = V::load(out.row(m) + t);
        for (int64_t j = 0; j < p.K; ++j) {
          auto sum = V::load(weights.row(j) + t);
          for (int64_t m = 0; m < N; ++m) sum += g[m] * V::load(in.row(m) + t + j);
          V::store(weights.row(j) + t, sum);
        }
      }
    });
  }

  // Sets `totals`: sum over c and t of grad[c, t] * x[c, t + j - before]
  void sum_products(const T* grad, const Strides& gs, const T* x, const Strides& xs, int64_t first,
                    int64_t steps) {
    std::fill(totals.begin(), totals.end(), 0.0);
    for_each_block<kChannels>(p.head_channels(), [&](int64_t c, auto N) {
      load<N>(in, x + c * xs.c, xs, first - p.before, steps + p.K - 1);
      load<N>(out, grad + c * gs.c, gs, first, steps);
      for (int64_t j = 0; j < p.K; j += kTaps) {
        // Taps past the last are computed from whatever is there, and dropped.
        typename V::type sums[kTaps] = {};
        A rest[kTaps] = {};
        for (int64_t m = 0; m < N; ++m) {
          const A *g = out.row(m), *line = in.row(m) + j;
          int64_t t = 0;
          for (; t + V::size <= steps; t += V::size)
            for (int64_t i = 0; i < kTaps; ++i) sums[i] += V::load(g + t) * V::load(line + t + i);
          for (; t < steps; ++t)
            for (int64_t i = 0; i < kTaps; ++i) rest[i] += g[t] * line[t + i];
        }
        for (int64_t i = 0; i < std::min(kTaps, p.K - j); ++i) {
          totals[j + i] += rest[i];
          for (int64_t v = 0; v < V::size; ++v) totals[j + i] += sums[i][v];
        }
      }
    });
  }

 private:
  // Loads N channels of a sequence from step `first` on, which may be negative.
  template <int64_t N>
  void load(Rows<A>& rows, const T* sequence, const Strides& s, int64_t first, int64_t steps) {
    for (int64_t m = 0; m < N; ++m)
      load_padded(rows.row(m), sequence + m * s.c, s.t, first, steps, p.T);
  }

  // y[c, first + t] = sum over j of weights[j, t] * x[c, start + t + j]
  void convolve(const T* x, const Strides& xs, int64_t start, T* y, const Strides& ys,
                int64_t first, int64_t steps) {
    for_each_block<kChannels>(p.head_channels(), [&](int64_t c, auto N) {
      load<N>(in, x + c * xs.c, xs, start, steps + p.K - 1);
      for (int64_t t = 0; t < steps; t += kBlock<A>) {
        typename V::type sum[N][kRegisters] = {};
        const A *weight = weights.row(0) + t, *line = in.row(0) + t;
        for (int64_t j = 0; j < p.K; ++j, weight += weights.width, ++line) {
          for (int64_t u = 0; u < kRegisters; ++u) {
            const auto factor = V::load(weight + u * V::size);
            for (int64_t m = 0; m < N; ++m)
              sum[m][u] += factor * V::load(line + m * in.width + u * V::size);
          }
        }
        for (int64_t m = 0; m < N; ++m)
          for (int64_t u = 0; u < kRegisters; ++u)
            V::store(out.row(m) + t + u * V::size, sum[m][u]);
      }
      for (int64_t m = 0; m < N; ++m)
        store_row<T>(y + (c + m) * ys.c + first * ys.t, ys.t, out.row(m), steps);
    });
  }
};

// The first channel of head h of sequence b, and the weights of head h.
template <typename T>
const T* head(const Tensor& x, const Problem& p, int64_t b, int64_t h) {
  return static_cast<const T*>(x.const_data_ptr()) + b * x.stride(0) +
         h * p.head_channels() * x.stride(1);
}
template <typename T>
T* head(Tensor& x, const Problem& p, int64_t b, int64_t h) {
  return const_cast<T*>(head<T>(std::as_const(x), p, b, h));
}
template <typename T>
const T* weights(const Tensor& weight, const WeightStrides& s, int64_t b, int64_t h) {
  return static_cast<const T*>(weight.const_data_ptr()) + b * s.b + h * s.h;
}

// Calls run(worker, b, h, strip, first step, steps) for every strip of `batch` sequences.
template <typename T, typename Run>
void for_each_strip(const Problem& p, const Strips& strips, int64_t batch, Run&& run) {
  const int64_t tasks = batch * p.H * strips.count;
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    Worker<T> worker(p, strips.steps);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t strip = i % strips.count, first = strip * strips.steps;
      run(worker, i / strips.count / p.H, i / strips.count % p.H, strip, first,
          std::min(strips.steps, p.T - first));
    }
  });
}

Tensor forward(const Tensor& x, const Tensor& weight, int64_t padding) {
  const Problem p(x, weight.sizes(), padding);
  check_alike(weight, x, "weight");
  Tensor out = make_like(x);
  prefer_huge_pages(out);
  const auto xs = strides(x), ys = strides(out);
  const auto ws = weight_strides(weight);
  dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    const Strips strips(p, sizeof(acc_t<T>));
    for_each_strip<T>(p, strips, p.B, [&](auto& worker, auto b, auto h, auto, auto first, auto n) {
      worker.forward(weights<T>(weight, ws, b, h), ws, head<T>(x, p, b, h), xs,
                     head<T>(out, p, b, h), ys, first, n);
    });
  });
  return out;
}

Tensor grad_input(const Tensor& grad, const Tensor& weight, int64_t padding) {
  const Problem p(grad, weight.sizes(), padding);
  check_alike(weight, grad, "weight");
  Tensor out = make_like(grad);
  prefer_huge_pages(out);
  const auto gs = strides(grad), ys = strides(out);
  const auto ws = weight_strides(weight);
  dispatch_floating(grad, [&](auto zero) {
    using T = decltype(zero);
    const Strips strips(p, sizeof(acc_t<T>));
    for_each_strip<T>(p, strips, p.B, [&](auto& worker, auto b, auto h, auto, auto first, auto n) {
      worker.grad_input(weights<T>(weight, ws, b, h), ws, head<T>(grad, p, b, h), gs,
                        head<T>(out, p, b, h), ys, first, n);
    });
  });
  return out;
}

// The gradient of weights that each step has of its own, summed over the batch where sequences
// share them.
template <typename T>
void grad_weight_of_steps(const Problem& p, const Tensor& grad, const Tensor& x, Tensor& out) {
  const auto gs = strides(grad), xs = strides(x);
  const auto os = weight_strides(out);
  const Strips strips(p, sizeof(acc_t<T>));
  for_each_strip<T>(p, strips, p.weight_batch(),
                    [&](auto& worker, auto b, auto h, auto, auto first, auto steps) {
                      auto& sums = worker.weights;
                      std::fill(sums.storage.begin(), sums.storage.end(), acc_t<T>(0));
                      const int64_t last = p.batch_shared ? p.B : b + 1;
                      for (int64_t sequence = b; sequence < last; ++sequence)
                        worker.add_products(head<T>(grad, p, sequence, h), gs,
                                            head<T>(x, p, sequence, h), xs, first, steps);
                      T* target = const_cast<T*>(weights<T>(out, os, b, h)) + first * os.t;
                      for (int64_t j = 0; j < p.K; ++j)
                        store_row<T>(target + j * os.k, os.t, sums.row(j), steps);
                    });
}

// The gradient of weights that all steps share: each strip has a partial sum, and these are added
// in order.
template <typename T>
void grad_weight_over_time(const Problem& p, const Tensor& grad, const Tensor& x, Tensor& out) {
  const auto gs = strides(grad), xs = strides(x);
  const auto os = weight_strides(out);
  const Strips strips(p, sizeof(acc_t<T>));
  std::vector<double> parts(p.B * strips.count * p.H * p.K);
  const auto part = [&](int64_t b, int64_t strip, int64_t h) {
    return parts.begin() + ((b * strips.count + strip) * p.H + h) * p.K;
  };
  for_each_strip<T>(
      p, strips, p.B, [&](auto& worker, auto b, auto h, auto strip, auto first, auto steps) {
        worker.sum_products(head<T>(grad, p, b, h), gs, head<T>(x, p, b, h), xs, first, steps);
        std::copy(worker.totals.begin(), worker.totals.end(), part(b, strip, h));
      });
  for (int64_t b = 0; b < p.weight_batch(); ++b) {
    const int64_t last = p.batch_shared ? p.B : b + 1;
    for (int64_t h = 0; h < p.H; ++h) {
      for (int64_t j = 0; j < p.K; ++j) {
        double sum = 0;
        for (int64_t sequence = b; sequence < last; ++sequence)
          for (int64_t strip = 0; strip < strips.count; ++strip) sum += part(sequence, strip, h)[j];
        const_cast<T*>(weights<T>(out, os, b, h))[j * os.k] =
            static_cast<T>(static_cast<acc_t<T>>(sum));
      }
    }
  }
}

Tensor grad_weight(const Tensor& grad, const Tensor& x, std::vector<int64_t> size,
                   std::vector<int64_t> stride, int64_t padding) {
  const Problem p(x, size, padding);
  check_alike(grad, x, "grad");
  check_same_sizes(grad, x, "grad");
  Tensor out = make_strided(x, size, stride);
  prefer_huge_pages(out);
  dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    if (p.time_shared)
      grad_weight_over_time<T>(p, grad, x, out);
    else
      grad_weight_of_steps<T>(p, grad, x, out);
  });
  return out;
}

using OwnLayer = Layer<&forward, &grad_input, &grad_weight>;

}  // namespace
}  // namespace hoconv::dynamic_conv1d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CPU, m) {
  m.impl("dynamic_conv1d.cpp", TORCH_BOX(&hoconv::dynamic_conv1d::forward));
  m.impl("dynamic_conv1d_grad_input.cpp", TORCH_BOX(&hoconv::dynamic_conv1d::grad_input));
  m.impl("dynamic_conv1d_grad_weight.cpp", TORCH_BOX(&hoconv::dynamic_conv1d::grad_weight));
  m.impl("dynamic_conv1d_layer.cpp", TORCH_BOX(&hoconv::dynamic_conv1d::OwnLayer::forward));
  m.impl("dynamic_conv1d_layer_backward.cpp",
         TORCH_BOX(&hoconv::dynamic_conv1d::OwnLayer::backward));
}
