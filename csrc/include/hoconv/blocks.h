// Cuts work into blocks whose sizes the compiler knows, so that the sums of a block stay in
// registers.
#pragma once

#include <cstdint>
#include <type_traits>

namespace hoconv {

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Calls f(N) with n as a std::integral_constant N. n is from 1 to Max.
template <int64_t Max, typename F>
inline void with_constant(int64_t n, F&& f) {
  if constexpr (Max > 1)
    if (n < Max) return with_constant<Max - 1>(n, f);
  f(std::integral_constant<int64_t, Max>{});
}

// Cuts n into as few blocks of at most Max as possible, of nearly equal sizes, and calls f(begin,
// N) for each.
template <int64_t Max, typename F>
inline void for_each_block(int64_t n, F&& f) {
  int64_t begin = 0;
  for (int64_t blocks = (n + Max - 1) / Max; blocks > 0; --blocks) {
    const int64_t size = (n - begin) / blocks;
    with_constant<Max>(size, [&](auto N) { f(begin, N); });
    begin += size;
  }
}

}  // namespace hoconv
