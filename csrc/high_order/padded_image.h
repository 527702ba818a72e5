// Rows of an image for the inner loops of the CPU: converted to the type of the arithmetic and
// padded with zeros, so that the loops know no borders, strides or dtypes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "high_order/image.h"
#include "hoconv/blocks.h"
#include "hoconv/vec.h"

namespace hoconv::high_order {

template <typename A>
struct Scratch {  // aligned, zeroed
  std::vector<A> storage;
  A* data = nullptr;
  void resize(int64_t n) {
    storage.assign(n + kVecBytes / sizeof(A), A(0));
    const auto address = reinterpret_cast<uintptr_t>(storage.data());
    data = reinterpret_cast<A*>((address + kVecBytes - 1) / kVecBytes * kVecBytes);
  }
};

// Rows of several channels, padded with zeros: column w of row r of channel c is at data[(c * rows
// + r) * width + left + w]. A register that starts at the last column ends within the row.
template <typename A>
struct PaddedRows {
  int64_t channels, rows, width, left;
  Scratch<A> scratch;

  PaddedRows(int64_t channels, int64_t rows, int64_t columns, int64_t left, int64_t right)
      : channels(channels), rows(rows), left(left) {
    width = round_up(left + columns + right + Vec<A>::size, Vec<A>::size);
    scratch.resize(channels * rows * width);
  }

  int64_t plane() const { return rows * width; }
  A* row(int64_t c, int64_t r) { return scratch.data + (c * rows + r) * width; }
  const A* row(int64_t c, int64_t r) const { return scratch.data + (c * rows + r) * width; }
};

template <typename T>
struct PaddedImage : PaddedRows<acc_t<T>> {
  using PaddedRows<acc_t<T>>::PaddedRows;

  // Copies rows first to first + count - 1 of an image of H x W. Rows out of range become zero.
  void fill(const T* image, const ImageStrides& s, int64_t first, int64_t count, int64_t H,
            int64_t W) {
    for (int64_t c = 0; c < this->channels; ++c) {
      for (int64_t r = 0; r < count; ++r) {
        acc_t<T>* row = this->row(c, r) + this->left;
        const int64_t h = first + r;
        if (h >= 0 && h < H)
          load_row<T>(row, image + c * s.c + h * s.h, s.w, W);
        else
          std::fill_n(row, W, acc_t<T>(0));
      }
    }
  }
};

}  // namespace hoconv::high_order
