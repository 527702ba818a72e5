// The kernels that take every layout, window and dtype. Outside the image they read zeros.
//
// A thread owns V channels of a group and P pixels of a row. The pixels are as far apart as lets
// their taps read the same columns: the P + J - 1 columns that J taps of a row read are loaded once
// each, for P * J products of V channels. With a dilation d they are d apart. With a scale s the
// output is s * s images as large as x, each of every s-th pixel, and the gradient of x a sum over
// these. With a stride the taps fall into phases (windows.cuh), each with an image of every
// stride-th pixel of x. Where channels are last, neighbouring threads own neighbouring channels: V
// of them are one load of 16 bytes, and all threads of a group read the same weight. In other
// layouts neighbouring threads own neighbouring pixels.
//
// An example, 8 images of 256 channels, one group, 64 x 64, k = 5, in bfloat16: the images are 34
// MB and the weights 1.6 MB, 12 us of an H100's memory; 210 million products, 7 us of its
// arithmetic. A row of taps loads 8 columns of 16 bytes and 20 weights for 160 products in a
// thread. What binds it is the integer arithmetic beside the products, so positions are 32-bit.
// What did not help, in bfloat16 on an H200: to load the weights of four pixels of contiguous rows
// at once, before the columns (k = 21: 103 us instead of 91; k = 4: 36 instead of 24).
//
// B batch, C channels, G groups of channels, k taps of a row; of what is written, or read, H height
// and W width.
#pragma once

#include "high_order/conv2d/cuda/windows.cuh"

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

// How a kernel walks over what it reads: over pixels of x, for each row of them by the taps of each
// phase in turn; with `Adjoint`, over windows by the only phase that reads the pixel, for each
// image of the output in turn. What is constant is computed here: the registers that it would take
// in a kernel keep loads from being issued early.
template <bool Adjoint>
struct Walk {
  int turns_down, turns_across;
  int H, W;                            // pixels, or windows
  int next_tap_down, next_tap_across;  // of the taps of a turn, from one to the next
  int rows_apart, columns_apart;       // that these read
  int next_start;                      // from the first column of J taps to that of the next J
  int step;                            // of two pixels of a thread
  int64_t row, column;                 // elements from one that may be read to the next
  int64_t next_row, next_column;       // from one that is read to the next
  int64_t weight_row, weight_column;   // as row and column, of the weights
  int64_t tap, next_row_of_taps;       // from one that is applied to the next
  int64_t next_pixel;                  // of the weights, from a pixel of a thread to the next

  Walk(const Windows& p, const ImageStrides& x, const WeightStrides& weight, int J) {
    const Line &down = p.down, &across = p.across;
    turns_down = Adjoint ? down.scale : 1, turns_across = Adjoint ? across.scale : across.phases;
    H = Adjoint ? down.windows : down.in, W = Adjoint ? across.windows : across.in;
    next_tap_down = Adjoint ? down.phases : 1, next_tap_across = across.phases;
    rows_apart = Adjoint ? -down.hop : down.step;
    columns_apart = across.hop * (Adjoint ? 1 : across.stride);
    next_start = J * (Adjoint ? -columns_apart : columns_apart);
    step = across.hop * (Adjoint ? across.stride : across.scale);
    row = (Adjoint ? down.scale : 1) * x.h, column = (Adjoint ? across.scale : 1) * x.w;
    next_row = rows_apart * row, next_column = columns_apart * column;
    weight_row = down.scale * weight.h, weight_column = across.scale * weight.w;
    next_pixel = across.hop * weight_column;
    tap = next_tap_across * weight.tap;
    next_row_of_taps = int64_t{next_tap_down} * across.taps * weight.tap;
    if (Adjoint) next_row_of_taps += rows_apart * weight_row;
  }

  // What the first tap of a phase reads: for a pixel of the output the position in x, for a pixel
  // of x the window.
  static __device__ int first_read(const Line& line, int pixel, int phase) {
    if (!Adjoint) return line.first_position(pixel) + phase * line.step;
    const int offset = pixel + line.before - phase * line.step;
    return line.stride == 1 ? offset : offset / line.stride;  // a multiple, by the choice of phase
  }
};

