// The dynamic 1-D convolution on the CPU, forward and backward.
//
// The work is cut into strips: some steps of one sequence and of the channels of one head. Where
// both x and the output are contiguous along time and of the type of the arithmetic, the inner
// steps of a strip, whose windows are within the sequence, are computed where they are; so are the
// weights of a head of few channels. Everything else is copied first, padded with zeros and
// converted, so that the inner loops know no borders, strides or dtypes: the weights of a strip,
// which stay in the L2 cache and which all channels of the head read, and a few channels of its
// sequence at a time. Where channels are contiguous, a strip has as many as a cache line, of
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

// Rows of numbers, `pitch` apart.
template <typename A>
struct View {
  A* first;
  int64_t pitch;
  A* row(int64_t r) const { return first + r * pitch; }
};

// Rows of a worker's own, padded so that a register may be loaded past the end of one.
template <typename A>
struct Rows {
  int64_t width;
  std::vector<A> storage;
  Rows(int64_t rows, int64_t columns)
      : width(round_up(columns, kBlock<A>)), storage(rows * width, A(0)) {}
  View<A> view() { return {storage.data(), width}; }
};

using hoconv::by_lines;
inline bool by_lines(const Strides& s) { return by_lines(s.c, s.t); }

// Copies `rows` rows of a tensor, `steps` steps from `first` on, which may be negative: zeros where
// the sequence, of `length` steps, has none.
template <typename T>
void load(const View<acc_t<T>>& to, const T* src, int64_t row_stride, int64_t step_stride,
          int64_t rows, int64_t first, int64_t steps, int64_t length) {
  const int64_t begin = std::clamp<int64_t>(-first, 0, steps);
  const int64_t end = std::clamp<int64_t>(length - first, begin, steps);
  for (int64_t r = 0; r < rows; ++r) {
    std::fill(to.row(r), to.row(r) + begin, acc_t<T>(0));
    std::fill(to.row(r) + end, to.row(r) + steps, acc_t<T>(0));
  }
  if (begin == end) return;
  load_rows<T>(to.row(0) + begin, to.pitch, src + (first + begin) * step_stride, row_stride,
               step_stride, rows, end - begin);
}

// How the sequences of a call are cut into strips.
template <typename T>
struct Strips {
  static constexpr int64_t kLine = kLineBytes / sizeof(T);  // channels of a line

  int64_t heads, steps;   // of a strip
  int64_t groups, count;  // strips beside each other in a sequence, and one after the other

  // lines: whether sequences are copied by lines
  Strips(const Problem& p, bool lines)
      : heads(lines && p.C > 0 ? std::clamp<int64_t>(kLine / p.head_channels(), 1, p.H) : 1),
        groups((p.H + heads - 1) / heads) {
    const int64_t weights = p.time_shared ? 1 : heads * p.K;  // of a step
    const int64_t cached = kStripBytes / (weights * static_cast<int64_t>(sizeof(acc_t<T>)));
    const int64_t fair = p.T * p.B * groups / kStrips;
    steps = std::clamp<int64_t>(std::min(cached, fair), kFewestSteps, kMostSteps);
    steps -= steps % kBlock<acc_t<T>>;
    count = (p.T + steps - 1) / steps;
  }
};

// Consecutive heads of a sequence, and some of its steps.
struct Part {
  int64_t head, heads, first, steps;
};

// The buffers and loops of one thread.
template <typename T>
struct Worker {
  using A = acc_t<T>;
  using V = Vec<A>;
  static constexpr int64_t kLine = Strips<T>::kLine;

  const Problem& p;
  Rows<A> weights;             // (heads * K, steps + K - 1): the weights, or their gradient
  std::vector<A> shared;       // (heads * K): those that all steps share
  Rows<A> in;                  // (channels, steps + K - 1)
  Rows<A> out;                 // (channels, steps): sums, or the output's gradient
  std::vector<double> totals;  // of each tap, over time

