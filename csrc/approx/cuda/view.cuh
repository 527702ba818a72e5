// Operands of an approximate product, read where they lie: matrices of any strides, and windows of
// images, which are never unfolded.
//
// An index is up to three digits. A row's and a column's together say where an element is: the
// first digits by their strides; the second and third, of rows and columns of an image, by a sum,
// y = row part + column part, which may lie outside of the image, or between its pixels where those
// are `step` apart.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "approx/multipliers.h"
#include "common/cuda_launch.cuh"

namespace hoconv::approx {

// Division of numbers below 2^31 by one that is known before the kernel starts.
class Divide {
 public:
  explicit Divide(int64_t divisor) : divisor_(divisor) {
    while ((int64_t{1} << bits_) < divisor) ++bits_;
    if (bits_ > 0) factor_ = (uint64_t{1} << (31 + bits_)) / divisor + 1;
  }
  __device__ uint32_t operator()(uint32_t n, uint32_t& rest) const {
    const uint32_t quotient = bits_ == 0 ? n : __umulhi(n, factor_) >> (bits_ - 1);
    rest = n - quotient * divisor_;
    return quotient;
  }

 private:
  uint32_t divisor_, factor_ = 0;
  int bits_ = 0;
};

// An index as three digits, the last running fastest.
struct Digits {
  Divide n1, n2;
  Digits(int64_t n1, int64_t n2) : n1(n1), n2(n2) {}
  __device__ void split(uint32_t index, uint32_t (&digit)[3]) const {
    const uint32_t rest = n2(index, digit[2]);
    digit[0] = n1(rest, digit[1]);
  }
};

// Elements from the first of a tensor to its last.
inline int64_t span(const Tensor& t) {
  if (t.numel() == 0) return 0;
  int64_t elements = 1;
  for (int64_t d = 0; d < t.dim(); ++d) elements += (t.size(d) - 1) * t.stride(d);
  return elements;
}

// The same, or a copy where much lies between the elements, which would be prepared with them.
inline Tensor compact(const Tensor& t) {
  return span(t) > 2 * t.numel() ? torch::stable::contiguous(t) : t;
}

// What a row or a column adds to the place of an element.
struct alignas(16) Coordinate {
  int64_t offset;
  int y, x;
};

struct IndexMap {
  Digits digits;
  int64_t stride;              // of the first digit, in elements
  int y_step = 0, x_step = 0;  // of the second and third, in rows and columns
  int y_first = 0, x_first = 0;
};

constexpr int kFar = 1 << 30;  // more than four times a number of rows or columns of an image

// Element (i, k) of matrix n. Where there is none it is zero, or with `leaves_out` it is left out
// of the sum: -0.0, which no element is then.
struct View {
  const float* data;
  int64_t span;   // elements from there on that hold the operand, and others between
  int64_t batch;  // strides, in elements
  int64_t y_stride, x_stride;
  int height, width, y_every, x_every;  // of the image, and how far its pixels are apart
  IndexMap row, column;
  bool leaves_out;
  bool along_columns;  // neighbouring columns are neighbours in memory, rather than rows

  __device__ Coordinate row_coordinate(uint32_t index) const { return coordinate(row, index, 0); }
  __device__ Coordinate column_coordinate(uint32_t index) const {
    return coordinate(column, index, 1);
  }

  // Whether there is an element, and where.
  __device__ __forceinline__ bool find(const Coordinate& i, const Coordinate& k,
                                       int64_t& offset) const {
    offset = i.offset + k.offset;
    return (static_cast<unsigned>(i.y + k.y) < static_cast<unsigned>(height)) &
           (static_cast<unsigned>(i.x + k.x) < static_cast<unsigned>(width));
  }
  __device__ float operator()(int64_t matrix, const Coordinate& i, const Coordinate& k) const {
    int64_t offset;
    if (!find(i, k, offset)) return leaves_out ? -0.0f : 0.0f;
    const float value = __ldg(data + matrix * batch + offset);
    return leaves_out ? value + 0.0f : value;
  }

 private:
  // A row's y is a multiple of y_every and a rest, a column's one less a rest: the sum of two is a
  // multiple where the rests are the same. So is x. Another sum is made to lie outside of the
  // image.
  __device__ Coordinate coordinate(const IndexMap& map, uint32_t index, int up) const {
    uint32_t digit[3];
    map.digits.split(index, digit);
    int y = map.y_first + static_cast<int>(digit[1]) * map.y_step;
    int x = map.x_first + static_cast<int>(digit[2]) * map.x_step;
    const int apart_y = divide(y, y_every, up), apart_x = divide(x, x_every, up);
    return {digit[0] * map.stride + y * y_stride + x * x_stride, y + apart_y, x + apart_x};
  }
  // Divides, rounding down or up. Returns the rest, which is from 0 to by - 1, times more than any
  // quotient: of a row, or less than 0 of a column.
  __device__ static int divide(int& value, int by, int up) {
    if (by == 1) return 0;
    const int whole = value / by, rest = value - whole * by;
    value = whole + (up ? rest > 0 : -(rest < 0));
    return (up ? (rest > 0 ? rest - by : rest) : (rest < 0 ? rest + by : rest)) * (kFar / by);
  }
};

// Where the elements of the result are, which has no others.
struct Target {
  float* data;
  int64_t batch;
  Digits row_digits, column_digits;
  int64_t row[3], column[3];  // strides

  __device__ static int64_t offset(const Digits& digits, const int64_t (&stride)[3],
                                   uint32_t index) {
    uint32_t digit[3];
    digits.split(index, digit);
    return digit[0] * stride[0] + digit[1] * stride[1] + digit[2] * stride[2];
  }
};

// out[m, n] = sum over k of left[m, k] * right[n, k], for each of `batch` matrices.
struct Product {
  View left, right;
  Target out;
  int64_t batch, M, N, K;
};

void gemm(const std::string& multiplier, Product product, const Tensor& like, cudaStream_t stream);

}  // namespace hoconv::approx