// The output, or with `Adjoint` the gradient of x, of which `x` is then the output's gradient.
// J taps of a row are applied at once.
template <typename T, int V, int J, bool Last, bool Adjoint>
__global__ void __launch_bounds__(kThreads, 4)
    apply(Image<const T> x, Weights<const T> weight, Image<T> out, Windows p, Walk<Adjoint> walk) {
  using A = acc_t<T>;
  constexpr int P = kPixels;
  const Line &down = p.down, &across = p.across;
  const int out_W = Adjoint ? across.in : across.out;
  const Strip<Last> at(thread_index(), p.B, p.C / V, Adjoint ? down.in : down.out, out_W,
                       walk.step);
  if (!at.exists) return;
  const int c = at.part * V, g = c / (p.C / p.G);
  // The weights of the pixels beside the first one's. One that does not exist has the first one's.
  int64_t beside[P];
#pragma unroll
  for (int s = 0; s < P; ++s)
    beside[s] = Adjoint || at.w + s * at.step < out_W ? s * walk.next_pixel : 0;
  const int phase_h = Adjoint ? down.phase_of(at.h) : 0;
  const int phase_w = Adjoint ? across.phase_of(at.w) : 0;
  int left = walk.first_read(across, at.w, phase_w);
  if (Adjoint) left -= (J - 1) * walk.columns_apart;
  const int64_t next_tap = Adjoint ? walk.next_pixel - walk.tap : walk.tap;
  A sum[P][V] = {};
#pragma unroll 1
  for (int turn_h = 0; turn_h < walk.turns_down; ++turn_h) {
    int y = walk.first_read(down, at.h, phase_h);
    const T* x_row = x.at(at.b, c, turn_h, 0) + y * walk.row;
    const T* row_of_taps =
        weight.at(phase_h * across.taps, at.b, g, Adjoint ? turn_h : at.h, Adjoint ? 0 : at.w);
    if (Adjoint) row_of_taps += y * walk.weight_row;
#pragma unroll 1
    for (int i = phase_h; i < down.taps; i += walk.next_tap_down, y += walk.rows_apart,
             x_row += walk.next_row, row_of_taps += walk.next_row_of_taps) {
      const bool row = y >= 0 && y < walk.H;
      if (Adjoint && !row) continue;
#pragma unroll 1
      for (int turn_w = 0; turn_w < walk.turns_across; ++turn_w) {
        int start = left + (Adjoint ? 0 : turn_w * across.step);
#pragma unroll 1
        for (int first = Adjoint ? phase_w : turn_w; first < across.taps;
             first += J * walk.next_tap_across, start += walk.next_start) {
          // Pixel s reads column q by tap q - s of J; in the adjoint, taps run the other way.
          const T* columns = x_row + start * walk.column;
          const T* first_taps = row_of_taps + first * weight.s.tap;
          if (Adjoint) {
            columns += turn_w * x.s.w;
            first_taps += turn_w * weight.s.w + (J - 1) * walk.tap + start * walk.weight_column;
          }
          const T* taps[P];
#pragma unroll
          for (int s = 0; s < P; ++s) taps[s] = first_taps + beside[s];
          const auto exists = [&](int tap) {  // else its column is another pixel's, maybe inf
            return J != kAnyTaps || first + tap * walk.next_tap_across < across.taps;
          };
#pragma unroll
          for (int q = 0; q < P + J - 1; ++q, columns += walk.next_column) {
            const int z = start + q * walk.columns_apart;
            const int least = Adjoint ? J - 1 - min(q, J - 1) : max(q - P + 1, 0);  // that reads it
            const bool inside = row && z >= 0 && z < walk.W && exists(least);
            A column[V];
            load_channels<V, Last>(columns, x.s.c, inside, column);
#pragma unroll
            for (int s = 0; s < P; ++s) {
              if (q < s || q - s >= J) continue;
              const bool applies = exists(Adjoint ? J - 1 - (q - s) : q - s);
              T factor = narrow<T>(A(0));
              if (applies && (!Adjoint || inside)) factor = __ldg(taps[s]);
              taps[s] += next_tap;
              if (!applies) continue;
#pragma unroll
              for (int v = 0; v < V; ++v) sum[s][v] += widen<A>(factor) * column[v];
            }
          }
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
    sum_products(Image<const T> grad, Image<const T> x, Weights<T> out, Windows p, Walk<false> walk,
                 int lanes) {
  using A = acc_t<T>;
  constexpr int P = kPixels;
  const Line &down = p.down, &across = p.across;
  const Strip<Last> at(thread_index() / lanes, p.B, p.G, down.out, across.out, walk.step);
  const int lane = threadIdx.x % lanes, g = at.part, n = p.C / p.G;
  const int64_t next_gradient = at.step * grad.s.w;
  const int left = walk.first_read(across, at.w, 0);
  int y = walk.first_read(down, at.h, 0);
  const T* gradients = grad.at(at.b, g * n, at.h, at.w);
  const T* x_row = x.at(at.b, g * n, y, 0);
  T* row_of_taps = out.at(0, at.b, g, at.h, at.w);
#pragma unroll 1
  for (int i = 0; i < down.taps;
       ++i, y += walk.rows_apart, x_row += walk.next_row, row_of_taps += walk.next_row_of_taps) {
    const bool row = y >= 0 && y < walk.H;
#pragma unroll 1
    for (int turn = 0; turn < walk.turns_across; ++turn) {
      int start = left + turn * across.step;
#pragma unroll 1
      for (int first = turn; first < across.taps;
           first += J * walk.next_tap_across, start += walk.next_start) {
        A sum[P][J] = {};
#pragma unroll 1
        for (int part = lane * V; at.exists && part < n; part += lanes * V) {
          A gradient[P][V];
#pragma unroll
          for (int s = 0; s < P; ++s) {
            load_channels<V, Last>(gradients + part * grad.s.c + s * next_gradient, grad.s.c,
                                   at.w + s * at.step < across.out, gradient[s]);
          }
          const T* columns = x_row + part * x.s.c + start * walk.column;
#pragma unroll
          for (int q = 0; q < P + J - 1; ++q, columns += walk.next_column) {
            const int z = start + q * walk.columns_apart;
            A column[V];
            load_channels<V, Last>(columns, x.s.c, row && z >= 0 && z < walk.W, column);
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
        // Where the pixels of a tap are neighbours, U of them are one store.
        constexpr int U = std::min<int>(P, 16 / sizeof(T));
        T* row_of_tap = row_of_taps + first * out.s.tap;
        const bool packs = sharing == 1 && at.step * out.s.w == 1 && at.w + P <= across.out &&
                           walk.tap % U == 0 &&
                           reinterpret_cast<uintptr_t>(row_of_tap) % (U * sizeof(T)) == 0;
        if (packs) {
#pragma unroll
          for (int j = 0; j < J; ++j, row_of_tap += walk.tap) {
            if (J == kAnyTaps && first + j * walk.next_tap_across >= across.taps) continue;
#pragma unroll
            for (int s = 0; s < P; s += U) {
              A pixels[U];
#pragma unroll
              for (int u = 0; u < U; ++u) pixels[u] = sum[s + u][j];
              store_sum<U>(row_of_tap + s, pixels);
            }
          }
          continue;
        }
#pragma unroll
        for (int s = 0; s < P; ++s) {
          const int w = at.w + (mine + s) * at.step;
          if (s >= P / sharing || w >= across.out) continue;
          T* target = row_of_taps + first * out.s.tap + (mine + s) * at.step * out.s.w;
#pragma unroll
          for (int j = 0; j < J; ++j, target += walk.tap)
            if (J != kAnyTaps || first + j * walk.next_tap_across < across.taps)
              *target = narrow<T>(sum[s][j]);
        }
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
  for (const Axis& a : {p.down, p.across}) {
    const int64_t apart = a.step() * std::max(a.stride, a.scale);  // two pixels of a thread
    most = std::max({most, a.in + (a.taps + 2 * kPixels) * apart, a.out + 2 * kPixels * apart});
  }
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

// Calls f(V, J, Last, windows) with the constants of a general kernel, and its problem.
template <typename T, typename F>
void dispatch_general(const Problem& p, std::initializer_list<const Tensor*> images, F&& f) {
  using std::integral_constant;
  dispatch_channels<T>(p, images, [&](auto V, auto last) {
    const Windows windows(p);
    const Line& across = windows.across;
    const int k = across.taps % across.phases ? kAnyTaps : across.taps / across.phases;
    if (k % 7 == 0)
      f(V, integral_constant<int, 7>{}, last, windows);
    else if (k % 5 == 0)
      f(V, integral_constant<int, 5>{}, last, windows);
    else if (k % 3 == 0)
      f(V, integral_constant<int, 3>{}, last, windows);
    else if (k == 1)
      f(V, integral_constant<int, 1>{}, last, windows);
    else
      f(V, integral_constant<int, kAnyTaps>{}, last, windows);
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

// Launches `apply`.
template <bool Adjoint, typename T>
void apply_general(const Tensor& x, const Tensor& weight, Tensor& out, const Problem& p,
                   cudaStream_t stream) {
  dispatch_general<T>(p, {&x, &out}, [&](auto V, auto J, auto last, const Windows& windows) {
    const Walk<Adjoint> walk(windows, image_strides(x), weight_strides(weight), J);
    const int64_t H = Adjoint ? p.down.in : p.down.out;
    const int64_t W = Adjoint ? p.across.in : p.across.out;
    const int64_t threads = Strip<last>::threads(p.B, p.C / V, H, W, walk.step);
    apply<T, V, J, last, Adjoint><<<blocks_for(threads), kThreads, 0, stream>>>(
        image<T>(x), weights<T>(weight), mutable_image<T>(out), windows, walk);
  });
}

// Launches `sum_products`.
template <typename T>
void sum_general(const Tensor& grad, const Tensor& x, Tensor& out, const Problem& p,
                 cudaStream_t stream) {
  dispatch_general<T>(p, {&x, &grad}, [&](auto V, auto J, auto last, const Windows& windows) {
    const Walk<false> walk(windows, image_strides(x), weight_strides(out), J);
    const int64_t owners = Strip<last>::threads(p.B, p.G, p.down.out, p.across.out, walk.step);
    const int lanes = sharing_lanes(p, V, last, owners);
    sum_products<T, V, J, last><<<blocks_for(owners * lanes), kThreads, 0, stream>>>(
        image<T>(grad), image<T>(x), mutable_weights<T>(out), windows, walk, lanes);
  });
}

}  // namespace hoconv::high_order::conv2d