  Worker(const Problem& p, const Strips<T>& strips)
      : p(p),
        weights(strips.heads * p.K, weight_steps(p, strips) + p.K - 1),
        shared(p.time_shared ? strips.heads * p.K : 0),
        in(kLine, round_up(strips.steps, kBlock<A>) + p.K - 1 + kTaps),
        out(kLine, strips.steps),
        totals(p.K) {}

  // y[c, t] = sum over j of weight[h(c), j, t] * x[c, t + j - before], or, of the input gradient,
  // y[c, t] = sum over j of weight[h(c), K - 1 - j, s] * x[c, s] with s = t + j - (K - 1 - before).
  // The arguments are those of head 0.
  void convolve(const T* weight, const WeightStrides& ws, const T* x, const Strides& xs, T* y,
                const Strides& ys, const Part& part, bool mirrored) {
    const bool can_be_in_place = is_in_place(xs, ys);
    // In mirrored windows zeros stand for the weights beside the sequence, which are not there.
    const bool zeros = mirrored && p.time_shared;
    const auto run = [&](int64_t t, int64_t read, int64_t steps, bool inside) {
      const bool in_place = inside && can_be_in_place;
      const bool scalars = p.time_shared && (inside || !mirrored);
      const bool own_weights = !(in_place && ws.t == 1 && p.head_channels() <= kChannels);
      if (scalars)
        load_shared(weight, ws, part);
      else if (own_weights)
        load_weights(weight, ws, part, mirrored ? read : t, steps, mirrored);
      for_each_channels(by_lines(xs), part, [&](int64_t c, int64_t n, auto&& heads) {
        const View<A> from = sequence(in_place, in, x + c * xs.c, xs, read, steps + p.K - 1, n);
        const View<A> to = in_place ? View<A>{same(y + c * ys.c + t), ys.c} : out.view();
        heads([&](int64_t h, int64_t row, int64_t rows) {
          const int64_t first = (h - part.head) * p.K;  // of the head's copied taps
          View<A> taps = scalars ? View<A>{shared.data() + first, 1}
                         : own_weights
                             ? View<A>{weights.view().row(first), weights.width}
                             : View<A>{same(weight + h * ws.h + (mirrored ? read : t)), ws.k};
          // A mirrored tap is read a step later than the tap that follows it.
          if (mirrored) taps = {taps.row(p.K - 1), (scalars ? 0 : 1) - taps.pitch};
          for_each_block<kChannels>(rows, [&](int64_t r, auto N) {
            const View<A> source{from.row(row + r), from.pitch}, sums{to.row(row + r), to.pitch};
            if (scalars)
              sum_taps<true>(N, source, taps, sums, steps);
            else
              sum_taps<false>(N, source, taps, sums, steps);
          });
        });
        if (!in_place)
          store_rows<T>(y + c * ys.c + t * ys.t, ys.c, ys.t, to.first, to.pitch, n, steps);
      });
    };
    for_each_range(part, mirrored ? p.mirrored_before() : p.before, p.K, can_be_in_place || zeros,
                   run);
  }

  // out[h, j, t] = sum over sequences b < `batch` and over channels c of head h of
  // grad[b, c, t] * x[b, c, t + j - before]. The arguments are those of head 0.
  void grad_weight_of_steps(const T* grad, const Strides& gs, const T* x, const Strides& xs, T* to,
                            const WeightStrides& os, int64_t batch, const Part& part) {
    const bool in_place = is_in_place(xs, gs);
    for_each_range(
        part, p.before, p.K, in_place, [&](int64_t t, int64_t read, int64_t steps, bool inside) {
          const bool own_sums =
              !(inside && os.t == 1 && p.head_channels() <= kChannels && batch == 1);
          for (int64_t b = 0; b < batch; ++b)
            for_each_rows(
                grad + b * gs.b, gs, x + b * xs.b, xs, part, t, read, steps, inside,
                [&](const View<A>& g, const View<A>& line, int64_t c, int64_t h, int64_t rows) {
                  const View<A> sums =
                      own_sums ? View<A>{weights.view().row((h - part.head) * p.K), weights.width}
                               : View<A>{same(to + h * os.h + t), os.k};
                  for_each_block<kChannels>(rows, [&](int64_t r, auto N) {
                    const View<A> gr{g.row(r), g.pitch}, xr{line.row(r), line.pitch};
                    if (b == 0 && c + r == h * p.head_channels())
                      add_products<false>(N, gr, xr, sums, steps);
                    else
                      add_products<true>(N, gr, xr, sums, steps);
                  });
                });
          if (!own_sums) return;
          const int64_t heads = os.h == p.K * os.k ? part.heads : 1;  // stored at once
          for (int64_t h = 0; h < part.heads; h += heads)
            store_rows<T>(to + (part.head + h) * os.h + t * os.t, os.k, os.t,
                          weights.view().row(h * p.K), weights.width, heads * p.K, steps);
        });
  }

