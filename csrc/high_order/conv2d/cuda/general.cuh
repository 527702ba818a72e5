// The kernels that take every layout, kernel size, dilation and dtype, where neighbours read
// neighbours: Problem::is_dense. Outside the image they read zeros.
//
// A thread owns V channels of a group and P pixels of a row. The pixels are `dilation` apart, so
// that their taps read the same columns: the P + J - 1 columns that J taps of a row read are loaded
// once each, for P * J products of V channels. Where channels are last, neighbouring threads own
// neighbouring channels: V of them are one load of 16 bytes, and all threads of a group read the
// same weight. In other layouts neighbouring threads own neighbouring pixels.
//
// An example, 8 images of 256 channels, one group, 64 x 64, k = 5, in bfloat16: the images are 34
// MB and the weights 1.6 MB, 12 us of an H100's memory; 210 million products, 7 us of its
// arithmetic. A row of taps loads 8 columns of 16 bytes and 20 weights for 160 products in a
// thread. What binds it is the integer arithmetic beside the products, so positions are 32-bit.
//
// B batch, C channels, G groups of channels, k taps of a row; of what is written, or read, H height
// and W width.
#pragma once

#include <numeric>

#include "high_order/conv2d/cuda/kernels.cuh"

namespace hoconv::high_order::conv2d {

constexpr int kPixels = 4;                   // P
constexpr int64_t kEnoughThreads = 1 << 15;  // for a GPU to hide its latencies
// J where 3, 5 and 7 do not divide the taps of a row: at its end there may be fewer left.
constexpr int kAnyTaps = 4;

inline __device__ int64_t thread_index() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }

// The P pixels of the nth thread, of those that are written, H x W; and which of the `parts` of
// these pixels' channels it computes.
template <bool Last, int P = kPixels>
struct Strip {
  int64_t b;
  int h, w, part;
  int step;  // from one of the P columns to the next
  bool exists;

  __device__ Strip(int64_t n, int64_t B, int parts, int H, int W, int step) : step(step) {
    const auto take = [&](int size) {
      const int64_t rest = n / size;
      const int digit = n - rest * size;
      n = rest;
      return digit;
    };
    if constexpr (Last) part = take(parts);
    const int column = take(strips(W, step));
    h = take(H);
    if constexpr (!Last) part = take(parts);
    w = column / step * step * P + column % step;
    b = n;
    exists = b < B && h < H && w < W;
  }

  static __host__ __device__ int64_t strips(int64_t W, int64_t step) {  // of a row
    return (W + step * P - 1) / (step * P) * step;
  }
  static int64_t threads(int64_t B, int64_t parts, int64_t H, int64_t W, int64_t step) {
    return B * parts * H * strips(W, step);
  }
};

// Widens the elements of a pack. Two of bfloat16 are a word: the halves of it that a float has at
// its top, where a conversion of each would keep the integer units busy.
template <typename T, int V, typename A>
__device__ __forceinline__ void widen_all(const Pack<T, V>& pack, A* values) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && V % 2 == 0) {
    const auto* words = reinterpret_cast<const unsigned*>(&pack);
#pragma unroll
    for (int i = 0; i < V / 2; ++i) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) values[v] = widen<A>(pack.e[v]);
  }
}

// Loads V channels of a pixel; zeros where it is none.
template <int V, bool Last, typename T, typename A>
__device__ __forceinline__ void load_channels(const T* p, int64_t stride, bool inside,
                                              A (&channels)[V]) {
  constexpr int together = Last ? V : 1;
  Pack<T, together> packs[V / together] = {};
  if (inside) {
#pragma unroll
    for (int i = 0; i < V / together; ++i) packs[i] = load<together>(p + i * stride);
  }
#pragma unroll
  for (int i = 0; i < V / together; ++i) widen_all(packs[i], channels + i * together);
}

template <bool Last, int V, typename T, typename A>
__device__ __forceinline__ void store_channels(T* p, int64_t stride, const A (&sum)[V]) {
  if constexpr (Last) {
    store_sum<V>(p, sum);
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) p[v * stride] = narrow<T>(sum[v]);
  }
}

