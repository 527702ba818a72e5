// The kernel on a GPU.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "hoconv/cuda_launch.cuh"

using hoconv::Tensor;

template <typename T, typename A>
__global__ void clip(const T* from, const T* limits, T* to, int64_t size, int64_t inner,
                     int64_t channels) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= size) return;
  const A scale = hoconv::widen<A>(limits[i / inner % channels]);
  to[i] = hoconv::narrow<T>(scale * tanh(hoconv::widen<A>(from[i]) / scale));
}

Tensor soft_clip(const Tensor& x, const Tensor& limit) {
  hoconv::check_floating(x, "x");
  hoconv::check_alike(limit, x, "limit");
  STD_TORCH_CHECK(limit.dim() == 1 && limit.size(0) == x.size(1), "limit: expected shape (C)");
  const Tensor in = torch::stable::contiguous(x), by = torch::stable::contiguous(limit);
  Tensor out = torch::stable::empty_like(in);
  if (x.numel() == 0) return out;
  const int64_t channels = x.size(1), inner = x.numel() / (x.size(0) * channels);
  const hoconv::Launch launch(x);  // the device and the stream of x
  hoconv::dispatch_cuda(x, [&](auto zero) {
    using T = decltype(zero);
    using A = hoconv::acc_t<T>;
    constexpr int kThreads = 256;
    clip<T, A><<<(x.numel() + kThreads - 1) / kThreads, kThreads, 0, launch.stream>>>(
        static_cast<const T*>(in.const_data_ptr()), static_cast<const T*>(by.const_data_ptr()),
        static_cast<T*>(out.mutable_data_ptr()), x.numel(), inner, channels);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(soft_clip, CUDA, m) { m.impl("soft_clip.cuda", TORCH_BOX(&soft_clip)); }