  // Calls f(h) after `totals` has, of head h and a part of the strip, the sum over its channels c
  // and over t of grad[c, t] * x[c, t + j - before].
  template <typename F>
  void grad_weight_over_time(const T* grad, const Strides& gs, const T* x, const Strides& xs,
                             const Part& part, F&& f) {
    const bool in_place = is_in_place(xs, gs);
    for_each_range(
        part, p.before, round_up(p.K, kTaps), in_place,
        [&](int64_t t, int64_t read, int64_t steps, bool inside) {
          for_each_rows(
              grad, gs, x, xs, part, t, read, steps, inside,
              [&](const View<A>& g, const View<A>& line, int64_t, int64_t h, int64_t rows) {
                std::fill(totals.begin(), totals.end(), 0.0);
                for_each_block<kChannels>(rows, [&](int64_t r, auto N) {
                  sum_products(N, {g.row(r), g.pitch}, {line.row(r), line.pitch}, steps);
                });
                f(h);
              });
        });
  }

 private:
  static constexpr bool kSameType = std::is_same_v<T, A>;

  // The steps of which a strip copies weights: if all steps share them, those of a range outside.
  static int64_t weight_steps(const Problem& p, const Strips<T>& strips) {
    const int64_t most = p.K - 1 + kBlock<A>;
    return round_up(p.time_shared ? std::min(strips.steps, most) : strips.steps, kBlock<A>);
  }

  // Memory of a tensor as numbers of the arithmetic, where they are. What is read is not written.
  static A* same(const T* tensor) { return reinterpret_cast<A*>(const_cast<T*>(tensor)); }

  // Whether steps are computed where they are. If there are no channels, nothing is: the gradient
  // of weights is then the zeros of the worker's rows.
  bool is_in_place(const Strides& a, const Strides& b) const {
    return kSameType && a.t == 1 && b.t == 1 && p.C > 0;
  }

  // Calls f(t, read, steps, inside) for the ranges of a strip: its steps from t on, which read from
  // step `read` on. Inside, whole blocks of steps read `span` steps each within the sequence; if a
  // strip is not split, all of it counts as outside. A range outside is shorter than K and a block.
  template <typename F>
  void for_each_range(const Part& part, int64_t before, int64_t span, bool split, F&& f) {
    const int64_t start = part.first - before, steps = part.steps;
    const int64_t begin = split ? std::clamp<int64_t>(-start, 0, steps) : steps;
    const int64_t end = std::clamp<int64_t>(p.T - span + 1 - start, begin, steps);
    const int64_t middle = end - (end - begin) % kBlock<A>;
    const auto range = [&](int64_t from, int64_t to, bool inside) {
      if (from < to) f(part.first + from, start + from, to - from, inside);
    };
    range(0, begin, false);
    range(begin, middle, true);
    range(middle, steps, false);
  }

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

  // Calls f(grad, x, c, h, rows) for rows of the output's gradient from step t on and of x from
  // step `read` on, which are those of channels of head h from c on.
  template <typename F>
  void for_each_rows(const T* grad, const Strides& gs, const T* x, const Strides& xs,
                     const Part& part, int64_t t, int64_t read, int64_t steps, bool inside, F&& f) {
    for_each_channels(by_lines(xs) || by_lines(gs), part, [&](int64_t c, int64_t n, auto&& heads) {
      const View<A> line = sequence(inside, in, x + c * xs.c, xs, read, steps + p.K - 1, n);
      const View<A> g = sequence(inside, out, grad + c * gs.c, gs, t, steps, n);
      heads([&](int64_t h, int64_t row, int64_t rows) {
        f(View<A>{g.row(row), g.pitch}, View<A>{line.row(row), line.pitch}, c + row, h, rows);
      });
    });
  }

