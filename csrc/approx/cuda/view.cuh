// Operands of an approximate product, read in place: matrices of any strides, and windows of
// images, which are never unfolded.
//
// The index of a row or column of the matrix is split into up to three digits, which give its
// coordinate: the first digit a memory offset, the second and third a y and an x in the image. An
// element's coordinate is the sum of its row's and its column's. y and x may be out of range, or
// lie between the pixels of an image whose pixels are y_every and x_every apart.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <string>
#include <utility>

#include "approx/problem.h"
#include "hoconv/cuda_launch.cuh"

namespace hoconv::approx {

// Divides numbers below 2^31 by a constant of the launch, by a multiplication.
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

// Splits an index into three digits, the last running fastest.
struct Digits {
  Divide n1, n2;
  Digits(int64_t n1, int64_t n2) : n1(n1), n2(n2) {}
  __device__ void split(uint32_t index, uint32_t (&digit)[3]) const {
    const uint32_t rest = n2(index, digit[2]);
    digit[0] = n1(rest, digit[1]);
  }
};

// The number of elements in memory from the first of a tensor to its last.
inline int64_t span(const Tensor& t) {
  if (t.numel() == 0) return 0;
  int64_t elements = 1;
  for (int64_t d = 0; d < t.dim(); ++d) elements += (t.size(d) - 1) * t.stride(d);
  return elements;
}

// The tensor, or a contiguous copy if it uses less than half of the memory that it spans: all of
// that would be packed.
inline Tensor compact(const Tensor& t) {
  return span(t) > 2 * t.numel() ? torch::stable::contiguous(t) : t;
}

// The coordinate of a row or of a column.
struct alignas(16) Coordinate {
  int64_t offset;
  int y, x;
};

// How an index becomes a coordinate.
struct IndexMap {
  Digits digits;
  int64_t stride;              // of the first digit, in elements
  int y_step = 0, x_step = 0;  // of the second and third digit, in pixels
  int y_first = 0, x_first = 0;
};

constexpr int kFar = 1 << 30;  // more than four times the rows or columns of an image

// A batch of matrices. An element that does not exist is zero or, with `leaves_out`, is left out of
// the sum: it reads as -0.0, which no other element does then.
struct View {
  const float* data;
  int64_t span;   // elements from `data` to the last, see span()
  int64_t batch;  // strides, in elements
  int64_t y_stride, x_stride;
  int height, width, y_every, x_every;  // of the image; the distance of its pixels
  IndexMap row, column;
  bool leaves_out;
  bool along_columns;  // columns, not rows, are neighbours in memory

  __device__ Coordinate row_coordinate(uint32_t index) const { return coordinate(row, index, 0); }
  __device__ Coordinate column_coordinate(uint32_t index) const {
    return coordinate(column, index, 1);
  }

  // Returns whether the element exists, and sets its offset.
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
  // Divides y by y_every, for rows rounding down and for columns rounding up. The quotients of a
  // row and a column add up if their remainders cancel; otherwise the element lies between pixels,
  // and the remainders, times kFar, move its y out of range. x likewise.
  __device__ Coordinate coordinate(const IndexMap& map, uint32_t index, int up) const {
    uint32_t digit[3];
    map.digits.split(index, digit);
    int y = map.y_first + static_cast<int>(digit[1]) * map.y_step;
    int x = map.x_first + static_cast<int>(digit[2]) * map.x_step;
    const int apart_y = divide(y, y_every, up), apart_x = divide(x, x_every, up);
    return {digit[0] * map.stride + y * y_stride + x * x_stride, y + apart_y, x + apart_x};
  }
  // Divides `value` by `by`, rounding down or up. Returns the remainder, in units that exceed any
  // quotient: positive for a row, negative for a column.
  __device__ static int divide(int& value, int by, int up) {
    if (by == 1) return 0;
    const int whole = value / by, rest = value - whole * by;
    value = whole + (up ? rest > 0 : -(rest < 0));
    return (up ? (rest > 0 ? rest - by : rest) : (rest < 0 ? rest + by : rest)) * (kFar / by);
  }
};

// The result, whose elements all exist.
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
  bool left_may_be_sparse = false;  // its elements may be mostly zeros

  // The same product with its operands exchanged: the multipliers with a name are commutative.
  Product swapped() const {
    Product p = *this;
    std::swap(p.left, p.right);
    std::swap(p.M, p.N);
    std::swap(p.out.row, p.out.column);
    std::swap(p.out.row_digits, p.out.column_digits);
    p.left_may_be_sparse = false;
    return p;
  }
};

// Computes a product that is not empty by one multiplier.
template <typename Multiplier>
struct Gemm {
  static void run(const Product& p, const Tensor& like, cudaStream_t stream);
};

void gemm(const Chosen& multiplier, const Product& p, const Tensor& like, cudaStream_t stream);
void gemm_by_table(const MantissaTable& table, const Product& p, cudaStream_t stream);

}  // namespace hoconv::approx