// The output, or with `Adjoint` the gradient of x, of which `x` is then the output's gradient.
// J taps of a row are applied at once.
template <typename T, int V, int J, bool Last, bool Adjoint>
__global__ void __launch_bounds__(kThreads, 4)
    apply(Image<const T> x, Weights<const T> weight, Image<T> out, Problem p) {
  using A = acc_t<T>;
  constexpr int P = kPixels;
  const int k = p.across.taps;
  const int H = Adjoint ? p.down.out : p.down.in, W = Adjoint ? p.across.out : p.across.in;
  const int out_W = Adjoint ? p.across.in : p.across.out;
  const Strip<Last> at(thread_index(), p.B, p.C / V, Adjoint ? p.down.in : p.down.out, out_W,
                       p.across.dilation);
  if (!at.exists) return;
  const int c = at.part * V, g = c / static_cast<int>(p.C / p.G);
  const int dilation = p.down.dilation, before = p.down.before;
  // Pixel s reads column q by tap first + q - s; in the adjoint, taps run the other way, and up.
  constexpr int sign = Adjoint ? -1 : 1;
  const int64_t next_column = at.step * x.s.w, next_pixel = at.step * weight.s.w;
  const int64_t next_tap = Adjoint ? next_pixel - weight.s.tap : weight.s.tap;
  // The weights of the pixels beside the first one's. One that does not exist has the first one's.
  int64_t beside[P];
#pragma unroll
  for (int s = 0; s < P; ++s)
    beside[s] = Adjoint || at.w + s * at.step < out_W ? s * next_pixel : 0;
  int y = at.h - sign * before;
  const T* x_row = x.at(at.b, c, y, 0);
  const T* weight_row = weight.at(0, at.b, g, Adjoint ? y : at.h, Adjoint ? 0 : at.w);
  A sum[P][V] = {};
#pragma unroll 1
  for (int i = 0; i < p.down.taps; ++i, y += sign * dilation, x_row += sign * dilation * x.s.h,
           weight_row += k * weight.s.tap - (Adjoint ? dilation * weight.s.h : 0)) {
    const bool row = y >= 0 && y < H;
    if (Adjoint && !row) continue;
#pragma unroll 1
    for (int first = 0; first < k; first += J) {
      const int across = first * at.step - static_cast<int>(p.across.before);
      const int start = Adjoint ? at.w - across - (J - 1) * at.step : at.w + across;
      const T* columns = x_row + start * x.s.w;
      const T* first_taps = Adjoint
                                ? weight_row + (first + J - 1) * weight.s.tap + start * weight.s.w
                                : weight_row + first * weight.s.tap;
      const T* taps[P];
#pragma unroll
      for (int s = 0; s < P; ++s) taps[s] = first_taps + beside[s];
#pragma unroll
      for (int q = 0; q < P + J - 1; ++q, columns += next_column) {
        const int z = start + q * at.step;
        const int least = Adjoint ? J - 1 - min(q, J - 1) : max(q - P + 1, 0);  // tap that reads it
        const bool inside = row && z >= 0 && z < W && (J != kAnyTaps || first + least < k);
        A column[V];
        load_channels<V, Last>(columns, x.s.c, inside, column);
#pragma unroll
        for (int s = 0; s < P; ++s) {
          if (q < s || q - s >= J) continue;
          const int j = first + (Adjoint ? J - 1 - (q - s) : q - s);
          const bool applies = J != kAnyTaps || j < k;  // else another pixel's column, maybe inf
          T tap = narrow<T>(A(0));
          if (applies && (!Adjoint || inside)) tap = __ldg(taps[s]);
          taps[s] += next_tap;
          if (!applies) continue;
#pragma unroll
          for (int v = 0; v < V; ++v) sum[s][v] += widen<A>(tap) * column[v];
        }
      }
    }
  }
#pragma unroll
  for (int s = 0; s < P; ++s) {
    const int w = at.w + s * at.step;
    if (w >= out_W) continue;
    store_channels<Last>(out.at(at.b, c, at.h, w), out.s.c, sum[s]);
  }
}

