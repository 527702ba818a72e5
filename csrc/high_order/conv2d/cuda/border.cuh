// The kernels of what reads the border's pixels again outside the image: of the output a frame, as
// wide as windows reach over the border, and of the gradient of x the pixels that are read so. The
// other kernels take what is outside for zeros; these write the same elements afterwards.
//
// A thread owns V channels of one pixel of what it writes: of the output, whose rows of taps a few
// threads share; of the gradient of x, for which it gathers what every output pixel that reads the
// pixel has; or of the weights' gradient, of which a few threads share the channels. As in
// general.cuh, neighbouring threads own neighbouring channels where these are last, and
// neighbouring pixels elsewhere. Positions are 32-bit, and a row's pixels are reached by adding.
//
// B batch, C channels, G groups of channels.
#pragma once

#include "high_order/conv2d/cuda/general.cuh"

namespace hoconv::high_order::conv2d {

constexpr int kTapsAtOnce = 4;   // that a load of the output's gradient is multiplied for
constexpr int kSharingTaps = 4;  // threads of an output pixel, which share its rows of taps

// The pixels of an image that are less than some rows or columns from an edge.
struct Frame {
  int H, W, top, bottom, left, right;

  int64_t pixels() const {
    return int64_t{top + bottom} * W + int64_t{H - top - bottom} * (left + right);
  }

  // The output pixels that read outside.
  static Frame of_output(const Problem& p) {
    const auto first = [](const Axis& a) { return (a.before + a.stride - 1) / a.stride * a.scale; };
    const auto last = [](const Axis& a) {
      // A window that belongs to one of the first so many pixels of x ends inside the image.
      const int64_t pixels = a.in - a.after();
      return a.out - (pixels <= 0 ? 0 : ((pixels - 1) / a.stride + 1) * a.scale);
    };
    return Frame(p.down.out, p.across.out, first(p.down), last(p.down), first(p.across),
                 last(p.across));
  }
  // The pixels of x that are read outside, and those between them and the edge.
  static Frame of_input(const Problem& p) {
    const Axis &down = p.down, &across = p.across;
    const bool edge = down.padding == Padding::replicate;
    const auto within = [&](int64_t pixels) { return pixels == 0 ? 0 : edge ? 1 : pixels + 1; };
    return Frame(down.in, across.in, within(down.before), within(down.after()),
                 within(across.before), within(across.after()));
  }

 private:
  Frame(int64_t H, int64_t W, int64_t top, int64_t bottom, int64_t left, int64_t right)
      : H(H),
        W(W),
        top(std::min(top, H)),
        bottom(std::min(bottom, H - this->top)),
        left(std::min(left, W)),
        right(std::min(right, W - this->left)) {}
};

// The nth thread's pixel of a frame, and which of the `parts` of its channels it computes.
template <bool Last>
struct FramePixel {
  int64_t b;
  int h, w, part;
  bool exists;

