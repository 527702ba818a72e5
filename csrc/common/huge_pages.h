// Outputs of hundreds of megabytes: the first touch of each of their pages costs more than filling
// it, unless the pages are large.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace hoconv {

// Asks for 2 MiB pages under a tensor that was just allocated, where the system leaves that to the
// program. A hint: nothing depends on it.
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
