// The high-order convolution on the CPU, forward and backward.
//
// The work is cut into strips: some rows of one image and group. A worker first copies the images
// of a strip into padded rows, in the type of the arithmetic, so that the inner loops know no
// borders, strides or dtypes; it copies the weights likewise, tap by tap, unless the loops can read
// them in place. The copies stay in the L2 cache. While a row is computed, later weights
// are prefetched. One thread sums each output element in a fixed order, so that the result does not
// depend on the number of threads. Images whose channels are last have loops of their own.
//
// B batch, C channels, G groups of channels.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "high_order/conv2d/cpu/channels_last.h"
#include "high_order/conv2d/cpu/readers.h"
#include "high_order/conv2d/cpu/tap_rows.h"
#include "high_order/conv2d/problem.h"
#include "high_order/padded_image.h"
#include "hoconv/blocks.h"
#include "hoconv/huge_pages.h"
#include "hoconv/vec.h"

namespace hoconv::high_order::conv2d {
namespace {

constexpr int64_t kChannelBlock = 4;  // channels that share a weight register
// The same in the forward of rows of a single register, which has no other sums to add meanwhile.
constexpr int64_t kNarrowChannelBlock = 8;
constexpr int64_t kTapBlock = 6;                   // weight gradients kept in registers at once
constexpr int64_t kStripBytes = int64_t{1} << 17;  // a small part of the L2 cache
constexpr int64_t kStripsAThread = 4;              // so that no thread waits long for the last
constexpr int64_t kRowsAhead = 4;  // by which weights that are read in place are prefetched

// Covers a row of W columns with blocks of registers and calls f(w, U) for each: U registers from
// column w on, U = Most first, then single ones. If W is not a multiple, the last register overlaps
// the one before it, so that nothing past the row is touched. A row shorter than a register takes
// one.
template <typename V, int64_t Most, typename F>
inline void for_each_register(int64_t W, F&& f) {
  constexpr std::integral_constant<int64_t, Most> most;
  constexpr std::integral_constant<int64_t, 1> one;
  int64_t w = 0;
  for (; w + Most * V::size <= W; w += Most * V::size) f(w, most);
  for (; w + V::size <= W; w += V::size) f(w, one);
  if (w < W) f(std::max<int64_t>(0, W - V::size), one);
}

// How the rows of all images and groups are cut into strips, each a task.
struct Strips {
  int64_t height, rows, per_image;

  Strips(const Problem& p, int64_t height, int64_t groups, int64_t most_rows) : height(height) {
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t fair = p.B * groups * height / (kStripsAThread * threads) + 1;
    rows = std::clamp<int64_t>(most_rows, 1, fair);
    per_image = (height + rows - 1) / rows;
  }

  // The padded weights of a strip, and so many channels of two images, take no more bytes.
  static Strips that_fit(const Problem& p, int64_t height, int64_t channels, int64_t element_size,
                         int64_t bytes) {
    const int64_t width = std::max(p.across.in, p.across.out) + TapPlaces(p.across).reach();
    const int64_t image = width * std::max<int64_t>(channels, 1);
    const int64_t row_bytes = (p.taps() * width + 2 * image) * element_size;
    return Strips(p, height, p.G, bytes / std::max<int64_t>(row_bytes, 1));
  }
};

// The images and weights of one strip, and the loops of one thread.
template <typename T>
struct Worker {
  using A = acc_t<T>;
  using V = Vec<A>;

  const Problem& p;
  const TapPlaces down, across;
  const Readers& down_readers;
  const int64_t rows;  // of a strip
  TapRows<T> x;        // all channels of the group, or those that the forward computes at once
  // The output's gradient. Where windows are plain its rows are padded, so that every pixel of x
  // can be read by mirrored taps: `above` rows, and columns `left` and `right`.
  const int64_t above, left, right;
  PaddedImage<T> grad;
  const int64_t width;         // of a row of weights
  Scratch<A> weights, buffer;  // (taps, rows, width); rows of output
  std::vector<int64_t> lines, mirrored_lines, mirrored_offsets;  // of the taps, from the first one
  // Where windows are not plain: the sums of a row of the gradient of x, and its gradients.
  std::optional<TapRows<T>> sums;
  const T* gradients = nullptr;
  ImageStrides gradient_strides;

