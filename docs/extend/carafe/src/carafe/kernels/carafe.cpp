// The three sums on a CPU, a row at a time: all columns of a row have their taps at the same
// distance, so that the compiler computes several at once.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "hoconv/accumulate.h"
#include "hoconv/tensor.h"

using hoconv::Tensor;

struct Sizes {
  int64_t B, C, H, W, k, s;

  Sizes(const Tensor& image, int64_t taps, int64_t subpixels, int64_t height, int64_t width)
      : B(image.size(0)),
        C(image.size(1)),
        H(height),
        W(width),
        k(std::lround(std::sqrt(taps))),
        s(std::lround(std::sqrt(subpixels))) {}

  std::vector<int64_t> image() const { return {B, C, H, W}; }
  std::vector<int64_t> weights() const { return {B, k * k, s * s, H, W}; }
  std::vector<int64_t> larger() const { return {B, C, s * H, s * W}; }

  int64_t x(int64_t b, int64_t c, int64_t i) const { return ((b * C + c) * H + i) * W; }
  int64_t weight(int64_t b, int64_t tap, int64_t pq, int64_t i) const {
    return (((b * k * k + tap) * s * s + pq) * H + i) * W;
  }
  // Of the first of a row's pixels; the next one is s further.
  int64_t out(int64_t b, int64_t c, int64_t pq, int64_t i) const {
    return ((b * C + c) * s * H + i * s + pq / s) * s * W + pq % s;
  }

  // Calls f(j, end) with the columns whose neighbour at distance d is inside the image.
  template <typename F>
  void columns(int64_t d, F&& f) const {
    for (int64_t j = std::max<int64_t>(0, -d); j < std::min(W, W - d); ++j) f(j);
  }
};

// Checks an argument that is read by a bare pointer: it has the dtype and device of `like`.
void check(const Tensor& t, const Tensor& like, const std::vector<int64_t>& sizes,
           const char* name) {
  hoconv::check_alike(t, like, name);
  STD_TORCH_CHECK(std::equal(sizes.begin(), sizes.end(), t.sizes().begin(), t.sizes().end()), name,
                  ": its shape does not fit the others");
}

// Calls f(b, row, sums) for every row of a result, on several threads; `sums` are W zeros.
template <typename A, typename F>
void for_each_row(const Sizes& n, int64_t rows, F&& f) {
  torch::stable::parallel_for(0, n.B * rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<A> sums(n.W);
    for (int64_t row = begin; row < end; ++row) {
      std::fill(sums.begin(), sums.end(), A{0});
      f(row / rows, row % rows, sums.data());
    }
  });
}

Tensor carafe(const Tensor& x, const Tensor& weight) {
  hoconv::check_floating(x, "x");
  const Tensor in = torch::stable::contiguous(x), by = torch::stable::contiguous(weight);
  const Sizes n(x, weight.size(1), weight.size(2), x.size(2), x.size(3));
  check(x, x, n.image(), "x");
  check(weight, x, n.weights(), "weight");
  Tensor out = torch::stable::new_empty(in, n.larger());
  hoconv::dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    using A = hoconv::acc_t<T>;
    const T* px = static_cast<const T*>(in.const_data_ptr());
    const T* pw = static_cast<const T*>(by.const_data_ptr());
    T* to = static_cast<T*>(out.mutable_data_ptr());
    for_each_row<A>(n, n.C * n.s * n.s * n.H, [&](int64_t b, int64_t row, A* sums) {
      const int64_t i = row % n.H, pq = row / n.H % (n.s * n.s), c = row / n.H / (n.s * n.s);
      for (int64_t tap = 0; tap < n.k * n.k; ++tap) {
        const int64_t di = tap / n.k - n.k / 2, dj = tap % n.k - n.k / 2;
        if (i + di < 0 || i + di >= n.H) continue;
        const T *from = px + n.x(b, c, i + di), *w = pw + n.weight(b, tap, pq, i);
        n.columns(
            dj, [&](int64_t j) { sums[j] += static_cast<A>(w[j]) * static_cast<A>(from[j + dj]); });
      }
      T* dst = to + n.out(b, c, pq, i);
      for (int64_t j = 0; j < n.W; ++j) dst[j * n.s] = static_cast<T>(sums[j]);
    });
  });
  return out;
}