// Sums what `lanes` neighbouring threads, a power of two, have of the J taps of P pixels, and
// divides the pixels among them: a thread sends the half that it does not keep, until it has one.
// Afterwards its pixels are in sum[0], sum[1] ...; returns the first.
template <int P, int J, typename A>
__device__ __forceinline__ int reduce(A (&sum)[P][J], int lane, int lanes) {
  constexpr unsigned all = 0xffffffff;
  int first = 0, offset = 1;
#pragma unroll
  for (int half = P / 2; half > 0; half /= 2, offset *= 2) {
    if (offset >= lanes) return first;
    const bool upper = lane & offset;
    first += upper ? half : 0;
#pragma unroll
    for (int s = 0; s < half; ++s) {
#pragma unroll
      for (int j = 0; j < J; ++j) {
        const A sent = upper ? sum[s][j] : sum[s + half][j];
        const A kept = upper ? sum[s + half][j] : sum[s][j];
        sum[s][j] = kept + __shfl_xor_sync(all, sent, offset);
      }
    }
  }
  for (; offset < lanes; offset *= 2)
#pragma unroll
    for (int j = 0; j < J; ++j) sum[0][j] += __shfl_xor_sync(all, sum[0][j], offset);
  return first;
}

// grad_weight. `lanes` neighbouring threads share the channels of a group.
template <typename T, int V, int J, bool Last>
__global__ void __launch_bounds__(kThreads, 4)
    sum_products(Image<const T> grad, Image<const T> x, Weights<T> out, Problem p, int lanes) {
  using A = acc_t<T>;
  constexpr int P = kPixels;
  const int k = p.across.taps, H = p.down.in, W = p.across.in, out_W = p.across.out;
  const Strip<Last> at(thread_index() / lanes, p.B, p.G, p.down.out, out_W, p.across.dilation);
  const int lane = threadIdx.x % lanes, g = at.part, n = p.C / p.G;
  const int dilation = p.down.dilation, across = p.across.before;
  const int64_t next_column = at.step * x.s.w, next_pixel = at.step * grad.s.w;
  int y = at.h - static_cast<int>(p.down.before);
  const T* gradients = grad.at(at.b, g * n, at.h, at.w);
  const T* x_row = x.at(at.b, g * n, y, at.w - across);
  T* out_row = out.at(0, at.b, g, at.h, at.w);
#pragma unroll 1
  for (int i = 0; i < p.down.taps;
       ++i, y += dilation, x_row += dilation * x.s.h, out_row += k * out.s.tap) {
    const bool row = y >= 0 && y < H;
#pragma unroll 1
    for (int first = 0; first < k; first += J) {
      const int start = at.w + first * at.step - across;
      A sum[P][J] = {};
#pragma unroll 1
      for (int part = lane * V; at.exists && part < n; part += lanes * V) {
        A gradient[P][V];
#pragma unroll
        for (int s = 0; s < P; ++s) {
          load_channels<V, Last>(gradients + part * grad.s.c + s * next_pixel, grad.s.c,
                                 at.w + s * at.step < out_W, gradient[s]);
        }
        const T* columns = x_row + part * x.s.c + first * next_column;
#pragma unroll
        for (int q = 0; q < P + J - 1; ++q, columns += next_column) {
          const int z = start + q * at.step;
          A column[V];
          load_channels<V, Last>(columns, x.s.c, row && z >= 0 && z < W, column);
#pragma unroll
          for (int s = 0; s < P; ++s) {
            if (q < s || q - s >= J) continue;
#pragma unroll
            for (int v = 0; v < V; ++v) sum[s][q - s] += gradient[s][v] * column[v];
          }
        }
      }
      const int mine = reduce(sum, lane, lanes);
      const int sharing = lanes < P ? lanes : P;  // threads among which the pixels are divided
      if (!at.exists || lane >= sharing) continue;
#pragma unroll
      for (int s = 0; s < P; ++s) {
        const int w = at.w + (mine + s) * at.step;
        if (s >= P / sharing || w >= out_W) continue;
        T* target = out_row + first * out.s.tap + (mine + s) * at.step * out.s.w;
#pragma unroll
        for (int j = 0; j < J; ++j, target += out.s.tap)
          if (J != kAnyTaps || first + j < k) *target = narrow<T>(sum[s][j]);
      }
    }
  }
}

// Whether V neighbouring channels are one load: channels are last, and every address fits.
inline bool loads_channels(const Tensor& t, int64_t V) {
  if (t.stride(1) != 1 || reinterpret_cast<uintptr_t>(t.data_ptr()) % (V * t.element_size()))
    return false;
  for (const int64_t i : {0, 2, 3})
    if (t.size(i) > 1 && t.stride(i) % V) return false;
  return true;
}

