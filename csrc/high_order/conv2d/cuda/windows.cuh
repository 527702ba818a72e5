// A call of the high-order convolution as the kernels take it, in 32 bits.
#pragma once

#include <algorithm>
#include <numeric>

#include "high_order/conv2d/cuda/kernels.cuh"

namespace hoconv::high_order::conv2d {

// An axis in 32 bits. Window m, of the output pixels m * scale ... m * scale + scale - 1, has its
// first tap at the position m * stride - before; positions outside 0 ... in - 1 are padding.
//
// Taps fall into phases: the taps first, first + phases, ... read one pixel in `stride`, and are
// `hop` windows apart. So windows of a phase that are `hop` apart read the same pixels.
struct Line {
  int in, out, windows, taps, step, stride, scale, before, after, phases, hop;
  Padding padding;

  explicit Line(const Axis& a)
      : in(a.in),
        out(a.out),
        windows(a.out / a.scale),
        taps(a.taps),
        step(a.step()),
        stride(a.stride),
        scale(a.scale),
        before(a.before),
        after(a.after()),
        padding(a.padding) {
    const int common = std::gcd(stride, step);
    phases = std::min(stride / common, taps), hop = step / common;
  }

  __device__ int first_position(int o) const { return o / scale * stride - before; }

  // The phase whose taps read a position; `taps` if there is none.
  __device__ int phase_of(int position) const {
    if (stride == 1) return 0;
    for (int first = 0; first < phases; ++first)
      if ((position + before - first * step) % stride == 0) return first;
    return taps;
  }

  __device__ bool is_inside(int position) const {
    return static_cast<unsigned>(position) < static_cast<unsigned>(in);
  }
  __device__ bool repeats() const { return padding > Padding::valid; }

  // As Axis::pixel_at.
  __device__ int pixel_at(int position) const {
    if (is_inside(position)) return position;
    if (padding == Padding::replicate) return position < 0 ? 0 : in - 1;
    if (padding == Padding::reflect) return position < 0 ? -position : in - 1 - (position - in + 1);
    return -1;
  }

  // Calls f(i, o) for every tap i and output pixel o that reads a pixel.
  template <typename F>
  __device__ void for_each_reader(int pixel, F&& f) const {
    const int last = in - 1;
    int low = pixel, high = pixel;  // positions of the pixel and of what replicates it
    if (padding == Padding::replicate) {
      if (pixel == 0) low = -before;
      if (pixel == last) high = last + after;
    }
    for (int position = low; position <= high; ++position) for_each_reader_at(position, f);
    if (padding != Padding::reflect) return;
    if (pixel > 0 && pixel <= before) for_each_reader_at(-pixel, f);
    if (pixel < last && last - pixel <= after) for_each_reader_at(last + (last - pixel), f);
  }

 private:
  // Of the windows that cover a position, one reads it by each `stride`th of its pixels.
  template <typename F>
  __device__ void for_each_reader_at(int position, F&& f) const {
    const int reach = (taps - 1) * step;
    const int to_first = position + before - reach;  // where the first such window would begin
    const int first = to_first <= 0 ? 0 : divide(to_first + stride - 1, stride);
    const int last = min(divide(position + before, stride), windows - 1);
    int offset = position + before - first * stride;  // of the position in its window
    for (int window = first; window <= last; ++window, offset -= stride) {
      const int i = divide(offset, step);
      if (i * step != offset) continue;
      for (int o = window * scale; o < (window + 1) * scale; ++o) f(i, o);
    }
  }
  // There is no instruction for it.
  __device__ static int divide(int a, int b) { return b == 1 ? a : a / b; }
};

// A problem in 32 bits.
struct Windows {
  int64_t B;
  int C, G;
  Line down, across;

  explicit Windows(const Problem& p) : B(p.B), C(p.C), G(p.G), down(p.down), across(p.across) {}
};

// The taps of an output pixel in turn, row by row, and the position y, z that each reads. With
// `Adjoint`, where neighbours read neighbours, those of a pixel of x, and the output pixel that
// reads it.
template <bool Adjoint = false>
struct Taps {
  const Line &down, &across;
  int left, y, z, j = 0;

  __device__ Taps(const Windows& p, int h, int w)
      : down(p.down), across(p.across), left(first(across, w)), y(first(down, h)), z(left) {}

  __device__ bool is_inside() const { return is_inside(down, y) && is_inside(across, z); }
  __device__ void next() {
    z += Adjoint ? -across.step : across.step;
    if (++j < across.taps) return;
    j = 0, z = left, y += Adjoint ? -down.step : down.step;
  }

 private:
  static __device__ int first(const Line& line, int pixel) {
    return Adjoint ? pixel + line.before : line.first_position(pixel);
  }
  static __device__ bool is_inside(const Line& line, int position) {
    return Adjoint ? static_cast<unsigned>(position) < static_cast<unsigned>(line.out)
                   : line.is_inside(position);
  }
};

}  // namespace hoconv::high_order::conv2d