  Worker(const Problem& p, const Readers& down_readers, int64_t rows, int64_t x_channels,
         bool needs_grad)
      : p(p),
        down(p.down),
        across(p.across),
        down_readers(down_readers),
        rows(rows),
        x(p.across, across, x_channels,
          (rows + p.down.scale - 1) / p.down.scale * p.down.stride + down.reach() + 1),
        above(p.is_plain() ? down.reach() - down.before : 0),
        left(p.is_plain() ? across.reach() - across.before : 0),
        right(p.is_plain() ? across.before + p.across.in - p.across.out : 0),
        grad(needs_grad ? p.group_channels() : 0, rows + (p.is_plain() ? down.reach() : 0),
             p.across.out, left, right),
        width(round_up(std::max(p.across.in, p.across.out) + across.reach() + V::size, V::size)) {
    if (needs_grad && !p.is_plain()) sums.emplace(p.across, across, p.group_channels(), 1);
    weights.resize(p.taps() * rows * width);
    buffer.resize(kNarrowChannelBlock * round_up(std::max(p.across.in, p.across.out), V::size));
    for (const int64_t at : down.at)
      lines.push_back(at * x.width()), mirrored_lines.push_back(-at * grad.width);
    for (const int64_t at : across.at) mirrored_offsets.push_back(-at);
  }

  static bool is_narrow(const Problem& p) { return p.across.out < 2 * V::size; }
  // The channels that the forward computes at once.
  static int64_t channel_block(const Problem& p) {
    return std::min(p.group_channels(), is_narrow(p) ? kNarrowChannelBlock : kChannelBlock);
  }

  A* weight_row(int64_t tap, int64_t r) { return weights.data + (tap * rows + r) * width; }
  // The position that the first tap of an output row reads.
  int64_t first_position(int64_t o) const { return o / p.down.scale * p.down.stride - down.before; }

  // Takes the rows of x that `count` output rows from `first` on read.
  void load_x(const T* image, const ImageStrides& s, int64_t first, int64_t count) {
    load_x(image, s, first, count, x.channels());
  }
  void load_x(const T* image, const ImageStrides& s, int64_t first, int64_t count,
              int64_t channels) {
    const int64_t begin = first_position(first);
    const int64_t end = first_position(first + count - 1) + down.reach() + 1;
    x.fill(image, s, channels, p.down, begin, end - begin);
  }
  // Takes those rows of the output's gradient.
  void load_grad(const T* image, const ImageStrides& s, int64_t first, int64_t count) {
    grad.fill(image, s, first - above, count + (p.is_plain() ? down.reach() : 0), p.down.out,
              p.across.out);
  }
  // Takes the output's gradient where it read `count` rows of x.
  void load_readers(const T* image, const ImageStrides& s, int64_t first, int64_t count) {
    if (p.is_plain()) load_grad(image, s, first, count);
    gradients = image, gradient_strides = s;
  }

  // out[c, h, w] = sum over taps of weight[tap, h, w] * x[c, y, z]
  void forward(const T* image, const ImageStrides& xs, const T* weight, const WeightStrides& ws,
               T* out, const ImageStrides& os, int64_t first, int64_t count, bool /*each*/) {
    const int64_t W = p.across.out;
    const bool in_place = std::is_same_v<T, A> && ws.w == 1 && W >= V::size;
    for (int64_t r = 0; r < count && !in_place; ++r) {
      const T* row = weight + (first + r) * ws.h;
      load_rows<T>(weight_row(0, r), rows * width, row, ws.tap, ws.w, p.taps(), W);
    }
    // The weights of a strip stay in the L2 cache, so that x is copied for a block of channels.
    const auto compute = [&](int64_t c, auto N) {
      load_x(image + c * xs.c, xs, first, count, N);
      for (int64_t r = 0; r < count; ++r) {
        const T* row = weight + (first + r) * ws.h;
        const A* tap_weight = in_place ? reinterpret_cast<const A*>(row) : weight_row(0, r);
        const int64_t next_tap = in_place ? ws.tap : rows * width;
        const T* next = row + (in_place ? kRowsAhead : count) * ws.h;
        const int64_t read = first_position(first + r) - first_position(first);
        apply<N, false>({x.row(0, read), x.plane(), lines.data(), x.offsets().data()}, tap_weight,
                        next_tap, next, ws, out + c * os.c + (first + r) * os.h, os, W);
      }
    };
    if (is_narrow(p))
      for_each_block<kNarrowChannelBlock>(p.group_channels(), compute);
    else
      for_each_block<kChannelBlock>(p.group_channels(), compute);
  }

