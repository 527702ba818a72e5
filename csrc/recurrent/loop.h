// All that generated time loops in C++ include.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "recurrent/library.h"
#include "recurrent/math.h"
#include "recurrent/product.h"
#include "recurrent/threads.h"

namespace hoconv::recurrent {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

// OpenMP's own max passes over NaN.
#pragma omp declare reduction(largest : float, double : omp_out = maximum(omp_out, omp_in)) \
    initializer(omp_priv = omp_orig)

// Whether threads share each of T steps of B rows, instead of taking rows through all of them, of a
// loop whose weights have so many values.
inline bool shares_steps(int64_t T, int64_t B, int64_t values) {
  constexpr int64_t kOften = 64;       // rows that are worth packing a weight
  constexpr int64_t kLarge = 1 << 18;  // values of which threads multiply a row faster than one
  return T * B < kOften || (B < count_threads() && values >= kLarge);
}

// Copies rows begin to end of a matrix, which need not be contiguous, to one that is.
template <typename T>
void copy_rows(T* to, const T* from, int64_t begin, int64_t end, int64_t columns,
               int64_t row_stride, int64_t column_stride) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t column = 0; column < columns; ++column)
      to[row * columns + column] = from[row * row_stride + column * column_stride];
}

}  // namespace hoconv::recurrent
