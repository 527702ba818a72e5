// Rows of an image as the taps of a window read them, for loops over neighbouring output pixels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "high_order/conv2d/problem.h"
#include "high_order/padded_image.h"
#include "hoconv/blocks.h"
#include "hoconv/vec.h"

namespace hoconv::high_order::conv2d {

// Where the taps of a window are along an axis, in pixels from the first. A tap that is further out
// than the image is large is moved nearer: it reads what is beside the image in either place, and
// no row here need be longer than three images.
struct TapPlaces {
  std::vector<int64_t> at;
  int64_t before;  // pixels of padding before the first pixel

  explicit TapPlaces(const Axis& axis) {
    for (int64_t i = 0; i < axis.taps; ++i) {
      const int64_t position = i * axis.dilation - axis.before;
      at.push_back(axis.padding == Padding::valid ? position
                                                  : std::clamp(position, -axis.in, axis.in));
    }
    before = -at[0];
    for (int64_t& place : at) place += before;
  }
  int64_t reach() const { return at.back(); }  // from the first tap to the last
};

// Output pixels 0, 1, 2 ... of a row read by tap j what is at offsets()[j], offsets()[j] + 1 ... of
// a row here. So with a stride the pixels of a row are dealt out to runs, one for every remainder
// that a tap has of the stride; with a scale each pixel of a run is there `scale` times.
template <typename T>
class TapRows {
  using A = acc_t<T>;

 public:
  TapRows(const Axis& axis, const TapPlaces& taps, int64_t channels, int64_t rows)
      : axis_(axis), before_(taps.before), channels_(channels), rows_(rows), line_(axis.in) {
    std::vector<int64_t> remainders;
    for (const int64_t at : taps.at) {
      const int64_t remainder = at % axis.stride;
      const auto found = std::find(remainders.begin(), remainders.end(), remainder);
      const int64_t run = found - remainders.begin();
      if (found == remainders.end()) remainders.push_back(remainder);
      offsets_.push_back(run);  // of which the width is not known yet
    }
    const int64_t read = axis.out + taps.reach() / axis.stride * axis.scale;
    // A register that starts at the last pixel ends within the run.
    const int64_t run_width = round_up(read + Vec<A>::size, Vec<A>::size);
    for (size_t j = 0; j < offsets_.size(); ++j)
      offsets_[j] = offsets_[j] * run_width + taps.at[j] / axis.stride * axis.scale;
    width_ = remainders.size() * run_width;
    pixels_.assign(axis.is_plain() ? 0 : width_, -1);
    for (size_t run = 0; run < remainders.size() && !axis.is_plain(); ++run)
      for (int64_t u = 0; u < read; ++u)
        pixels_[run * run_width + u] =
            axis.pixel_at(u / axis.scale * axis.stride + remainders[run] - before_);
    scratch_.resize(channels * rows * width_);
  }

  int64_t channels() const { return channels_; }
  int64_t width() const { return width_; }
  int64_t plane() const { return rows_ * width_; }
  const std::vector<int64_t>& offsets() const { return offsets_; }
  A* row(int64_t c, int64_t r) { return scratch_.data + (c * rows_ + r) * width_; }
  const A* row(int64_t c, int64_t r) const { return scratch_.data + (c * rows_ + r) * width_; }

  // Copies the rows of the first channels of an image that are `count` positions of `down` from
  // `first` on.
  void fill(const T* image, const ImageStrides& s, int64_t channels, const Axis& down,
            int64_t first, int64_t count) {
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t r = 0; r < count; ++r) {
        A* target = row(c, r);
        const int64_t h = down.pixel_at(first + r);
        const T* source = image + c * s.c + h * s.h;
        if (h < 0) {
          std::fill_n(target, width_, A(0));
        } else if (axis_.is_plain()) {
          load_row<T>(target + before_, source, s.w, axis_.in);
        } else {
          load_row<T>(line_.data(), source, s.w, axis_.in);
          for (int64_t i = 0; i < width_; ++i)
            target[i] = pixels_[i] < 0 ? A(0) : line_[pixels_[i]];
        }
      }
    }
  }

  void clear() { std::fill(scratch_.storage.begin(), scratch_.storage.end(), A(0)); }

  // Returns row 0 of a channel with what was added to the places of a pixel summed: the pixels of
  // the image's row, until the next call.
  const A* fold(int64_t c) {
    std::fill(line_.begin(), line_.end(), A(0));
    const A* sums = row(c, 0);
    for (int64_t i = 0; i < width_; ++i) {
      const int64_t pixel = axis_.is_plain() ? axis_.pixel_at(i - before_) : pixels_[i];
      if (pixel >= 0) line_[pixel] += sums[i];
    }
    return line_.data();
  }

 private:
  const Axis axis_;
  const int64_t before_, channels_, rows_;
  int64_t width_;
  std::vector<int64_t> offsets_;
  std::vector<int64_t> pixels_;  // where windows are not plain: at each place of a row; -1: a zero
  std::vector<A> line_;
  Scratch<A> scratch_;
};

}  // namespace hoconv::high_order::conv2d