  __device__ FramePixel(int64_t n, int64_t B, int parts, const Frame& frame, int64_t pixels) {
    const auto take = [&](int64_t size) {
      const int64_t rest = n / size, digit = n - rest * size;
      n = rest;
      return digit;
    };
    if constexpr (Last) part = take(parts);
    const int64_t pixel = take(pixels), rows = int64_t{frame.top + frame.bottom} * frame.W;
    if constexpr (!Last) part = take(parts);
    b = n, exists = b < B;
    if (pixel < rows) {
      h = pixel / frame.W, w = pixel - int64_t{h} * frame.W;
      if (h >= frame.top) h += frame.H - frame.top - frame.bottom;
    } else {
      const int columns = frame.left + frame.right;
      h = (pixel - rows) / columns, w = pixel - rows - int64_t{h} * columns;
      h += frame.top;
      if (w >= frame.left) w += frame.W - columns;
    }
  }
};

template <typename T, int V, bool Last>
__global__ void __launch_bounds__(kThreads, 6)
    apply_at_border(Image<const T> x, Weights<const T> weight, Image<T> out, Windows p, Frame frame,
                    int64_t pixels) {
  using A = acc_t<T>;
  const FramePixel<Last> at(thread_index() / kSharingTaps, p.B, p.C / V, frame, pixels);
  const int lane = threadIdx.x % kSharingTaps;
  const int c = at.part * V, g = c / (p.C / p.G), left = p.across.first_position(at.w);
  A sum[V] = {};
  for (int i = lane; at.exists && i < p.down.taps; i += kSharingTaps) {
    const int h = p.down.pixel_at(p.down.first_position(at.h) + i * p.down.step);
    const T* row = x.at(at.b, c, h, 0);
    const T* taps = weight.at(i * p.across.taps, at.b, g, at.h, at.w);
#pragma unroll 4
    for (int j = 0; j < p.across.taps; ++j) {
      A channels[V];
      load_channels<V, Last>(row + p.across.pixel_at(left + j * p.across.step) * x.s.w, x.s.c, true,
                             channels);
      const A factor = widen<A>(__ldg(taps + j * weight.s.tap));
#pragma unroll
      for (int v = 0; v < V; ++v) sum[v] += factor * channels[v];
    }
  }
#pragma unroll
  for (int offset = 1; offset < kSharingTaps; offset *= 2)
#pragma unroll
    for (int v = 0; v < V; ++v) sum[v] += __shfl_xor_sync(0xffffffff, sum[v], offset);
  if (at.exists && lane == 0) store_channels<Last>(out.at(at.b, c, at.h, at.w), out.s.c, sum);
}

template <typename T, int V, bool Last>
__global__ void __launch_bounds__(kThreads, 6)
    gather_at_border(Image<const T> grad, Weights<const T> weight, Image<T> out, Windows p,
                     Frame frame, int64_t pixels) {
  using A = acc_t<T>;
  const FramePixel<Last> at(thread_index(), p.B, p.C / V, frame, pixels);
  if (!at.exists) return;
  const int c = at.part * V, g = c / (p.C / p.G);
  A sum[V] = {};
  p.down.for_each_reader(at.h, [&](int i, int h) {
    const T* row = grad.at(at.b, c, h, 0);
    const T* taps = weight.at(i * p.across.taps, at.b, g, h, 0);
    p.across.for_each_reader(at.w, [&](int j, int w) {
      A gradient[V];
      load_channels<V, Last>(row + w * grad.s.w, grad.s.c, true, gradient);
      const A factor = widen<A>(__ldg(taps + j * weight.s.tap + w * weight.s.w));
#pragma unroll
      for (int v = 0; v < V; ++v) sum[v] += factor * gradient[v];
    });
  });
  store_channels<Last>(out.at(at.b, c, at.h, at.w), out.s.c, sum);
}

// `lanes` neighbouring threads share the channels of a group.
template <typename T, int V, bool Last>
__global__ void __launch_bounds__(kThreads, 6)
    sum_at_border(Image<const T> grad, Image<const T> x, Weights<T> out, Windows p, Frame frame,
                  int64_t pixels, int lanes) {
  using A = acc_t<T>;
  constexpr int N = kTapsAtOnce;
  const FramePixel<Last> at(thread_index() / lanes, p.B, p.G, frame, pixels);
  const int lane = threadIdx.x % lanes, g = at.part, n = p.C / p.G;
  const int taps = p.down.taps * p.across.taps;
  const T* gradients = grad.at(at.b, g * n, at.h, at.w);
  Taps<> tap(p, at.h, at.w);
  for (int first = 0; first < taps; first += N) {
    const T* pixels[N];
    bool exists[N];
#pragma unroll
    for (int t = 0; t < N; ++t, tap.next()) {
      pixels[t] = x.at(at.b, g * n, p.down.pixel_at(tap.y), p.across.pixel_at(tap.z));
      exists[t] = first + t < taps;
    }
    A sum[N][1] = {};
    for (int part = lane * V; at.exists && part < n; part += lanes * V) {
      A gradient[V];
      load_channels<V, Last>(gradients + part * grad.s.c, grad.s.c, true, gradient);
#pragma unroll
      for (int t = 0; t < N; ++t) {
        A pixel[V];
        load_channels<V, Last>(pixels[t] + part * x.s.c, x.s.c, exists[t], pixel);
#pragma unroll
        for (int v = 0; v < V; ++v) sum[t][0] += gradient[v] * pixel[v];
      }
    }
    const int mine = first + reduce(sum, lane, lanes);
    const int sharing = lanes < N ? lanes : N;  // threads among which the taps are divided
    if (!at.exists || lane >= sharing) continue;
#pragma unroll
    for (int t = 0; t < N; ++t) {
      if (t < N / sharing && mine + t < taps)
        *out.at(mine + t, at.b, g, at.h, at.w) = narrow<T>(sum[t][0]);
    }
  }
}

template <typename T>
void apply_border(const Tensor& x, const Tensor& weight, Tensor& out, const Problem& p,
                  cudaStream_t stream) {
  dispatch_channels<T>(p, {&x, &out}, [&](auto V, auto last) {
    const Frame frame = Frame::of_output(p);
    const int64_t pixels = frame.pixels();
    if (pixels == 0) return;
    const int64_t threads = p.B * (p.C / V) * pixels * kSharingTaps;
    apply_at_border<T, V, last><<<blocks_for(threads), kThreads, 0, stream>>>(
        image<T>(x), weights<T>(weight), mutable_image<T>(out), Windows(p), frame, pixels);
  });
}

template <typename T>
void gather_border(const Tensor& grad, const Tensor& weight, Tensor& out, const Problem& p,
                   cudaStream_t stream) {
  dispatch_channels<T>(p, {&grad, &out}, [&](auto V, auto last) {
    const Frame frame = Frame::of_input(p);
    const int64_t pixels = frame.pixels();
    if (pixels == 0) return;
    gather_at_border<T, V, last><<<blocks_for(p.B * (p.C / V) * pixels), kThreads, 0, stream>>>(
        image<T>(grad), weights<T>(weight), mutable_image<T>(out), Windows(p), frame, pixels);
  });
}

template <typename T>
void sum_border(const Tensor& grad, const Tensor& x, Tensor& out, const Problem& p,
                cudaStream_t stream) {
  dispatch_channels<T>(p, {&x, &grad}, [&](auto V, auto last) {
    const Frame frame = Frame::of_output(p);
    const int64_t pixels = frame.pixels(), owners = p.B * p.G * pixels;
    if (pixels == 0) return;
    const int lanes = sharing_lanes(p, V, last, owners);
    sum_at_border<T, V, last><<<blocks_for(owners * lanes), kThreads, 0, stream>>>(
        image<T>(grad), image<T>(x), mutable_weights<T>(out), Windows(p), frame, pixels, lanes);
  });
}

}  // namespace hoconv::high_order::conv2d
