// The kernel on a CPU. hoconv/*.h are described in hoconv's docs/extend/compiled_code.md.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "hoconv/accumulate.h"
#include "hoconv/tensor.h"

using hoconv::Tensor;

Tensor soft_clip(const Tensor& x, const Tensor& limit) {
  hoconv::check_floating(x, "x");
  hoconv::check_alike(limit, x, "limit");  // its dtype and device are those of x
  STD_TORCH_CHECK(limit.dim() == 1 && limit.size(0) == x.size(1), "limit: expected shape (C)");
  const Tensor in = torch::stable::contiguous(x), by = torch::stable::contiguous(limit);
  Tensor out = torch::stable::empty_like(in);
  const int64_t channels = x.size(1), planes = x.size(0) * channels;
  const int64_t inner = planes == 0 ? 0 : x.numel() / planes;
  hoconv::dispatch_floating(x, [&](auto zero) {
    using T = decltype(zero);
    using A = hoconv::acc_t<T>;  // float for half precision
    const T* from = static_cast<const T*>(in.const_data_ptr());
    const T* limits = static_cast<const T*>(by.const_data_ptr());
    T* to = static_cast<T*>(out.mutable_data_ptr());
    const auto compute = [&](int64_t begin, int64_t end) {
      for (int64_t plane = begin; plane < end; ++plane) {
        const A scale = static_cast<A>(limits[plane % channels]);
        for (int64_t i = plane * inner; i < (plane + 1) * inner; ++i)
          to[i] = static_cast<T>(scale * std::tanh(static_cast<A>(from[i]) / scale));
      }
    };
    constexpr int64_t kGrain = 1 << 14;  // elements that are worth another thread
    torch::stable::parallel_for(0, planes, kGrain / (inner + 1) + 1, compute);
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(soft_clip, CPU, m) { m.impl("soft_clip.cpp", TORCH_BOX(&soft_clip)); }
