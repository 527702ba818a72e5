// Which output pixels read a pixel along an axis: the inverse of Axis::source.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "high_order/conv2d/problem.h"

namespace hoconv::high_order::conv2d {

class Readers {
 public:
  struct Reader {
    int64_t pixel, tap;  // of the output
  };
  struct Range {
    const Reader *first, *last;
    const Reader* begin() const { return first; }
    const Reader* end() const { return last; }
    int64_t size() const { return last - first; }
  };

  Readers() = default;
  explicit Readers(const Axis& axis) : ends_(axis.in + 1) {
    for_each(axis, [&](int64_t source, Reader) { ++ends_[source + 1]; });
    for (int64_t i = 0; i < axis.in; ++i) {
      most_ = std::max(most_, ends_[i + 1]);
      ends_[i + 1] += ends_[i];
    }
    readers_.resize(ends_.back());
    std::vector<int64_t> next(ends_.begin(), ends_.end());
    for_each(axis, [&](int64_t source, Reader reader) { readers_[next[source]++] = reader; });
  }

  // The readers of a pixel, in the order of the output's pixels, and of the taps of one.
  Range of(int64_t pixel) const {
    return {readers_.data() + ends_[pixel], readers_.data() + ends_[pixel + 1]};
  }
  int64_t most() const { return most_; }  // of a pixel

 private:
  std::vector<int64_t> ends_;
  std::vector<Reader> readers_;
  int64_t most_ = 0;

  template <typename F>
  static void for_each(const Axis& axis, F&& f) {
    for (int64_t o = 0; o < axis.out; ++o)
      for (int64_t i = 0; i < axis.taps; ++i)
        if (const int64_t source = axis.source(o, i); source >= 0) f(source, Reader{o, i});
  }
};

}  // namespace hoconv::high_order::conv2d
