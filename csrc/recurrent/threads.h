// The threads of PyTorch, through its C interface. No header of the C++ library is included, so
// that a generated file compiles in a second.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <cstdint>

namespace hoconv::recurrent {

// Calls f(begin, end) for ranges that cover n rows, on the threads of PyTorch. Returns whether it
// succeeded.
template <typename F>
bool for_rows(int64_t n, int64_t grain, const F& f) {
  return torch_parallel_for(
             0, n, grain,
             [](int64_t begin, int64_t end, void* context) {
               (*static_cast<const F*>(context))(begin, end);
             },
             const_cast<F*>(&f)) == 0;
}

// The number of threads on which it calls f.
inline int64_t count_threads() {
  uint32_t found = 1;
  torch_get_num_threads(&found);
  return found;
}

}  // namespace hoconv::recurrent
