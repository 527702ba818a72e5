// Prefetches a row of an image into registers while the row before it is computed, then stores it.
// A thread prefetches up to kItems elements; the rest of a longer row is loaded when it is stored.
//
// H height, W width.
#pragma once

#include "high_order/layer/cuda/layer.cuh"

namespace hoconv::high_order::layer::sm80 {

constexpr int kItems = 2;

template <typename T, bool WithNext>
struct Row {
  Image<const T> image;
  int64_t b;
  int h, first_channel, channels, first_column, columns;  // h: the next row
  int H, W;
  const T* from[kItems];  // the elements in row h
  int at[kItems];         // (channel << 16 | column), or -1 for none
  unsigned exists;        // bit 2i: item i is in the image; bit 2i + 1: so is its right neighbour
  T value[kItems], next[kItems];

  __device__ Row(const Image<const T>& image, int64_t b, int h, int first_channel, int channels,
                 int first_column, int columns, const Layer& l)
      : image(image),
        b(b),
        h(h),
        first_channel(first_channel),
        channels(channels),
        first_column(first_column),
        columns(columns),
        H(l.H),
        W(l.W),
        exists(0) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int n = threadIdx.x + i * blockDim.x, c = n / columns, q = n - c * columns;
      const int column = first_column + q;
      from[i] = image.at(b, first_channel + c, h, column);
      at[i] = n < channels * columns ? c << 16 | q : -1;
      if (at[i] >= 0 && column >= 0 && column < W) exists |= 1u << 2 * i;
      if (at[i] >= 0 && column + 1 >= 0 && column + 1 < W) exists |= 2u << 2 * i;
    }
  }
  __device__ void load() {
    const unsigned here = h >= 0 && h < H ? exists : 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      value[i] = next[i] = narrow<T>(0.0f);
      if (here & 1u << 2 * i) value[i] = *from[i];
      if (WithNext && here & 2u << 2 * i) next[i] = from[i][image.s.w];
      from[i] += image.s.h;
    }
    ++h;
  }
  // Calls f(channel, column, value, next) for the elements of the last loaded row; channel and
  // column count from the first.
  template <typename F>
  __device__ void store(F&& f) {
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (at[i] >= 0) f(at[i] >> 16, at[i] & 0xffff, value[i], next[i]);
    const bool inside = h - 1 >= 0 && h - 1 < H;
    for (int n = threadIdx.x + kItems * blockDim.x; n < channels * columns; n += blockDim.x) {
      const int c = n / columns, q = n - c * columns, column = first_column + q;
      T one = narrow<T>(0.0f), two = one;
      const T* source = image.at(b, first_channel + c, h - 1, column);
      if (inside && column >= 0 && column < W) one = *source;
      if (WithNext && inside && column + 1 >= 0 && column + 1 < W) two = source[image.s.w];
      f(c, q, one, two);
    }
  }
};

}  // namespace hoconv::high_order::layer::sm80