  // grad_x[c, h, w] = sum over taps of weight[tap, h', w'] * grad[c, h', w'], for the output pixel
  // that reads h, w by the tap.
  void grad_input(const T* weight, const WeightStrides& ws, T* out, const ImageStrides& os,
                  int64_t first, int64_t count, bool /*each*/) {
    if (!p.is_plain()) return scatter(weight, ws, out, os, first, count);
    const int64_t reach = across.reach();
    const int64_t taps = p.across.taps, next_tap = rows * width;
    for (int64_t i = 0; i < p.down.taps; ++i) {
      const T* taps_of_row = weight + i * taps * ws.tap;
      for (int64_t r = 0; r < count; ++r) {
        A* row = weight_row(i * taps, r);
        const int64_t h = first + r - (down.at[i] - down.before);
        const bool read = h >= 0 && h < p.down.out;
        // Pads rows with zeros, which a shifted register reads past their ends.
        for (int64_t j = 0; j < taps; ++j) {
          std::fill_n(row + j * next_tap, read ? left : left + p.across.out + right, A(0));
          if (read) std::fill_n(row + j * next_tap + left + p.across.out, right, A(0));
        }
        if (read)
          load_rows<T>(row + left, next_tap, taps_of_row + h * ws.h, ws.tap, ws.w, taps,
                       p.across.out);
      }
    }
    for (int64_t r = 0; r < count; ++r) {
      const T* next = weight + (first + count + r + down.before) * ws.h;
      for_each_block<kChannelBlock>(grad.channels, [&](int64_t c, auto N) {
        apply<N, true>({grad.row(c, r + down.reach()) + reach, grad.plane(), mirrored_lines.data(),
                        mirrored_offsets.data()},
                       weight_row(0, r) + reach, rows * width, next, ws,
                       out + c * os.c + (first + r) * os.h, os, p.across.in);
      });
    }
  }

  // Padded rows of an image, and what is between what the taps of a pixel read.
  struct Pixels {
    const A* first;
    int64_t next_channel;
    const int64_t *lines, *offsets;
  };

  // Computes a row of N channels: the sum over taps of weights times pixels. If Mirrored, the
  // weights are read at the pixel that is read. `next` is the address of later weights, for the
  // prefetch; it may be past the last of them.
  template <int64_t N, bool Mirrored>
  void apply(const Pixels pixels, const A* tap_row, int64_t next_tap, const T* next,
             const WeightStrides& ws, T* row, const ImageStrides& os, int64_t W) {
    const bool direct = std::is_same_v<T, A> && os.w == 1 && W >= V::size;
    A* target = direct ? reinterpret_cast<A*>(row) : buffer.data;
    const int64_t pitch = direct ? os.c : round_up(W, V::size);
    const int64_t taps_down = p.down.taps, taps_across = p.across.taps;
    // Where the taps of a pixel are neighbours, each fetches a cache line of those of 16 pixels.
    constexpr int64_t line = 64 / sizeof(T);
    const int64_t next_plane = ws.tap == 1 ? line : ws.tap, next_column = ws.w;
    // Two registers at once: independent sums hide the latency of an addition.
    for_each_register<V, 2>(W, [=](int64_t w, auto U) {
      typename V::type acc[N][U] = {};
      const A* tap_weight = tap_row + w;
      const T* fetched = next + w * next_column;
      for (int64_t i = 0; i < taps_down; ++i) {
        const A* pixel_row = pixels.first + pixels.lines[i] + w;
        for (int64_t j = 0; j < taps_across; ++j, tap_weight += next_tap, fetched += next_plane) {
          __builtin_prefetch(fetched, 0, 2);
          const int64_t offset = pixels.offsets[j];
          for (int64_t u = 0; u < U; ++u) {
            const auto weight = V::load(tap_weight + (Mirrored ? offset : 0) + u * V::size);
            for (int64_t m = 0; m < N; ++m)
              acc[m][u] +=
                  weight * V::load(pixel_row + m * pixels.next_channel + offset + u * V::size);
          }
        }
      }
      for (int64_t m = 0; m < N; ++m)
        for (int64_t u = 0; u < U; ++u) V::store(target + m * pitch + w + u * V::size, acc[m][u]);
    });
    if (!direct)
      for (int64_t m = 0; m < N; ++m) store_row<T>(row + m * os.c, os.w, target + m * pitch, W);
  }