Tensor grad_x(const Tensor& grad, const Tensor& weight) {
  hoconv::check_floating(grad, "grad");
  const Tensor in = torch::stable::contiguous(grad), by = torch::stable::contiguous(weight);
  const Sizes n(grad, weight.size(1), weight.size(2), weight.size(3), weight.size(4));
  check(grad, grad, n.larger(), "grad");
  check(weight, grad, n.weights(), "weight");
  Tensor out = torch::stable::new_empty(in, n.image());
  hoconv::dispatch_floating(grad, [&](auto zero) {
    using T = decltype(zero);
    using A = hoconv::acc_t<T>;
    const T* pg = static_cast<const T*>(in.const_data_ptr());
    const T* pw = static_cast<const T*>(by.const_data_ptr());
    T* to = static_cast<T*>(out.mutable_data_ptr());
    for_each_row<A>(n, n.C * n.H, [&](int64_t b, int64_t row, A* sums) {
      const int64_t i = row % n.H, c = row / n.H;
      for (int64_t tap = 0; tap < n.k * n.k; ++tap) {
        const int64_t di = tap / n.k - n.k / 2, dj = tap % n.k - n.k / 2;
        if (i - di < 0 || i - di >= n.H) continue;
        for (int64_t pq = 0; pq < n.s * n.s; ++pq) {
          const T *g = pg + n.out(b, c, pq, i - di), *w = pw + n.weight(b, tap, pq, i - di);
          n.columns(-dj, [&](int64_t j) {
            sums[j] += static_cast<A>(w[j - dj]) * static_cast<A>(g[(j - dj) * n.s]);
          });
        }
      }
      T* dst = to + n.x(b, c, i);
      for (int64_t j = 0; j < n.W; ++j) dst[j] = static_cast<T>(sums[j]);
    });
  });
  return out;
}

Tensor grad_weight(const Tensor& grad, const Tensor& x, std::vector<int64_t> size) {
  hoconv::check_floating(grad, "grad");
  const Tensor in = torch::stable::contiguous(grad), by = torch::stable::contiguous(x);
  const Sizes n(x, size.at(1), size.at(2), size.at(3), size.at(4));
  check(x, grad, n.image(), "x");
  check(grad, grad, n.larger(), "grad");
  STD_TORCH_CHECK(size == n.weights(), "size: expected (B, k * k, s * s, H, W)");
  Tensor out = torch::stable::new_empty(in, size);
  hoconv::dispatch_floating(grad, [&](auto zero) {
    using T = decltype(zero);
    using A = hoconv::acc_t<T>;
    const T* pg = static_cast<const T*>(in.const_data_ptr());
    const T* px = static_cast<const T*>(by.const_data_ptr());
    T* to = static_cast<T*>(out.mutable_data_ptr());
    for_each_row<A>(n, n.k * n.k * n.s * n.s * n.H, [&](int64_t b, int64_t row, A* sums) {
      const int64_t i = row % n.H, pq = row / n.H % (n.s * n.s), tap = row / n.H / (n.s * n.s);
      const int64_t di = tap / n.k - n.k / 2, dj = tap % n.k - n.k / 2;
      for (int64_t c = 0; c < n.C && i + di >= 0 && i + di < n.H; ++c) {
        const T *g = pg + n.out(b, c, pq, i), *from = px + n.x(b, c, i + di);
        n.columns(dj, [&](int64_t j) {
          sums[j] += static_cast<A>(g[j * n.s]) * static_cast<A>(from[j + dj]);
        });
      }
      T* dst = to + n.weight(b, tap, pq, i);
      for (int64_t j = 0; j < n.W; ++j) dst[j] = static_cast<T>(sums[j]);
    });
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(carafe, CPU, m) {
  m.impl("carafe.cpp", TORCH_BOX(&carafe));
  m.impl("grad_x.cpp", TORCH_BOX(&grad_x));
  m.impl("grad_weight.cpp", TORCH_BOX(&grad_weight));
}
