// The three sums on a GPU: a thread for each element of a result.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "hoconv/cuda_launch.cuh"

using hoconv::Tensor;
using hoconv::widen;

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

  __device__ bool inside(int64_t i, int64_t j) const { return i >= 0 && i < H && j >= 0 && j < W; }
  __device__ int64_t x(int64_t b, int64_t c, int64_t i, int64_t j) const {
    return ((b * C + c) * H + i) * W + j;
  }
  __device__ int64_t weight(int64_t b, int64_t tap, int64_t pq, int64_t i, int64_t j) const {
    return (((b * k * k + tap) * s * s + pq) * H + i) * W + j;
  }
  __device__ int64_t out(int64_t b, int64_t c, int64_t pq, int64_t i, int64_t j) const {
    return ((b * C + c) * s * H + i * s + pq / s) * s * W + j * s + pq % s;
  }
};

struct Forward {
  template <typename A, typename T>
  static __device__ A sum(const Sizes& n, const T* x, const T* weight, int64_t at) {
    const int64_t J = at % (n.s * n.W), I = at / (n.s * n.W) % (n.s * n.H);
    const int64_t c = at / (n.s * n.W) / (n.s * n.H) % n.C,
                  b = at / (n.s * n.W) / (n.s * n.H) / n.C;
    const int64_t i = I / n.s, j = J / n.s, pq = I % n.s * n.s + J % n.s;
    A sum = 0;
    for (int64_t tap = 0; tap < n.k * n.k; ++tap) {
      const int64_t y = i + tap / n.k - n.k / 2, z = j + tap % n.k - n.k / 2;
      if (n.inside(y, z))
        sum += widen<A>(weight[n.weight(b, tap, pq, i, j)]) * widen<A>(x[n.x(b, c, y, z)]);
    }
    return sum;
  }
};

struct GradX {
  template <typename A, typename T>
  static __device__ A sum(const Sizes& n, const T* grad, const T* weight, int64_t at) {
    const int64_t j = at % n.W, i = at / n.W % n.H;
    const int64_t c = at / n.W / n.H % n.C, b = at / n.W / n.H / n.C;
    A sum = 0;
    for (int64_t tap = 0; tap < n.k * n.k; ++tap) {
      const int64_t y = i - tap / n.k + n.k / 2, z = j - tap % n.k + n.k / 2;
      for (int64_t pq = 0; pq < n.s * n.s && n.inside(y, z); ++pq)
        sum += widen<A>(weight[n.weight(b, tap, pq, y, z)]) * widen<A>(grad[n.out(b, c, pq, y, z)]);
    }
    return sum;
  }
};

struct GradWeight {
  template <typename A, typename T>
  static __device__ A sum(const Sizes& n, const T* grad, const T* x, int64_t at) {
    const int64_t j = at % n.W, i = at / n.W % n.H, pq = at / n.W / n.H % (n.s * n.s);
    const int64_t rest = at / n.W / n.H / (n.s * n.s), tap = rest % (n.k * n.k);
    const int64_t y = i + tap / n.k - n.k / 2, z = j + tap % n.k - n.k / 2;
    A sum = 0;
    for (int64_t c = 0, b = rest / (n.k * n.k); c < n.C && n.inside(y, z); ++c)
      sum += widen<A>(grad[n.out(b, c, pq, i, j)]) * widen<A>(x[n.x(b, c, y, z)]);
    return sum;
  }
};

template <typename Sum, typename A, typename T>
__global__ void compute(Sizes n, const T* a, const T* b, T* to, int64_t size) {
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at < size) to[at] = hoconv::narrow<T>(Sum::template sum<A>(n, a, b, at));
}

// Checks an argument that is read by a bare pointer: it has the dtype and device of `like`.
void check(const Tensor& t, const Tensor& like, const std::vector<int64_t>& sizes,
           const char* name) {
  hoconv::check_alike(t, like, name);
  STD_TORCH_CHECK(std::equal(sizes.begin(), sizes.end(), t.sizes().begin(), t.sizes().end()), name,
                  ": its shape does not fit the others");
}

template <typename Sum>
Tensor launch(const Sizes& n, const Tensor& a, const Tensor& b, const std::vector<int64_t>& size) {
  hoconv::check_floating(a, "x");
  const Tensor first = torch::stable::contiguous(a), second = torch::stable::contiguous(b);
  Tensor out = torch::stable::new_empty(first, size);
  if (out.numel() == 0) return out;
  const hoconv::Launch launch(a);  // the device and the stream
  hoconv::dispatch_cuda(a, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kThreads = 256;
    compute<Sum, hoconv::acc_t<T>>
        <<<(out.numel() + kThreads - 1) / kThreads, kThreads, 0, launch.stream>>>(
            n, static_cast<const T*>(first.const_data_ptr()),
            static_cast<const T*>(second.const_data_ptr()), static_cast<T*>(out.mutable_data_ptr()),
            out.numel());
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

Tensor carafe(const Tensor& x, const Tensor& weight) {
  const Sizes n(x, weight.size(1), weight.size(2), x.size(2), x.size(3));
  check(x, x, n.image(), "x");
  check(weight, x, n.weights(), "weight");
  return launch<Forward>(n, x, weight, n.larger());
}

Tensor grad_x(const Tensor& grad, const Tensor& weight) {
  const Sizes n(grad, weight.size(1), weight.size(2), weight.size(3), weight.size(4));
  check(grad, grad, n.larger(), "grad");
  check(weight, grad, n.weights(), "weight");
  return launch<GradX>(n, grad, weight, n.image());
}

Tensor grad_weight(const Tensor& grad, const Tensor& x, std::vector<int64_t> size) {
  const Sizes n(x, size.at(1), size.at(2), size.at(3), size.at(4));
  check(x, grad, n.image(), "x");
  check(grad, grad, n.larger(), "grad");
  STD_TORCH_CHECK(size == n.weights(), "size: expected (B, k * k, s * s, H, W)");
  return launch<GradWeight>(n, grad, x, size);
}

STABLE_TORCH_LIBRARY_IMPL(carafe, CUDA, m) {
  m.impl("carafe.cuda", TORCH_BOX(&carafe));
  m.impl("grad_x.cuda", TORCH_BOX(&grad_x));
  m.impl("grad_weight.cuda", TORCH_BOX(&grad_weight));
}
