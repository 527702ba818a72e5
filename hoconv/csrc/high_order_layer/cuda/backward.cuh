// The whole layer backward: the gradients of x and of the generator's parameters.
//
// A block walks down a strip of an image, a row at a time; each of its warps owns 16 columns. Of
// every row the weights are generated again, as forward, and the weights' gradient dW is summed in
// the same registers. From there
//   the generator's gradient is x's windows, transposed, times dW: summed over all rows in
//   registers; x's gradient through the generator is dW times the generator's parameters: a row of
//   dW adds to s rows of x's gradient, whose sums move through registers as the block walks down;
//   x's gradient through the application is a gather of weights times the output's gradient, of
//   which the last rows stay in shared memory.
// The sums of blocks are added up by a second kernel. No atomics: the same bits every time.
//
//       columns of a block (16 a warp)
//   |reach|   columns it writes   |reach|
//   row y - reach       row of x's gradient that is complete and written
//   ...                 rows of weights and of the output's gradient, kept
//   row y               row that is computed
//   row y + reach       last row of x that is loaded
//
// Channels are cut into chunks of Q, one a block: a chunk has its own rows of the generator's
// gradient and its own channels of x's. Groups follow each other, since all add to x's gradient.
//
// B batch, C channels, G groups of channels, H height, W width, k kernel size, K = k * k taps,
// s kernel size of the generator, N = columns / 8 of the product, Q channels a chunk.

#pragma once

#include "high_order_layer/cuda/layer.cuh"

namespace hoconv {

constexpr int kMostWarps = 4;

// How many channels of sums a warp's registers hold.
template <int k, int s>
constexpr int chunk_of = s == 1   ? 16
                         : k == 7 ? (s == 3 ? 3 : 1)
                         : s == 3 ? 8
                         : s == 5 ? 3
                                  : 1;

struct Strips {
  int warps, across, down;  // strips across an image, segments down a strip
  int columns, rows;        // of a strip and segment, written
  int kept;                 // rows of weights in shared memory
  int delayed;              // rows of x's gradient through the generator that wait
  Window window;
  __host__ __device__ int region() const { return 16 * warps; }
};

// Shared memory, in words.
template <typename P, int N, int Q>
struct Shared {
  int offsets, window, grad, weights, staged, through, total;

  // Odd, so that the weights of neighbouring pixels are in different banks.
  __host__ __device__ static constexpr int weight_words(int taps) {
    return P::elements == 2 ? (taps + 1) / 2 : taps;
  }
  __host__ __device__ static constexpr int staged_words() {
    return 8 * N / P::elements + 8 / P::elements;
  }
  __host__ __device__ static constexpr int through_words(int s) { return (Q * s + 7) / 8 * 8 + 1; }

  __host__ __device__ Shared(const Layer& l, const Strips& p, int steps) {
    int at = 0;
    const auto take = [&at](int words) {
      const int begin = at;
      at += (words + 3) / 4 * 4;
      return begin;
    };
    staged = take(p.warps * 16 * staged_words());
    offsets = take(8 * steps);
    window = take(p.window.words(l));
    grad = take(l.group_channels * p.kept * p.region());
    weights = take(p.kept * p.region() * weight_words(l.taps));
    through = take(p.delayed * p.region() * through_words(l.s));
    total = at;
  }
};

// The generator's parameters as the right-hand side of dW times parameters: a step's taps are its
// depth, (c, dx) of a chunk its columns, for every dy.
template <typename P, int N, int S, int Q>
struct Transposed {
  static constexpr int steps = N / P::elements;
  static constexpr int columns = (Q * S + 7) / 8;
  static constexpr int64_t chunk = int64_t{steps} * S * columns * P::terms * 32;
};

template <typename P, int N, int S, int Q>
__global__ void arrange_transposed(const typename P::T* weight, ImageStrides strides, Layer l,
                                   int chunks, uint2* out) {
  using Order = Transposed<P, N, S, Q>;
  const int64_t total = Order::chunk / P::terms * chunks * l.G;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < total; n += stride) {
    int64_t rest = n / 32;
    const int lane = n % 32, column = rest % Order::columns;
    rest /= Order::columns;
    const int dy = rest % S;
    rest /= S;
    const int step = rest % Order::steps;
    rest /= Order::steps;
    const int chunk = rest % chunks, g = rest / chunks;
    const int at = column * 8 + lane / 4, c = chunk * Q + at / S, dx = at % S;
    const bool exists = at < Q * S;
    uint32_t words[2][P::terms];
    for (int r = 0; r < 2; ++r) {
      // Word t of eight is taps 2t and 2t + 1; of one-element words, t is tap 2t, t + 4 tap 2t + 1.
      const int first =
          P::elements == 2 ? 16 * step + 8 * r + 2 * (lane % 4) : 8 * step + 2 * (lane % 4) + r;
      const float low = exists ? parameter<P>(weight, strides, l, g, first, c, dy, dx) : 0.0f;
      const float high = exists ? parameter<P>(weight, strides, l, g, first + 1, c, dy, dx) : 0.0f;
      P::split(low, high, words[r]);
    }
    for (int term = 0; term < P::terms; ++term)
      out[(n / 32 * P::terms + term) * 32 + lane] = {words[0][term], words[1][term]};
  }
}

