// The dynamic 1-D convolution on the CPU, forward and backward.
//
// The work is cut into strips: some steps of one sequence and head. A worker copies the weights of
// a strip, tap by tap, and a few channels of its sequence at a time, both padded with zeros and
// converted to the type of the arithmetic. The inner loops therefore know no borders, strides,
// shared weights or dtypes. All channels of the head read the copied weights, which stay in the L2
// cache. Where channels are contiguous, a worker copies as many at a time as a cache line has, of
// several heads if need be: a line is read once.
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

constexpr int64_t kChannels = 4;    // computed at once: they share registers of weights
constexpr int64_t kLineBytes = 64;  // of a cache
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

// dst[i * stride + j] = src[j * pitch + i] for j < columns, i < n
template <typename T>
void store_columns(T* dst, int64_t stride, const acc_t<T>* src, int64_t pitch, int64_t columns,
                   int64_t n) {
  using V = Vec<acc_t<T>>;
  const int64_t whole = columns - columns % V::size, squares = n - n % V::size;
  for (int64_t i = 0; i < squares; i += V::size)
    for (int64_t j = 0; j < whole; j += V::size) {
      typename V::type square[V::size];
      for (int64_t m = 0; m < V::size; ++m) square[m] = V::load(src + (j + m) * pitch + i);
      V::transpose(square);
      for (int64_t m = 0; m < V::size; ++m) {
        acc_t<T> row[V::size];
        V::store(row, square[m]);
        store_row<T>(dst + (i + m) * stride + j, 1, row, V::size);
      }
    }
  for (int64_t j = 0; j < columns; ++j) {
    const int64_t begin = j < whole ? squares : 0;
    store_row<T>(dst + begin * stride + j, stride, src + j * pitch + begin, n - begin);
  }
}

// Whether a sequence is copied by lines of channels.
inline bool by_lines(const Strides& s) { return s.c == 1 && s.t != 1; }

// Consecutive heads of a sequence, and some of its steps.
struct Part {
  int64_t head, heads, first, steps;
};

// The buffers and loops of one thread.
template <typename T>
struct Worker {
  using A = acc_t<T>;
  using V = Vec<A>;
  static constexpr int64_t kLine = kLineBytes / sizeof(T);  // channels of a line

  const Problem& p;
  Rows<A> weights;             // (K, steps): the weights, or their gradient
  Rows<A> in;                  // (channels, steps + K - 1)
  Rows<A> out;                 // (channels, steps): sums, or the output's gradient
  std::vector<double> totals;  // of each tap, over time

  Worker(const Problem& p, int64_t steps)
      : p(p),
        weights(p.K, steps),
        in(kLine, round_up(steps, kBlock<A>) + p.K - 1 + kTaps),
        out(kLine, steps),
        totals(p.K) {}

  // y[c, t] = sum over j of weight[h(c), j, t] * x[c, t + j - before]. The arguments are those of
  // head 0.
  void forward(const T* weight, const WeightStrides& ws, const T* x, const Strides& xs, T* y,
               const Strides& ys, const Part& part) {
    convolve(x, xs, part.first - p.before, y, ys, part, [&](int64_t h) {
      const T* from = weight + h * ws.h;
      if (ws.k == 1 && ws.t != 0)
        load_columns<T>(weights.row(0), weights.width, from + part.first * ws.t, ws.t, p.K,
                        part.steps);
      else
        for (int64_t j = 0; j < p.K; ++j)
          load_padded(weights.row(j), from + j * ws.k, ws.t, part.first, part.steps, p.T);
    });
  }

  // grad_x[c, t] = sum over i of weight[h(c), K - 1 - i, s] * grad[c, s] with s = t + i - (K - 1 -
  // before)
  void grad_input(const T* weight, const WeightStrides& ws, const T* grad, const Strides& gs, T* y,
                  const Strides& ys, const Part& part) {
    const int64_t start = part.first - p.mirrored_before();
    convolve(grad, gs, start, y, ys, part, [&](int64_t h) {
      for (int64_t i = 0; i < p.K; ++i)
        load_padded(weights.row(i), weight + h * ws.h + (p.K - 1 - i) * ws.k, ws.t, start + i,
                    part.steps, p.T);
    });
  }

  // Copies channels of the output's gradient and of x, a line of them or kChannels at a time, and
  // calls f(h, first row, rows) for what each head has of them.
  template <typename F>
  void for_each_rows(const T* grad, const Strides& gs, const T* x, const Strides& xs,
                     const Part& part, F&& f) {
    for_each_channels(by_lines(xs) || by_lines(gs), part, [&](int64_t c, int64_t n, auto&& heads) {
      load(in, x + c * xs.c, xs, part.first - p.before, part.steps + p.K - 1, n);
      load(out, grad + c * gs.c, gs, part.first, part.steps, n);
      heads(f);
    });
  }