  // The gradient of x where windows are not plain. Each output row that read a row of x adds its
  // products to the places that its taps read.
  void scatter(const T* weight, const WeightStrides& ws, T* out, const ImageStrides& os,
               int64_t first, int64_t count) {
    const int64_t channels = sums->channels(), W = p.across.out;
    for (int64_t h = first; h < first + count; ++h) {
      sums->clear();
      for (const auto [pixel, tap] : down_readers.of(h)) {
        // Past the row, weights and gradients are zeros, which a last register adds.
        load_rows<T>(weight_row(0, 0), rows * width,
                     weight + tap * p.across.taps * ws.tap + pixel * ws.h, ws.tap, ws.w,
                     p.across.taps, W);
        for (int64_t c = 0; c < channels; ++c)
          load_row<T>(grad.row(c, 0),
                      gradients + c * gradient_strides.c + pixel * gradient_strides.h,
                      gradient_strides.w, W);
        for_each_block<kChannelBlock>(channels, [&](int64_t c, auto N) { add_products<N>(c); });
      }
      for (int64_t c = 0; c < channels; ++c)
        store_row<T>(out + c * os.c + h * os.h, os.w, sums->fold(c), p.across.in);
    }
  }

  // Adds a row of weights times gradients of N channels from c on, for every tap of a row.
  template <int64_t N>
  void add_products(int64_t c) {
    const auto& offsets = sums->offsets();
    for (int64_t w = 0; w < p.across.out; w += V::size) {
      typename V::type gradient[N];
      for (int64_t m = 0; m < N; ++m) gradient[m] = V::load(grad.row(c + m, 0) + w);
      for (int64_t j = 0; j < p.across.taps; ++j) {
        const auto factor = V::load(weight_row(j, 0) + w);
        for (int64_t m = 0; m < N; ++m) {
          A* sum = sums->row(c + m, 0) + offsets[j] + w;
          V::store(sum, V::load(sum) + factor * gradient[m]);
        }
      }
    }
  }

  // grad_weight[tap, h, w] = sum over c of grad[c, h, w] * x[c, y, z]
  void grad_weight(T* out, const WeightStrides& os, int64_t first, int64_t count, bool /*each*/) {
    for (int64_t r = 0; r < count; ++r) {
      const int64_t read = first_position(first + r) - first_position(first);
      for (int64_t i = 0; i < p.down.taps; ++i)
        for_each_block<kTapBlock>(p.across.taps, [&](int64_t j, auto N) {
          correlate<N>(i, j, r, x.row(0, read + down.at[i]));
        });
    }
    for (int64_t r = 0; r < count; ++r) {
      T* row = out + (first + r) * os.h;
      if (by_lines(os.tap, os.w))
        store_columns<T>(row, os.w, weight_row(0, r), rows * width, p.taps(), p.across.out);
      else
        for (int64_t tap = 0; tap < p.taps(); ++tap)
          stream_row<T>(row + tap * os.tap, os.w, weight_row(tap, r), p.across.out);
    }
  }