// dW of a lane's pixels and taps as the left-hand side of a product whose depth is taps.
template <typename P, int N>
__device__ __forceinline__ typename P::A taps_operand(const float (&w)[N][4], int step) {
  typename P::A a;
  uint32_t words[4][P::terms];
  if constexpr (P::elements == 2) {
    P::split(w[2 * step][0], w[2 * step][1], words[0]);
    P::split(w[2 * step][2], w[2 * step][3], words[1]);
    P::split(w[2 * step + 1][0], w[2 * step + 1][1], words[2]);
    P::split(w[2 * step + 1][2], w[2 * step + 1][3], words[3]);
  } else {
    P::split(w[step][0], 0, words[0]);
    P::split(w[step][2], 0, words[1]);
    P::split(w[step][1], 0, words[2]);
    P::split(w[step][3], 0, words[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int term = 0; term < P::terms; ++term) a.w[term][i] = words[i][term];
  return a;
}

// Eight taps from `tap` on of staged dW as the right-hand side of a product whose depth is pixels.
template <typename P, int N>
__device__ __forceinline__ typename P::B pixels_operand(const uint32_t* staged, int step, int j) {
  constexpr int pitch = Shared<P, N, 1>::staged_words();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  typename P::B b;
  if constexpr (P::elements == 2) {
    const uint32_t* row = staged + (lane % 16) * pitch + 4 * j;
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(b.w[0][0]), "=r"(b.w[0][1])
                 : "r"(address)
                 : "memory");
  } else {
    uint32_t words[2][P::terms];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      P::split(__uint_as_float(staged[(8 * step + t + 4 * r) * pitch + 8 * j + g]), 0, words[r]);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int term = 0; term < P::terms; ++term) b.w[term][r] = words[r][term];
  }
  return b;
}

// A sum in float32; compensated (Kahan) it is as exact as one term.
template <bool compensated>
struct Sum {
  float sum = 0, excess = 0;  // excess: what `sum` has too much
  __device__ void add(float term) {
    if constexpr (compensated) {
      const float rest = term - excess, next = sum + rest;
      excess = (next - sum) - rest;
      sum = next;
    } else {
      sum += term;
    }
  }
  __device__ float value() const { return sum - excess; }
};

template <typename P>
struct Gradients {
  Image<typename P::T> x;
  float* x_sum;  // (B, C, H, W) over the groups so far, where there are several
  bool is_first_group, is_last_group;
  float* weight;  // (block, chunk, warp, row, 8 * N)
  float* bias;    // (block, warp, 8 * N)
};

// A row of an image on its way to shared memory: loaded while the row before it is computed, then
// stored. What more than kItems elements a thread there are is loaded when it is stored.
constexpr int kItems = 2;

