// Huge pages for outputs of hundreds of megabytes. The first touch of a 4 KiB page costs more than
// filling it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace hoconv {

// Asks the system for 2 MiB pages for a tensor that was just allocated. This is only a hint, which
// a system may ignore.
inline void prefer_huge_pages(const torch::stable::Tensor& t) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = uintptr_t{1} << 21;
  const auto begin = reinterpret_cast<uintptr_t>(t.data_ptr());
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = (begin + t.numel() * t.element_size()) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace hoconv