// Checks that positions along an axis fit 32 bits, those of a thread's last columns, too.
inline void check_positions(const Problem& p) {
  int64_t most = p.C;
  for (const Axis& a : {p.down, p.across})
    most = std::max({most, a.in + (a.taps + 2 * kPixels) * a.step(), a.out});
  STD_TORCH_CHECK(most < int64_t{1} << 31,
                  "x: expected channels, and height and width with all dilations, below 2^31; got ",
                  most, "; use impl=reference");
}

// Calls f(V, Last) with the channels of a thread, and whether they are neighbours in memory.
template <typename T, typename F>
void dispatch_channels(const Problem& p, std::initializer_list<const Tensor*> images, F&& f) {
  using std::integral_constant;
  check_positions(p);
  const int64_t n = p.group_channels();
  if (p.C > 1 && channels_last(**images.begin())) {
    constexpr int V = 16 / sizeof(T);
    const bool packs = n % V == 0 && std::all_of(images.begin(), images.end(), [](const Tensor* t) {
                         return loads_channels(*t, V);
                       });
    if (packs)
      f(integral_constant<int, V>{}, std::true_type{});
    else
      f(integral_constant<int, 1>{}, std::true_type{});
  } else if (n % 4 == 0) {
    f(integral_constant<int, 4>{}, std::false_type{});
  } else if (n % 3 == 0) {
    f(integral_constant<int, 3>{}, std::false_type{});
  } else {
    f(integral_constant<int, 1>{}, std::false_type{});
  }
}

// Calls f(V, J, Last) with the constants of a general kernel.
template <typename T, typename F>
void dispatch_general(const Problem& p, std::initializer_list<const Tensor*> images, F&& f) {
  using std::integral_constant;
  dispatch_channels<T>(p, images, [&](auto V, auto last) {
    const int64_t k = p.across.taps;
    if (k % 7 == 0)
      f(V, integral_constant<int, 7>{}, last);
    else if (k % 5 == 0)
      f(V, integral_constant<int, 5>{}, last);
    else if (k % 3 == 0)
      f(V, integral_constant<int, 3>{}, last);
    else if (k == 1)
      f(V, integral_constant<int, 1>{}, last);
    else
      f(V, integral_constant<int, kAnyTaps>{}, last);
  });
}

// As many threads as share the V-channel parts of a group evenly, of a warp's 32. Where channels
// are not last, neighbouring threads should own neighbouring pixels: no more threads share than
// give the GPU something to do beside `owners` of pixels and groups.
inline int sharing_lanes(const Problem& p, int V, bool last, int64_t owners) {
  int64_t lanes = std::gcd(p.group_channels() / V, int64_t{32});
  while (!last && lanes > 1 && owners * lanes / 2 >= kEnoughThreads) lanes /= 2;
  return lanes;
}

// The problem as the general kernels take it, whose threads own pixels that are a dilation apart.
inline Problem with_steps(Problem p) {
  p.down.dilation = p.down.step(), p.across.dilation = p.across.step();
  return p;
}

// Launches `apply`.
template <bool Adjoint, typename T>
void apply_general(const Tensor& x, const Tensor& weight, Tensor& out, const Problem& p,
                   cudaStream_t stream) {
  dispatch_general<T>(p, {&x, &out}, [&](auto V, auto J, auto last) {
    const int64_t H = Adjoint ? p.down.in : p.down.out;
    const int64_t W = Adjoint ? p.across.in : p.across.out;
    const int64_t threads = Strip<last>::threads(p.B, p.C / V, H, W, p.across.step());
    apply<T, V, J, last, Adjoint><<<blocks_for(threads), kThreads, 0, stream>>>(
        image<T>(x), weights<T>(weight), mutable_image<T>(out), with_steps(p));
  });
}

// Launches `sum_products`.
template <typename T>
void sum_general(const Tensor& grad, const Tensor& x, Tensor& out, const Problem& p,
                 cudaStream_t stream) {
  dispatch_general<T>(p, {&x, &grad}, [&](auto V, auto J, auto last) {
    const int64_t owners =
        Strip<last>::threads(p.B, p.G, p.down.out, p.across.out, p.across.step());
    const int lanes = sharing_lanes(p, V, last, owners);
    sum_products<T, V, J, last><<<blocks_for(owners * lanes), kThreads, 0, stream>>>(
        image<T>(grad), image<T>(x), mutable_weights<T>(out), with_steps(p), lanes);
  });
}

}  // namespace hoconv::high_order::conv2d