template <typename T, bool WithNext>
struct Row {
  Image<const T> image;
  int64_t b;
  int h, first_channel, channels, first_column, columns;  // h: the row that is loaded next
  int H, W;
  const T* from[kItems];  // in row h
  int at[kItems];         // (channel << 16 | column), or -1: nothing to load
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
  // Of the row loaded last: calls f(channel, column, value, next), counted from the first.
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

template <typename P, int k, int S, int Q>
__global__ void __launch_bounds__(32 * kMostWarps, 2)
    backward(Image<const typename P::T> grad, Image<const typename P::T> x,
             Parameters<P> parameters, const uint2* transposed, Gradients<P> out, Layer l, Strips p,
             int group) {
  using T = typename P::T;
  constexpr int N = columns_of<k>, taps = k * k;
  using Order = Transposed<P, N, S, Q>;
  using Memory = Shared<P, N, Q>;
  constexpr int rows16 = (Q * S * S + 15) / 16;  // tiles of rows of the generator's gradient
  constexpr int pixel_steps = P::elements == 2 ? 1 : 2;
  constexpr int staged_words = Memory::staged_words();
  constexpr int weight_words = Memory::weight_words(taps);
  constexpr int through_pitch = Memory::through_words(S);
  constexpr bool pairs = P::elements == 2;
  extern __shared__ uint32_t shared[];
  const Memory at(l, p, parameters.steps);
  int* offsets = reinterpret_cast<int*>(shared + at.offsets);
  uint32_t* window_rows = shared + at.window;
  float* grads = reinterpret_cast<float*>(shared + at.grad);
  float* through = reinterpret_cast<float*>(shared + at.through);
  uint32_t* weights = shared + at.weights;
  const Window& w = p.window;
  const int plane = w.plane(l), reach = l.reach, region = p.region(), kept_rows = 2 * reach + 1;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int chunk = blockIdx.y, first_channel = chunk * Q;
  const int group_first = group * l.group_channels;
  const int my_first = 16 * warp + P::first(g);  // of the lane's two pixels
  uint32_t* staged = shared + at.staged + warp * 16 * staged_words;
  const uint2* fragments = parameters.of_group(group);
  const float* bias = parameters.bias + group * 8 * N;
  transposed += (int64_t{group} * gridDim.y + chunk) * Order::chunk + lane;

  for (int n = threadIdx.x; n < 8 * parameters.steps; n += blockDim.x)
    offsets[n] = word_offset<P>(l, w, n);
  int tap_offsets[N][2];
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) tap_offsets[j][e] = tap_offset<k>(l, w, 8 * j + 2 * t + e);
  // Of the generator's gradient: where x lies that a row sums. Rows that do not exist sum anything.
  int entries[rows16][2];
#pragma unroll
  for (int m = 0; m < rows16; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int n = 16 * m + 8 * r + g, c = first_channel + n / (S * S);
      const int dy = n / S % S, dx = n % S, shift = reach - S / 2;
      const bool exists = n < Q * S * S && c < l.C;
      entries[m][r] = exists ? c * w.channel() + (shift + dy) * w.pitch + shift + dx : 0;
    }

  float sum_weight[rows16][N][4] = {};
  Sum<P::terms == 2> sum_bias[N][2];
  const int64_t units = l.B * p.across * p.down;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t b = unit / (p.across * p.down);
    const int part = unit - b * (p.across * p.down), strip = part % p.across;
    const int left = strip * p.columns, top = part / p.across * p.rows;
    const int right = min(left + p.columns, l.W), bottom = min(top + p.rows, l.H);
    bool column_inside[2], column_owned[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int q = my_first + i * P::apart, column = left - reach + q;
      column_inside[i] = column >= 0 && column < l.W;
      column_owned[i] = q >= reach && column < right;
    }

    // Of the row that is written a pixel has two lanes, which share its taps.
    const int q = min(max(16 * warp + lane % 16, reach), region - 1 - reach), half = lane / 16;
    const bool written = q == 16 * warp + lane % 16 && left - reach + q < right;
    T* target = out.x.at(b, first_channel, 0, left - reach + q);

    Row<T, pairs> x_row(x, b, top - 2 * reach, 0, l.C, left - 2 * reach, region + 2 * reach, l);
    Row<T, false> grad_row(grad, b, top - reach, group_first, l.group_channels, left - reach,
                           region, l);
    const auto store_x = [&](int slot) {  // twice: any window of rows is contiguous
      x_row.store([&](int c, int q, T value, T next) {
        uint32_t zeroth, first;
        P::planes(value, next, zeroth, first);
        uint32_t* word = window_rows + c * w.channel() + slot * w.pitch + q;
        word[0] = word[kept_rows * w.pitch] = zeroth;
        word += plane;
        word[0] = word[kept_rows * w.pitch] = first;
      });
    };