  // Returns n channels of a sequence from step `first` on: where they are, or copied.
  View<A> sequence(bool inside, Rows<A>& copy, const T* channels, const Strides& s, int64_t first,
                   int64_t steps, int64_t n) {
    if (inside) return {same(channels + first), s.c};
    load<T>(copy.view(), channels, s.c, s.t, n, first, steps, p.T);
    return copy.view();
  }

  // Copies the weights that all steps share of a strip's heads.
  void load_shared(const T* weight, const WeightStrides& ws, const Part& part) {
    for (int64_t h = 0; h < part.heads; ++h)
      load_row<T>(shared.data() + h * p.K, weight + (part.head + h) * ws.h, ws.k, p.K);
  }

  // Copies the weights of a strip's heads, as rows, for steps that are read from step `first` on.
  // Mirrored, tap j is read K - 1 - j steps later.
  void load_weights(const T* weight, const WeightStrides& ws, const Part& part, int64_t first,
                    int64_t steps, bool mirrored) {
    weight += part.head * ws.h;
    if (mirrored && !by_lines(ws.k, ws.t)) {  // of each row the steps that are read
      for (int64_t r = 0; r < part.heads * p.K; ++r) {
        const int64_t h = r / p.K, j = r % p.K, later = p.K - 1 - j;
        load<T>({weights.view().row(r) + later, weights.width}, weight + h * ws.h + j * ws.k, ws.k,
                ws.t, 1, first + later, steps, p.T);
      }
      return;
    }
    const int64_t heads = ws.h == p.K * ws.k ? part.heads : 1;  // copied at once
    for (int64_t h = 0; h < part.heads; h += heads)
      load<T>({weights.view().row(h * p.K), weights.width}, weight + h * ws.h, ws.k, ws.t,
              heads * p.K, first, mirrored ? steps + p.K - 1 : steps, p.T);
  }

  // sums[m, t] = sum over j of taps[j, t] * in[m, t + j] for m < N, where all steps share the taps
  // of taps[j, 0]
  template <bool kShared, typename Count>
  void sum_taps(Count N, const View<A>& in, const View<A>& taps, const View<A>& sums,
                int64_t steps) {
    for (int64_t t = 0; t < steps; t += kBlock<A>) {
      typename V::type sum[N][kRegisters] = {};
      const A *weight = taps.first + (kShared ? 0 : t), *line = in.first + t;
      for (int64_t j = 0; j < p.K; ++j, weight += taps.pitch, ++line) {
        for (int64_t u = 0; u < kRegisters; ++u) {
          const auto factor =
              kShared ? *weight - typename V::type{} : V::load(weight + u * V::size);
          for (int64_t m = 0; m < N; ++m)
            sum[m][u] += factor * V::load(line + m * in.pitch + u * V::size);
        }
      }
      for (int64_t m = 0; m < N; ++m)
        for (int64_t u = 0; u < kRegisters; ++u) V::store(sums.row(m) + t + u * V::size, sum[m][u]);
    }
  }

  // sums[j, t] = sum over m < N of grad[m, t] * x[m, t + j], added to what is there or not
  template <bool kAdd, typename Count>
  void add_products(Count N, const View<A>& grad, const View<A>& x, const View<A>& sums,
                    int64_t steps) {
    for (int64_t t = 0; t < steps; t += V::size) {
      typename V::type g[N];
      for (int64_t m = 0; m < N; ++m) g[m] = V::load(grad.row(m) + t);
      for (int64_t j = 0; j < p.K; ++j) {
        typename V::type sum = {};
        if constexpr (kAdd) sum = V::load(sums.row(j) + t);
        for (int64_t m = 0; m < N; ++m) sum += g[m] * V::load(x.row(m) + t + j);
        V::store(sums.row(j) + t, sum);
      }
    }
  }

