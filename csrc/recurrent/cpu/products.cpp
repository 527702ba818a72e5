// Products of whole sequences, before and after a time loop, by the tiles that the loop uses
// itself.

#include "recurrent/outer.h"

using namespace hoconv::recurrent;

#define HOCONV_PRODUCTS(T)                                                                       \
  extern "C" int linear_##T(T* out, const T* x, const T* matrix, int64_t row_stride,             \
                            int64_t column_stride, const T* added, int64_t rows, int64_t inner,  \
                            int64_t columns, void* memory) {                                     \
    return !multiply_all(out, x, matrix, row_stride, column_stride, added, rows, inner, columns, \
                         memory);                                                                \
  }                                                                                              \
  extern "C" int outer_##T(T* out, const T* g, const T* x, int64_t rows, int64_t m, int64_t n,   \
                           T* packed) {                                                          \
    return !outer(out, g, x, rows, m, n, packed);                                                \
  }
HOCONV_PRODUCTS(float)
HOCONV_PRODUCTS(double)