    __syncthreads();
    for (int i = 0; i < 2 * reach; ++i) {
      x_row.load();
      store_x(i);
    }
    x_row.load();
    grad_row.load();
    // Of the row that is computed in the ring of rows that are kept, of the last row of x in its
    // own, and of x's gradient through the generator.
    int slot = 0, x_slot = 2 * reach, through_slot = 0;
    float sum_rows[S][Order::columns][4] = {};  // of x's gradient through the generator
    for (int y = top - reach; y < bottom + reach; ++y) {
      __syncthreads();
      store_x(x_slot);
      grad_row.store([&](int c, int q, T value, T) {
        grads[(c * p.kept + slot) * region + q] = widen<float>(value);
      });
      __syncthreads();
      x_row.load();
      grad_row.load();

      x_slot = x_slot + 1 == kept_rows ? 0 : x_slot + 1;  // of the window's first row
      const uint32_t* window = window_rows + x_slot * w.pitch + 16 * warp;
      const bool inside = y >= 0 && y < l.H, owned = y >= top && y < bottom;
      float dw[N][4] = {};
      {
        float weight[1][N][4];
        generate<P, N, 1>(weight, window + P::first(g), offsets, plane, fragments, bias,
                          parameters.steps);
        if (l.softmax)
          softmax_taps(weight[0], [t](int j, int e) { return 8 * j + 2 * t + e < taps; });

        const float* gradient = grads + slot * region + my_first;
        const uint32_t* pixels[N][2];
#pragma unroll
        for (int j = 0; j < N; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            pixels[j][e] = window + group_first * w.channel() + P::first(g) + tap_offsets[j][e];
        for (int c = 0; c < l.group_channels; ++c) {
          const float first = gradient[0], second = gradient[P::apart];
#pragma unroll
          for (int j = 0; j < N; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (8 * j + 2 * t + e < taps) {
                const float2 pixel = P::pixels(pixels[j][e]);
                dw[j][e] += first * pixel.x;
                dw[j][e + 2] += second * pixel.y;
              }
          gradient += p.kept * region;
#pragma unroll
          for (int j = 0; j < N; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) pixels[j][e] += w.channel();
        }
        if (l.softmax) softmax_gradient<N>(dw, weight[0]);

#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // Outside the image there is no gradient, which also keeps its weights out of the gather.
          const bool exists = inside && column_inside[i], mine = owned && column_owned[i];
          uint32_t* kept = weights + (slot * region + my_first + i * P::apart) * weight_words;
          uint32_t* stage = staged + (P::first(g) + i * P::apart) * staged_words;
#pragma unroll
          for (int j = 0; j < N; ++j) {
            const float even = weight[0][j][2 * i], odd = weight[0][j][2 * i + 1];
            float& even_dw = dw[j][2 * i];
            float& odd_dw = dw[j][2 * i + 1];
            if (mine) sum_bias[j][0].add(even_dw), sum_bias[j][1].add(odd_dw);
            even_dw = exists ? P::round(even_dw) : 0, odd_dw = exists ? P::round(odd_dw) : 0;
            const float my_even = mine ? even_dw : 0, my_odd = mine ? odd_dw : 0;
            if constexpr (pairs) {
              uint32_t word[1];
              P::split(even, odd, word);
              if (8 * j + 2 * t < taps) kept[4 * j + t] = word[0];
              P::split(my_even, my_odd, word);
              stage[4 * j + t] = word[0];
            } else {
              if (8 * j + 2 * t < taps) kept[8 * j + 2 * t] = __float_as_uint(even);
              if (8 * j + 2 * t + 1 < taps) kept[8 * j + 2 * t + 1] = __float_as_uint(odd);
              *reinterpret_cast<float2*>(stage + 8 * j + 2 * t) = {my_even, my_odd};
            }
          }
        }
      }
      __syncwarp();

      // The generator's gradient.
#pragma unroll
      for (int step = 0; step < pixel_steps; ++step) {
        typename P::B staged_dw[N];
#pragma unroll
        for (int j = 0; j < N; ++j) staged_dw[j] = pixels_operand<P, N>(staged, step, j);
#pragma unroll
        for (int m = 0; m < rows16; ++m) {
          const auto a =
              P::load_transposed(window + 8 * step, entries[m][0], entries[m][1], t, plane);
#pragma unroll
          for (int j = 0; j < N; ++j) P::multiply(sum_weight[m][j], a, staged_dw[j]);
        }
      }

      // x's gradient through the generator, of the rows that this row of dW adds to.
#pragma unroll
      for (int step = 0; step < Order::steps; ++step) {
        const auto a = taps_operand<P, N>(dw, step);
#pragma unroll
        for (int n = 0; n < S * Order::columns; ++n)
          P::multiply(sum_rows[n / Order::columns][n % Order::columns], a,
                      load_b<P>(transposed + (step * S * Order::columns + n) * P::terms * 32));
      }
      float* to = through + (through_slot * region + my_first) * through_pitch + 2 * t;
#pragma unroll
      for (int j = 0; j < Order::columns; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          to[i / 2 * P::apart * through_pitch + 8 * j + i % 2] = sum_rows[0][j][i];
#pragma unroll
      for (int dy = 0; dy < S; ++dy)
#pragma unroll
        for (int j = 0; j < Order::columns; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sum_rows[dy][j][i] = dy + 1 < S ? sum_rows[dy + 1 < S ? dy + 1 : 0][j][i] : 0.0f;
      __syncthreads();

      // The row that is complete: `reach` rows back; through the generator, the oldest that waits.
      const int h = y - reach;
      const int done_slot = slot - reach < 0 ? slot - reach + p.kept : slot - reach;
      slot = slot + 1 == p.kept ? 0 : slot + 1;
      through_slot = through_slot + 1 == p.delayed ? 0 : through_slot + 1;
      if (h < top) continue;
      for (int first = 0; first < Q; first += 4) {
        float sum[4] = {};
        const float* arrived =
            through + (through_slot * region + q + S / 2) * through_pitch + first * S + half;
#pragma unroll
        for (int dx = 0; dx < S; dx += 2)
          if (dx + half < S)
#pragma unroll
            for (int n = 0; n < 4; ++n)
              if (first + n < Q) sum[n] += arrived[n * S + dx - (dx + half) * through_pitch];
        const int own = first_channel + first - group_first;  // in the group
        const auto gather = [&](auto dilation) {
#pragma unroll
          for (int i = 0; i < k; i += 2) {
            const int dy = i + half;
            if (dy >= k) break;
            int from = done_slot - dy * dilation + l.tap_reach;
            from += from < 0 ? p.kept : 0;
            from -= from >= p.kept ? p.kept : 0;
            const int pixel = from * region + q + l.tap_reach;
            const uint32_t* kept = weights + pixel * weight_words;
            const float* gradient = grads + own * p.kept * region + pixel;
            float weight[k];
#pragma unroll
            for (int dx = 0; dx < k; ++dx)
              weight[dx] = widen<float>(
                  reinterpret_cast<const T*>(kept - dx * dilation * weight_words)[dy * k + dx]);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
              if (first + n < Q && own + n >= 0 && own + n < l.group_channels)
#pragma unroll
                for (int dx = 0; dx < k; ++dx) sum[n] += weight[dx] * gradient[-dx * dilation];
              gradient += p.kept * region;
            }
          }
        };
        if (l.dilation == 1)
          gather(std::integral_constant<int, 1>{});
        else
          gather(l.dilation);
#pragma unroll
        for (int n = 0; n < 4; ++n) sum[n] += __shfl_xor_sync(~0u, sum[n], 16);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int c = first + n;
          if (!written || n % 2 != half || c >= Q || first_channel + c >= l.C) continue;
          if (l.residual && own + n >= 0 && own + n < l.group_channels)
            sum[n] += grads[((own + n) * p.kept + done_slot) * region + q];
          if (out.x_sum != nullptr) {
            float* so_far =
                out.x_sum + ((b * l.C + first_channel + c) * l.H + h) * l.W + left - reach + q;
            if (!out.is_first_group) sum[n] += *so_far;
            *so_far = sum[n];
          }
          if (out.is_last_group) target[h * out.x.s.h + c * out.x.s.c] = narrow<T>(sum[n]);
        }
      }
    }
  }