  // Computes a row of the weight gradient for N taps of row i, from column j on.
  template <int64_t N>
  void correlate(int64_t i, int64_t j, int64_t r, const A* x_row) {
    const int64_t channels = x.channels(), next_tap = rows * width;
    const int64_t next_x = x.plane(), next_grad = grad.plane();
    const A* grad_row = grad.row(0, r + above) + left;
    const int64_t* offsets = x.offsets().data() + j;
    A* out = weight_row(i * p.across.taps + j, r);
    for_each_register<V, 1>(p.across.out, [=](int64_t w, auto) {
      typename V::type acc[N] = {};
      const A* g = grad_row + w;
      const A* line = x_row + w;
      for (int64_t c = 0; c < channels; ++c, g += next_grad, line += next_x) {
        const auto factor = V::load(g);
        for (int64_t m = 0; m < N; ++m) acc[m] += factor * V::load(line + offsets[m]);
      }
      for (int64_t m = 0; m < N; ++m) V::store(out + m * next_tap + w, acc[m]);
    });
  }
};

// The first channel of group g of image b, and the weights of group g.
template <typename T>
const T* group(const Tensor& image, const Problem& p, int64_t b, int64_t g) {
  return static_cast<const T*>(image.const_data_ptr()) + b * image.stride(0) +
         g * p.group_channels() * image.stride(1);
}
template <typename T>
T* group(Tensor& image, const Problem& p, int64_t b, int64_t g) {
  return const_cast<T*>(group<T>(std::as_const(image), p, b, g));
}
template <typename T>
const T* weights(const Tensor& weight, int64_t b, int64_t g) {
  return static_cast<const T*>(weight.const_data_ptr()) + b * weight.stride(1) +
         g * weight.stride(2);
}
template <typename T>
T* weights(Tensor& weight, int64_t b, int64_t g) {
  return const_cast<T*>(weights<T>(std::as_const(weight), b, g));
}

// Calls run(worker, b, g, first row, row count) for every strip of images of this height, with a
// worker that takes x and the output's gradient, or the one that is needed. It computes group g;
// where channels are last g is 0, and the worker computes all groups.
template <typename T, typename Run>
void for_each_strip(const Problem& p, int64_t height, const Tensor* x, const Tensor* grad,
                    Run&& run) {
  if (p.B * height == 0) return;
  const bool last = has_channels_last<T>(p, {x ? x : grad, grad ? grad : x});
  // The forward needs none, and the padded rows of plain windows neither.
  const bool needs_readers = grad && (last || !p.is_plain());
  const Readers down = needs_readers ? Readers(p.down) : Readers();
  const Readers across = needs_readers && last ? Readers(p.across) : Readers();
  const auto with_workers = [&](int64_t groups, const Strips& strips, auto&& make_worker) {
    const int64_t tasks = p.B * groups * strips.per_image;
    torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
      auto worker = make_worker();
      for (int64_t i = begin; i < end; ++i) {
        const int64_t image = i / strips.per_image, first = i % strips.per_image * strips.rows;
        run(worker, image / groups, image % groups, first,
            std::min(strips.rows, strips.height - first));
      }
      stream_fence();
    });
  };
  if (last) {
    with_workers(1, Strips(p, height, 1, kLastRows),
                 [&] { return LastWorker<T>(p, down, across); });
  } else {
    const int64_t channels = grad ? p.group_channels() : Worker<T>::channel_block(p);
    // A strip copies the rows around it, too: the forward, which has no second image, takes more.
    const int64_t bytes = grad ? kStripBytes : 2 * kStripBytes;
    const Strips strips = Strips::that_fit(p, height, channels, sizeof(acc_t<T>), bytes);
    with_workers(p.G, strips,
                 [&] { return Worker<T>(p, down, strips.rows, x ? channels : 0, grad); });
  }
}

// The problem as the loops have it: groups of one channel, whose weights are neighbours, are
// channels of one group with a weight for each.
struct Grouping {
  Problem p;
  bool each = false;
};

template <typename T>
Grouping find_grouping(const Problem& p, bool neighbours,
                       std::initializer_list<const Tensor*> images) {
  Problem one_group = p;
  one_group.G = 1;
  if (p.G == p.C && neighbours && has_channels_last<T>(one_group, images)) return {one_group, true};
  return {p};
}

Tensor forward(const Tensor& x, const Tensor& weight, std::vector<int64_t> window) {
  const Problem p(x.sizes(), weight.sizes(), Window(window));
  check_floating(x, "x");
  check_alike(weight, x, "weight");
  Tensor out = make_output(x, p);
  if (out.numel() == 0) return out;
  prefer_huge_pages(out);
  const auto xs = image_strides(x), os = image_strides(out);
  const auto ws = weight_strides(weight);
  dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    const auto [problem, each] = find_grouping<T>(p, ws.g == 1, {&x});
    for_each_strip<T>(problem, p.down.out, &x, nullptr,
                      [&, each = each](auto& worker, auto b, auto g, auto first, auto count) {
                        worker.forward(group<T>(x, p, b, g), xs, weights<T>(weight, b, g), ws,
                                       group<T>(out, p, b, g), os, first, count, each);
                      });
  });
  return out;
}