  // totals[j] += sum over m < N and all t of grad[m, t] * x[m, t + j]
  template <typename Count>
  void sum_products(Count N, const View<A>& grad, const View<A>& x, int64_t steps) {
    for (int64_t j = 0; j < p.K; j += kTaps) {
      // Taps past the last are computed from whatever is there, and dropped.
      typename V::type sums[kTaps] = {};
      A rest[kTaps] = {};
      for (int64_t m = 0; m < N; ++m) {
        const A *g = grad.row(m), *line = x.row(m) + j;
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

// Calls run(worker, b, strip, part) for every strip of `batch` sequences.
template <typename T, typename Run>
void for_each_strip(const Problem& p, const Strips<T>& strips, int64_t batch, Run&& run) {
  const int64_t tasks = batch * strips.groups * strips.count;
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    Worker<T> worker(p, strips);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t strip = i % strips.count,
                    head = i / strips.count % strips.groups * strips.heads;
      const int64_t first = strip * strips.steps;
      run(worker, i / strips.count / strips.groups, strip,
          Part{head, std::min(strips.heads, p.H - head), first,
               std::min(strips.steps, p.T - first)});
    }
  });
}

// Convolves x with the weights, or the output's gradient with the mirrored ones.
Tensor convolve(const Tensor& x, const Tensor& weight, int64_t padding, bool mirrored) {
  const Problem p(x, weight.sizes(), padding);
  check_alike(weight, x, "weight");
  Tensor out = make_like(x);
  prefer_huge_pages(out);
  const auto xs = strides(x), ys = strides(out);
  const auto ws = weight_strides(weight);
  dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    for_each_strip<T>(p, {p, by_lines(xs)}, p.B, [&](auto& worker, auto b, auto, const Part& part) {
      worker.convolve(weights<T>(weight, ws, b), ws, at<T>(x, b), xs, at<T>(out, b), ys, part,
                      mirrored);
    });
  });
  return out;
}

Tensor forward(const Tensor& x, const Tensor& weight, int64_t padding) {
  return convolve(x, weight, padding, false);
}

Tensor grad_input(const Tensor& grad, const Tensor& weight, int64_t padding) {
  return convolve(grad, weight, padding, true);
}

// The gradient of weights that each step has of its own, summed over the batch where sequences
// share them.
template <typename T>
void grad_weight_of_steps(const Problem& p, const Tensor& grad, const Tensor& x, Tensor& out) {
  const auto gs = strides(grad), xs = strides(x);
  const auto os = weight_strides(out);
  for_each_strip<T>(p, {p, by_lines(xs) || by_lines(gs)}, p.weight_batch(),
                    [&](auto& worker, auto b, auto, const Part& part) {
                      worker.grad_weight_of_steps(at<T>(grad, b), gs, at<T>(x, b), xs,
                                                  const_cast<T*>(weights<T>(out, os, b)), os,
                                                  p.batch_shared ? p.B : 1, part);
                    });
}

// The gradient of weights that all steps share: each strip has a partial sum, and these are added
// in order.
template <typename T>
void grad_weight_over_time(const Problem& p, const Tensor& grad, const Tensor& x, Tensor& out) {
  const auto gs = strides(grad), xs = strides(x);
  const auto os = weight_strides(out);
  const Strips<T> strips(p, by_lines(xs) || by_lines(gs));
  std::vector<double> parts(p.B * strips.count * p.H * p.K);
  const auto sums = [&](int64_t b, int64_t strip, int64_t h) {
    return parts.begin() + ((b * strips.count + strip) * p.H + h) * p.K;
  };
  for_each_strip<T>(p, strips, p.B, [&](auto& worker, auto b, auto strip, const Part& part) {
    worker.grad_weight_over_time(at<T>(grad, b), gs, at<T>(x, b), xs, part, [&](int64_t h) {
      const auto to = sums(b, strip, h);
      for (int64_t j = 0; j < p.K; ++j) to[j] += worker.totals[j];
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