  const int64_t parts = (int64_t{blockIdx.x} * gridDim.y + chunk) * p.warps + warp;
  float* to = out.weight + parts * rows16 * 16 * 8 * N;
#pragma unroll
  for (int m = 0; m < rows16; ++m)
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        to[(16 * m + g + 8 * (i / 2)) * 8 * N + 8 * j + 2 * t + i % 2] = sum_weight[m][j][i];
  if (chunk == 0) {
    float* to_bias = out.bias + (int64_t{blockIdx.x} * p.warps + warp) * 8 * N;
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = sum_bias[j][e].value();
#pragma unroll
        for (int far = 4; far < 32; far *= 2) sum += __shfl_xor_sync(~0u, sum, far);
        if (g == 0) to_bias[8 * j + 2 * t + e] = sum;
      }
  }
}

constexpr int kSumColumns = 32, kSumParts = 8;

// Adds up the warps' sums of the generator's gradient, in double. A chunk a blockIdx.y; its parts
// are `blocks` times `warps`, with those of other chunks between.
template <typename T, int Q>
__global__ void sum_weight(const float* sums, T* out, ImageStrides strides, Layer l, int blocks,
                           int warps, int rows, int columns, int group) {
  __shared__ double shared[kSumParts][kSumColumns];
  const int chunks = gridDim.y, chunk = blockIdx.y;
  const int64_t size = int64_t{rows} * columns, n = int64_t{blockIdx.x} * kSumColumns + threadIdx.x;
  double sum = 0;
  if (n < size)
    for (int part = threadIdx.y; part < blocks * warps; part += kSumParts) {
      const int64_t block = part / warps, warp = part % warps;
      sum += sums[((block * chunks + chunk) * warps + warp) * size + n];
    }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y || n >= size) return;
  for (int part = 1; part < kSumParts; ++part) sum += shared[part][threadIdx.x];
  const int row = n / columns, tap = n % columns, s2 = l.s * l.s;
  const int c = chunk * Q + row / s2, dy = row / l.s % l.s, dx = row % l.s;
  if (row < Q * s2 && c < l.C && tap < l.taps)
    out[(int64_t{tap} * l.G + group) * strides.b + c * strides.c + dy * strides.h +
        dx * strides.w] = narrow<T>(static_cast<float>(sum));
}