  // Adds to `weights`: sum over some rows c of grad[c, t] * x[c, t + j - before]
  void add_products(int64_t row, int64_t rows, int64_t steps) {
    for_each_block<kChannels>(rows, [&](int64_t c, auto N) {
      for (int64_t t = 0; t < steps; t += V::size) {
        typename V::type g[N];
        for (int64_t m = 0; m < N; ++m) g[m] = V::load(out.row(row + c + m) + t);
        for (int64_t j = 0; j < p.K; ++j) {
          auto sum = V::load(weights.row(j) + t);
          for (int64_t m = 0; m < N; ++m) sum += g[m] * V::load(in.row(row + c + m) + t + j);
          V::store(weights.row(j) + t, sum);
        }
      }
    });
  }

  // Adds to `totals`: sum over some rows c and all t of grad[c, t] * x[c, t + j - before]
  void sum_products(int64_t row, int64_t rows, int64_t steps) {
    for_each_block<kChannels>(rows, [&](int64_t c, auto N) {
      for (int64_t j = 0; j < p.K; j += kTaps) {
        // Taps past the last are computed from whatever is there, and dropped.
        typename V::type sums[kTaps] = {};
        A rest[kTaps] = {};
        for (int64_t m = 0; m < N; ++m) {
          const A *g = out.row(row + c + m), *line = in.row(row + c + m) + j;
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
  // Calls f(c, n, heads) for n channels at a time, from channel c on; heads(g) calls g(h, row,
  // rows) for the rows that each head has of them.
  template <typename F>
  void for_each_channels(bool lines, const Part& part, F&& f) {
    const int64_t of_head = p.head_channels(), end = (part.head + part.heads) * of_head;
    const int64_t most = lines ? kLine : kChannels;
    for (int64_t c = part.head * of_head; c < end;) {
      // Heads are whole, or cut into equal numbers of channels.
      const int64_t blocks = (end - c + most - 1) / most, n = (end - c + blocks - 1) / blocks;
      f(c, n, [&](auto&& g) {
        for (int64_t h = c / of_head; h * of_head < c + n; ++h) {
          const int64_t begin = std::max(c, h * of_head);
          g(h, begin - c, std::min(c + n, (h + 1) * of_head) - begin);
        }
      });
      c += n;
    }
  }

  // Loads n channels of a sequence from step `first` on, which may be negative.
  void load(Rows<A>& rows, const T* sequence, const Strides& s, int64_t first, int64_t steps,
            int64_t n) {
    if (!by_lines(s)) {
      for (int64_t m = 0; m < n; ++m)
        load_padded(rows.row(m), sequence + m * s.c, s.t, first, steps, p.T);
      return;
    }
    const int64_t begin = std::clamp<int64_t>(-first, 0, steps);
    const int64_t end = std::clamp<int64_t>(p.T - first, begin, steps);
    for (int64_t m = 0; m < n; ++m) {
      std::fill(rows.row(m), rows.row(m) + begin, A(0));
      std::fill(rows.row(m) + end, rows.row(m) + steps, A(0));
    }
    load_columns<T>(rows.row(0) + begin, rows.width, sequence + (first + begin) * s.t, s.t, n,
                    end - begin);
  }

  // y[c, first + t] = sum over j of weights[j, t] * x[c, start + t + j]; load_weights(h) loads the
  // weights of a head.
  template <typename F>
  void convolve(const T* x, const Strides& xs, int64_t start, T* y, const Strides& ys,
                const Part& part, F&& load_weights) {
    int64_t loaded = -1;
    const int64_t steps = part.steps;
    for_each_channels(by_lines(xs), part, [&](int64_t c, int64_t n, auto&& heads) {
      load(in, x + c * xs.c, xs, start, steps + p.K - 1, n);
      heads([&](int64_t h, int64_t row, int64_t rows) {
        if (loaded != h) load_weights(loaded = h);
        for_each_block<kChannels>(rows, [&](int64_t r, auto N) { sum_taps(row + r, N, steps); });
      });
      T* to = y + c * ys.c + part.first * ys.t;
      if (by_lines(ys))
        store_columns<T>(to, ys.t, out.row(0), out.width, n, steps);
      else
        for (int64_t m = 0; m < n; ++m) store_row<T>(to + m * ys.c, ys.t, out.row(m), steps);
    });
  }

  // out[row + m, t] = sum over j of weights[j, t] * in[row + m, t + j] for m < N
  template <typename Count>
  void sum_taps(int64_t row, Count N, int64_t steps) {
    for (int64_t t = 0; t < steps; t += kBlock<A>) {
      typename V::type sum[N][kRegisters] = {};
      const A *weight = weights.row(0) + t, *line = in.row(row) + t;
      for (int64_t j = 0; j < p.K; ++j, weight += weights.width, ++line) {
        for (int64_t u = 0; u < kRegisters; ++u) {
          const auto factor = V::load(weight + u * V::size);
          for (int64_t m = 0; m < N; ++m)
            sum[m][u] += factor * V::load(line + m * in.width + u * V::size);
        }
      }
      for (int64_t m = 0; m < N; ++m)
        for (int64_t u = 0; u < kRegisters; ++u)
          V::store(out.row(row + m) + t + u * V::size, sum[m][u]);
    }
  }
};

// A sequence, and its weights.
template <typename T>
const T* at(const Tensor& x, int64_t b) {
  return static_cast<const T*>(x.const_data_ptr()) + b * x.stride(0);
}
template <typename T>
T* at(Tensor& x, int64_t b) {
  return static_cast<T*>(x.mutable_data_ptr()) + b * x.stride(0);
}
template <typename T>
const T* weights(const Tensor& weight, const WeightStrides& s, int64_t b) {
  return static_cast<const T*>(weight.const_data_ptr()) + b * s.b;
}

// Calls run(worker, b, strip, part) for every strip of `batch` sequences: of a head, or of as many
// as a line of channels has, where sequences are copied by lines.
template <typename T, typename Run>
void for_each_strip(const Problem& p, const Strips& strips, int64_t batch, bool lines, Run&& run) {
  const int64_t heads =
      lines && p.C > 0 ? std::clamp<int64_t>(Worker<T>::kLine / p.head_channels(), 1, p.H) : 1;
  const int64_t groups = (p.H + heads - 1) / heads, tasks = batch * groups * strips.count;
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    Worker<T> worker(p, strips.steps);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t strip = i % strips.count, head = i / strips.count % groups * heads;
      const int64_t first = strip * strips.steps;
      run(worker, i / strips.count / groups, strip,
          Part{head, std::min(heads, p.H - head), first, std::min(strips.steps, p.T - first)});
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
    for_each_strip<T>(
        p, strips, p.B, by_lines(xs), [&](auto& worker, auto b, auto, const Part& part) {
          worker.forward(weights<T>(weight, ws, b), ws, at<T>(x, b), xs, at<T>(out, b), ys, part);
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
    for_each_strip<T>(p, strips, p.B, by_lines(gs),
                      [&](auto& worker, auto b, auto, const Part& part) {
                        worker.grad_input(weights<T>(weight, ws, b), ws, at<T>(grad, b), gs,
                                          at<T>(out, b), ys, part);
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
  const auto store = [&](auto& worker, int64_t b, int64_t h, const Part& part) {
    T* target = const_cast<T*>(weights<T>(out, os, b)) + h * os.h + part.first * os.t;
    auto& sums = worker.weights;
    if (os.k == 1)
      store_columns<T>(target, os.t, sums.row(0), sums.width, p.K, part.steps);
    else
      for (int64_t j = 0; j < p.K; ++j)
        store_row<T>(target + j * os.k, os.t, sums.row(j), part.steps);
  };
  // Sums over sequences have no place for several heads.
  const bool lines = (by_lines(xs) || by_lines(gs)) && !p.batch_shared;
  for_each_strip<T>(p, strips, p.weight_batch(), lines,
                    [&](auto& worker, auto b, auto, const Part& part) {
                      auto& sums = worker.weights.storage;
                      std::fill(sums.begin(), sums.end(), acc_t<T>(0));
                      const int64_t last = p.batch_shared ? p.B : b + 1;
                      for (int64_t sequence = b; sequence < last; ++sequence)
                        worker.for_each_rows(at<T>(grad, sequence), gs, at<T>(x, sequence), xs,
                                             part, [&](int64_t h, int64_t row, int64_t rows) {
                                               worker.add_products(row, rows, part.steps);
                                               if (part.heads == 1) return;
                                               store(worker, b, h, part);
                                               std::fill(sums.begin(), sums.end(), acc_t<T>(0));
                                             });
                      if (part.heads == 1) store(worker, b, part.head, part);
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
  const auto sums = [&](int64_t b, int64_t strip, int64_t h) {
    return parts.begin() + ((b * strips.count + strip) * p.H + h) * p.K;
  };
  for_each_strip<T>(p, strips, p.B, by_lines(xs) || by_lines(gs),
                    [&](auto& worker, auto b, auto strip, const Part& part) {
                      worker.for_each_rows(at<T>(grad, b), gs, at<T>(x, b), xs, part,
                                           [&](int64_t h, int64_t row, int64_t rows) {
                                             std::fill(worker.totals.begin(), worker.totals.end(),
                                                       0.0);
                                             worker.sum_products(row, rows, part.steps);
                                             const auto to = sums(b, strip, h);
                                             for (int64_t j = 0; j < p.K; ++j)
                                               to[j] += worker.totals[j];
                                           });
                    });
  for (int64_t b = 0; b < p.weight_batch(); ++b) {
    const int64_t last = p.batch_shared ? p.B : b + 1;
    for (int64_t h = 0; h < p.H; ++h) {
      for (int64_t j = 0; j < p.K; ++j) {
        double sum = 0;
        for (int64_t sequence = b; sequence < last; ++sequence)
          for (int64_t strip = 0; strip < strips.count; ++strip) sum += sums(sequence, strip, h)[j];
        const_cast<T*>(weights<T>(out, os, b))[h * os.h + j * os.k] =
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
