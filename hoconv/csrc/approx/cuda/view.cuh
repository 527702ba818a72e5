// Operands of an approximate product, read where they lie: matrices of any strides, and windows of
// images, which are never unfolded.
//
// An index is up to three digits. A row's and a column's together say where an element is: the
// first digits by their strides; the second and third, of rows and columns of an image, by a sum,
// y = row part + column part, which may lie outside of the image, or between its pixels where those
// are `step` apart.
#pragma once

#include <cstdint>

#include "approx/multipliers.h"
#include "cuda_launch.cuh"

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

// What a row or a column adds to the place of an element.
struct Part {
  int64_t offset;
  int y, x;
};

struct Axis {
  Digits digits;
  int64_t stride;      // of the first digit, in elements
  int y_step, x_step;  // of the second and third, in rows and columns
  int y_first, x_first;
};

// Element (i, k) of matrix n. Where there is none it is zero, or with `leaves_out` it is left out
// of the sum: -0.0, which no element is then.
struct View {
  const float* data;
  int64_t batch;  // strides, in elements
  int64_t y_stride, x_stride;
  int height, width, y_every, x_every;  // of the image, and how far its pixels are apart
  Axis row, column;
  bool leaves_out;
  bool along_columns;  // neighbouring columns are neighbours in memory, rather than rows

  __device__ Part part(const Axis& axis, uint32_t index) const {
    uint32_t digit[3];
    axis.digits.split(index, digit);
    Part p{digit[0] * axis.stride, axis.y_first + static_cast<int>(digit[1]) * axis.y_step,
           axis.x_first + static_cast<int>(digit[2]) * axis.x_step};
    if (!apart()) p.offset += p.y * y_stride + p.x * x_stride;
    return p;
  }
  // Loads into `value` where there is an element, and does not wait for it; else says so.
  __device__ bool load(const float* matrix, const Part& i, const Part& k, float& value) const {
    int y = i.y + k.y, x = i.x + k.x;
    int64_t offset = i.offset + k.offset;
    bool exists = true;
    if (apart()) {
      exists = y >= 0 && x >= 0 && y % y_every == 0 && x % x_every == 0;
      y /= y_every, x /= x_every;
      offset += y * y_stride + x * x_stride;
    }
    exists = exists && static_cast<unsigned>(y) < static_cast<unsigned>(height) &&
             static_cast<unsigned>(x) < static_cast<unsigned>(width);
    if (exists) value = __ldg(matrix + offset);
    return exists;
  }
  // Of what was loaded, or not.
  __device__ float element(float value, bool exists) const {
    return exists ? (leaves_out ? value + 0.0f : value) : (leaves_out ? -0.0f : 0.0f);
  }
  __device__ float operator()(int64_t matrix, const Part& i, const Part& k) const {
    float value = 0;
    const bool exists = load(data + matrix * batch, i, k, value);
    return element(value, exists);
  }

 private:
  __device__ bool apart() const { return y_every > 1 || x_every > 1; }
};

// Where the elements of the result are.
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