template <typename T>
__global__ void sum_bias(const float* sums, T* out, Layer l, int parts, int columns, int group) {
  const int tap = threadIdx.x;
  if (tap >= l.taps) return;
  double sum = 0;
  for (int part = 0; part < parts; ++part) sum += sums[int64_t{part} * columns + tap];
  out[tap * l.G + group] = narrow<T>(static_cast<float>(sum));
}

template <typename P, int k, int s>
void run(const Tensor& grad, const Tensor& x, const Tensor& weight,
         const std::optional<Tensor>& bias, const Layer& l, Tensor& grad_x, Tensor& grad_weight,
         Tensor& grad_bias, cudaStream_t stream) {
  using T = typename P::T;
  constexpr int N = columns_of<k>, Q = chunk_of<k, s>, rows = (Q * s * s + 15) / 16 * 16;
  const int chunks = (l.C + Q - 1) / Q;
  Tensor memory;
  const auto parameters = arrange_parameters<P>(weight, bias, l, N, memory, stream);
  using Order = Transposed<P, N, s, Q>;
  const int64_t fragments = Order::chunk * chunks * l.G;
  Tensor transposed_memory = scratch(weight, 2 * fragments);
  auto* transposed = static_cast<uint2*>(transposed_memory.mutable_data_ptr());
  arrange_transposed<P, N, s, Q><<<blocks_for(fragments / P::terms), kThreads, 0, stream>>>(
      static_cast<const T*>(weight.const_data_ptr()), image_strides(weight), l, chunks, transposed);
  STD_CUDA_KERNEL_LAUNCH_CHECK();

  const auto kernel = backward<P, k, s, Q>;
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  int resident;

  // As many warps as the width needs; strips as even as they can be.
  Strips p{};
  p.warps = std::min((l.W + 2 * l.reach + 15) / 16, kMostWarps);
  int64_t shared_bytes;
  for (;;) {
    const int most = p.region() - 2 * l.reach;
    p.across = (l.W + most - 1) / most, p.columns = (l.W + p.across - 1) / p.across;
    p.kept = l.reach + l.tap_reach + 1, p.delayed = l.reach - l.generator_reach + 1;
    p.window = make_window<P>(2 * (2 * l.reach + 1), p.region() + 2 * l.reach);
    shared_bytes = 4 * Shared<P, N, Q>(l, p, parameters.steps).total;
    if (shared_bytes <= most_shared_memory()) break;
    p.warps -= 1;
    STD_TORCH_CHECK(p.region() > 2 * l.reach, "x: too many channels for the fused kernel");
  }
  allow_shared_memory(kernel, shared_bytes);
  STD_CUDA_CHECK(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, 32 * p.warps, shared_bytes));
  // Segments so long that the rows above and below cost little, so many that no block waits long.
  const int64_t slots = std::max<int64_t>(int64_t{multiprocessors} * resident / chunks, 1);
  double least = INFINITY;
  for (int down = 1; down <= std::max(1, l.H / 8); ++down) {
    const int segment = (l.H + down - 1) / down;
    const int64_t units = l.B * p.across * ((l.H + segment - 1) / segment);
    const double cost = double((units + slots - 1) / slots) * (segment + 2 * l.reach + 2);
    if (cost < least) least = cost, p.rows = segment, p.down = (l.H + segment - 1) / segment;
  }
  const int64_t units = l.B * p.across * p.down;
  const int blocks = std::min(units, slots);

  Tensor sums = scratch(x, int64_t{blocks} * p.warps * 8 * N * (int64_t{chunks} * rows + 1));
  auto* weight_sums = static_cast<float*>(sums.mutable_data_ptr());
  float* bias_sums = weight_sums + int64_t{blocks} * p.warps * 8 * N * chunks * rows;
  Tensor x_sums = l.G > 1 ? scratch(x, x.numel()) : Tensor();
  for (int group = 0; group < l.G; ++group) {
    Gradients<P> out{mutable_image<T>(grad_x),
                     l.G > 1 ? static_cast<float*>(x_sums.mutable_data_ptr()) : nullptr,
                     group == 0,
                     group == l.G - 1,
                     weight_sums,
                     bias_sums};
    kernel<<<dim3(blocks, chunks), 32 * p.warps, shared_bytes, stream>>>(
        image<T>(grad), image<T>(x), parameters, transposed, out, l, p, group);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    const int columns = 8 * N;
    sum_weight<T, Q><<<dim3((rows * columns + kSumColumns - 1) / kSumColumns, chunks),
                       dim3(kSumColumns, kSumParts), 0, stream>>>(
        weight_sums, static_cast<T*>(grad_weight.mutable_data_ptr()), image_strides(grad_weight), l,
        blocks, p.warps, rows, columns, group);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    sum_bias<T><<<1, 64, 0, stream>>>(bias_sums, static_cast<T*>(grad_bias.mutable_data_ptr()), l,
                                      blocks * p.warps, columns, group);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

// Fills the gradients; one instantiation a source file, since they take long to compile.
template <typename P>
void run_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                  const std::optional<Tensor>& bias, const Layer& l, Tensor& grad_x,
                  Tensor& grad_weight, Tensor& grad_bias, cudaStream_t stream) {
  const auto with_sizes = [&](auto k, auto s) {
    run<P, decltype(k)::value, decltype(s)::value>(grad, x, weight, bias, l, grad_x, grad_weight,
                                                   grad_bias, stream);
  };
  const auto with_generator = [&](auto k) {
    switch (l.s) {
      case 1:
        return with_sizes(k, std::integral_constant<int, 1>{});
      case 3:
        return with_sizes(k, std::integral_constant<int, 3>{});
      case 5:
        return with_sizes(k, std::integral_constant<int, 5>{});
      default:
        return with_sizes(k, std::integral_constant<int, 7>{});
    }
  };
  switch (l.k) {
    case 3:
      return with_generator(std::integral_constant<int, 3>{});
    case 5:
      return with_generator(std::integral_constant<int, 5>{});
    default:
      return with_generator(std::integral_constant<int, 7>{});
  }
}

}  // namespace hoconv
