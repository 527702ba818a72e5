// The three sums on a GPU: a thread for each element of a result.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

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
  return launch<Forward>(n, x, weight, {n.B, n.C, n.s * n.H, n.s * n.W});
}

Tensor grad_x(const Tensor& grad, const Tensor& weight) {
  const Sizes n(grad, weight.size(1), weight.size(2), weight.size(3), weight.size(4));
  return launch<GradX>(n, grad, weight, {n.B, n.C, n.H, n.W});
}

Tensor grad_weight(const Tensor& grad, const Tensor& x, std::vector<int64_t> size) {
  return launch<GradWeight>(Sizes(x, size[1], size[2], size[3], size[4]), grad, x, size);
}

STABLE_TORCH_LIBRARY_IMPL(carafe, CUDA, m) {
  m.impl("carafe.cuda", TORCH_BOX(&carafe));
  m.impl("grad_x.cuda", TORCH_BOX(&grad_x));
  m.impl("grad_weight.cuda", TORCH_BOX(&grad_weight));
}