void grad_input_into(Tensor& out, const Tensor& grad, const Tensor& weight, const Problem& p) {
  if (out.numel() == 0) return;
  prefer_huge_pages(out);
  const auto gs = image_strides(grad), os = image_strides(out);
  const auto ws = weight_strides(weight);
  dispatch_floating(grad, [&](auto zero) {
    using T = decltype(zero);
    const auto [problem, each] = find_grouping<T>(p, ws.g == 1, {&grad});
    for_each_strip<T>(problem, p.down.in, nullptr, &grad,
                      [&, each = each](auto& worker, auto b, auto g, auto first, auto count) {
                        worker.load_readers(group<T>(grad, p, b, g), gs, first, count);
                        worker.grad_input(weights<T>(weight, b, g), ws, group<T>(out, p, b, g), os,
                                          first, count, each);
                      });
  });
}

Tensor grad_input(const Tensor& grad, const Tensor& weight, std::vector<int64_t> size,
                  std::vector<int64_t> stride, std::vector<int64_t> window) {
  const Problem p(size, weight.sizes(), Window(window));
  check_gradient(grad, weight, p);
  Tensor out = make_strided(grad, size, stride);
  grad_input_into(out, grad, weight, p);
  return out;
}

void grad_weight_into(Tensor& out, const Tensor& grad, const Tensor& x, const Problem& p) {
  if (out.numel() == 0) return;
  prefer_huge_pages(out);
  const auto gs = image_strides(grad), xs = image_strides(x);
  const auto os = weight_strides(out);
  dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    const auto [problem, each] = find_grouping<T>(p, os.g == 1, {&x, &grad});
    for_each_strip<T>(problem, p.down.out, &x, &grad,
                      [&, each = each](auto& worker, auto b, auto g, auto first, auto count) {
                        worker.load_x(group<T>(x, p, b, g), xs, first, count);
                        worker.load_grad(group<T>(grad, p, b, g), gs, first, count);
                        worker.grad_weight(weights<T>(out, b, g), os, first, count, each);
                      });
  });
}

Tensor grad_weight(const Tensor& grad, const Tensor& x, std::vector<int64_t> size,
                   std::vector<int64_t> stride, std::vector<int64_t> window) {
  const Problem p(x.sizes(), size, Window(window));
  check_gradient(grad, x, p);
  Tensor out = make_strided(x, size, stride);
  grad_weight_into(out, grad, x, p);
  return out;
}

// Where the output is as high as x, both gradients are computed strip by strip, so that the
// output's gradient is read from memory once.
std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                    std::vector<int64_t> window) {
  const Problem p(x.sizes(), weight.sizes(), Window(window));
  check_gradient(grad, x, p);
  check_alike(weight, x, "weight");
  Tensor grad_x = make_like(x);
  Tensor grad_w = make_like(weight);
  if (!p.is_plain() || p.down.in != p.down.out || x.numel() == 0) {
    grad_input_into(grad_x, grad, weight, p);
    grad_weight_into(grad_w, grad, x, p);
    return {grad_x, grad_w};
  }
  prefer_huge_pages(grad_x);
  prefer_huge_pages(grad_w);
  const auto gs = image_strides(grad), xs = image_strides(x), gxs = image_strides(grad_x);
  const auto ws = weight_strides(weight), gws = weight_strides(grad_w);
  dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    const auto [problem, each] = find_grouping<T>(p, ws.g == 1 && gws.g == 1, {&x, &grad});
    for_each_strip<T>(problem, p.down.in, &x, &grad,
                      [&, each = each](auto& worker, auto b, auto g, auto first, auto count) {
                        worker.load_x(group<T>(x, p, b, g), xs, first, count);
                        worker.load_readers(group<T>(grad, p, b, g), gs, first, count);
                        worker.grad_weight(weights<T>(grad_w, b, g), gws, first, count, each);
                        worker.grad_input(weights<T>(weight, b, g), ws, group<T>(grad_x, p, b, g),
                                          gxs, first, count, each);
                      });
  });
  return {grad_x, grad_w};
}

}  // namespace
}  // namespace hoconv::high_order::conv2d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CPU, m) {
  m.impl("high_order_conv2d.cpp", TORCH_BOX(&hoconv::high_order::conv2d::forward));
  m.impl("high_order_conv2d_backward.cpp", TORCH_BOX(&hoconv::high_order::conv2d::backward));
  m.impl("high_order_conv2d_grad_input.cpp", TORCH_BOX(&hoconv::high_order::conv2d::grad_input));
  m.impl("high_order_conv2d_grad_weight.cpp", TORCH_BOX(&hoconv::high_order::conv2d::grad_weight));
}
