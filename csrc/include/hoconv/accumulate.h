// The type in which sums are accumulated: double for float64, float for all others.
#pragma once

#include <type_traits>

namespace hoconv {

template <typename T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

}  // namespace hoconv
