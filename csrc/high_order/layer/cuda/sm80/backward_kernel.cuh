// The backward pass of the layer in one kernel: the gradients of x and of the generator's
// parameters.
//
// A block walks down a strip of an image row by row; each of its warps owns 16 columns. For every
// row it generates the weights again, as in the forward pass, and computes their gradient dW in the
// same registers. Then
// - the generator's gradient is the product of x's windows, transposed, and dW. Its sums over all
// rows stay in registers.
// - x's gradient through the generator is the product of dW and the generator's parameters. A row
// of dW adds to s rows of x's gradient, whose sums move on through registers as the block walks
// down.
// - x's gradient through the application gathers weights times the output's gradient. The rows of
// both that it still needs stay in shared memory.
//
// A second kernel adds up the sums of the blocks. There are no atomics: two runs give the same
// bits.
//
//       columns of a block (16 a warp)
//   |reach|   columns it writes   |reach|
//   row y - reach       row of x's gradient that is complete and written
//   ...                 rows of weights and of the output's gradient in shared memory
//   row y               row that is computed
//   row y + reach       last row of x in shared memory
//
// Channels are cut into chunks of Q, one a block: a chunk has its own rows of the generator's
// gradient and its own channels of x's gradient. Groups run one after the other, since all of them
// add to x's gradient.
//
// B batch, C channels, G groups of channels, H height, W width, k kernel size, K = k * k taps,
// s kernel size of the generator, N = columns / 8 of the product, Q channels a chunk.
#pragma once

#include "high_order/layer/cuda/sm80/backward_operands.cuh"
#include "high_order/layer/cuda/sm80/row.cuh"

namespace hoconv::high_order::layer::sm80 {

// A sum in float32. If compensated (Kahan), its error is that of one rounding; it is NaN where a
// term is infinite.
template <bool compensated>
struct Sum {
  float sum = 0, excess = 0;  // excess: by how much `sum` is too large
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
  float* x_sum;  // (B, C, H, W): the sum over the groups so far, if there are several
  bool is_first_group, is_last_group;
  float* weight;  // (block, chunk, warp, row, 8 * N)
  float* bias;    // (block, warp, 8 * N)
};

template <typename P, int k, int S, int Q>
__global__ void __launch_bounds__(32 * kMostWarps, 2)
    backward_kernel(Image<const typename P::T> grad, Image<const typename P::T> x,
                    Parameters<P> parameters, const uint2* transposed, Gradients<P> out, Layer l,
                    Strips p, int group) {
  using T = typename P::T;
  constexpr int N = columns_of<k>, taps = k * k;
  using Order = Transposed<P, N, S, Q>;
  using Memory = BackwardShared<P, N, Q>;
  constexpr int rows16 = (Q * S * S + 15) / 16;  // tiles of rows of the generator's gradient
  constexpr int pixel_steps = P::elements == 2 ? 1 : 2;
  constexpr int staged_words = Memory::staged_words();
  constexpr int weight_words = Memory::weight_words(taps);
  constexpr int through_pitch = Memory::through_words(S);
  constexpr bool pairs = P::elements == 2;
  extern __shared__ uint32_t shared[];
  const Memory at(l, p, parameters.steps);
  int* offsets = reinterpret_cast<int*>(shared + at.offsets);
  uint32_t* x_rows = shared + at.x;
  float* grads = reinterpret_cast<float*>(shared + at.grad);
  float* through = reinterpret_cast<float*>(shared + at.through);
  uint32_t* weights = shared + at.weights;
  const HaloTile& halo = p.halo;
  const int plane = halo.plane(l), reach = l.reach, region = p.region(), kept_rows = 2 * reach + 1;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int chunk = blockIdx.y, first_channel = chunk * Q;
  const int group_first = group * l.group_channels;
  const int my_first = 16 * warp + P::first(g);  // of the lane's two pixels
  uint32_t* staged = shared + at.staged + warp * 16 * staged_words;
  const uint2* fragments = parameters.of_group(group);
  const float* bias = parameters.bias + group * 8 * N;
  transposed += (int64_t{group} * gridDim.y + chunk) * Order::chunk + lane;

  for (int n = threadIdx.x; n < 8 * parameters.steps; n += blockDim.x)
    offsets[n] = word_offset<P>(l, halo, n);
  int tap_offsets[N][2];
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) tap_offsets[j][e] = tap_offset<k>(l, halo, 8 * j + 2 * t + e);
  // The offsets in x of the rows of the generator's gradient. Rows past the last sum anything.
  int entries[rows16][2];
#pragma unroll
  for (int m = 0; m < rows16; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int n = 16 * m + 8 * r + g, c = first_channel + n / (S * S);
      const int dy = n / S % S, dx = n % S, shift = reach - S / 2;
      const bool exists = n < Q * S * S && c < l.C;
      entries[m][r] = exists ? c * halo.channel() + (shift + dy) * halo.pitch + shift + dx : 0;
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

    // Two lanes write a pixel of a complete row and share its taps.
    const int q = min(max(16 * warp + lane % 16, reach), region - 1 - reach), half = lane / 16;
    const bool written = q == 16 * warp + lane % 16 && left - reach + q < right;
    T* target = out.x.at(b, first_channel, 0, left - reach + q);

    Row<T, pairs> x_row(x, b, top - 2 * reach, 0, l.C, left - 2 * reach, region + 2 * reach, l);
    Row<T, false> grad_row(grad, b, top - reach, group_first, l.group_channels, left - reach,
                           region, l);
    const auto store_x = [&](int slot) {  // stored twice, so that any window of rows is contiguous
      x_row.store([&](int c, int q, T value, T next) {
        uint32_t zeroth, first;
        P::planes(value, next, zeroth, first);
        uint32_t* word = x_rows + c * halo.channel() + slot * halo.pitch + q;
        word[0] = word[kept_rows * halo.pitch] = zeroth;
        word += plane;
        word[0] = word[kept_rows * halo.pitch] = first;
      });
    };

    __syncthreads();
    for (int i = 0; i < 2 * reach; ++i) {
      x_row.load();
      store_x(i);
    }
    x_row.load();
    grad_row.load();
    // Slots in three rings: of the row that is computed, among the rows of weights and of the
    // output's gradient; of the last row of x; of the last row of x's gradient through the
    // generator.
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
      const uint32_t* window = x_rows + x_slot * halo.pitch + 16 * warp;
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
            pixels[j][e] = window + group_first * halo.channel() + P::first(g) + tap_offsets[j][e];
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
            for (int e = 0; e < 2; ++e) pixels[j][e] += halo.channel();
        }
        if (l.softmax) softmax_gradient<N>(dw, weight[0]);

#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // Outside the image dW is zero, which also keeps those weights out of the gather.
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

      // x's gradient through the generator: adds to the S rows that this row of dW reaches.
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

      // The row of x's gradient that is complete is `reach` rows back; its part through the
      // generator is the oldest in its ring.
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

}  // namespace hoconv::high_order::layer::sm80
