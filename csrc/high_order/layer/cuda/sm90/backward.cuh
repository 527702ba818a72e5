// The backward pass of the layer in one kernel, on Hopper, for few channels.
// sm80/backward_kernel.cuh describes the method.
//
// A block walks down a strip of an image, 64 columns wide, row by row; each of its warps owns 16
// columns. For every row it generates the weights again and computes their gradient dW, from the
// same words of x in registers. The columns of products are ordered by displacement (Grid). All
// that a pixel adds to x's gradient at one displacement, the weight times the output's gradient and
// dW times the generator's parameters, is therefore summed in one register, row by row as the block
// walks down. A complete row is summed over the displacements within it through shared memory. The
// generator's gradient is the product of x's windows, 64 rows of it shared by the four warps, and
// dW of the 64 pixels, which the warps exchange through shared memory.
//
//   row y - reach  of x's gradient is complete and written
//   row y          is computed
//   row y + reach  is the last row of x in the ring in shared memory; the next row is prefetched
//
// B batch, C channels, H height, W width, k kernel size and that of the generator.
// Each precision is instantiated in a source of its own (backward/), since it takes long to
// compile.
#pragma once

#include "high_order/layer/cuda/segments.cuh"
#include "high_order/layer/cuda/sm90/backward_operands.cuh"
#include "high_order/layer/cuda/sm90/launch.cuh"
#include "high_order/layer/cuda/sums.cuh"

namespace hoconv::high_order::layer::sm90 {
namespace {

constexpr int kMargin = kBefore;                 // columns on either side that other blocks write
constexpr int kWritten = kRegion - 2 * kMargin;  // the most columns of a strip

struct Strips {
  int across, down;   // strips across an image, segments down a strip
  int columns, rows;  // that a strip and a segment write
};

template <typename S, bool softmax>
__global__ void __launch_bounds__(32 * kWarps, 2)
    backward_kernel(Image<const typename S::T> grad, Image<const typename S::T> x, bool vectors,
                    const uint32_t* arranged, Image<typename S::T> grad_x, float* sums, Layer l,
                    Strips strips) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using P = typename S::P;
  using T = typename S::T;
  using B = BackwardShared<S>;
  using Halo = typename B::Halo;
  using Columns = Grid<S>;
  constexpr int N = S::k, reach = S::reach;
  constexpr int M = (B::rows + 63) / 64;  // tiles of rows of the parameters' gradient
  // After this many rows the sums of the parameters' gradient are added to totals in shared memory:
  // a long sum in one register would lose precision.
  constexpr int rows_of_sum = 16;
  extern __shared__ __align__(128) uint32_t shared[];
  uint32_t* shared_x = shared + B::x;
  float* grads = reinterpret_cast<float*>(shared + B::grad);
  float* through = reinterpret_cast<float*>(shared + B::through);

  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int my_first = 16 * warp + P::first(g);  // of the lane's two pixels
  copy_operand<B::Operand::words + B::Transposed::words>(shared, arranged);
  uint32_t one[P::terms];
  P::split(1.0f, 1.0f, one);
  for (int n = threadIdx.x; n < B::grad - B::ones; n += blockDim.x) shared[B::ones + n] = one[0];
  const ArrangedSteps<P, N> operand{
      operand_descriptor(shared + B::operand, kBlockBytes, 2 * kBlockBytes)};
  const ArrangedSteps<P, N> transposed{
      operand_descriptor(shared + B::transposed, kBlockBytes, 2 * kBlockBytes)};
  const Steps<2 * Staged<S>::depth_stride, Staged<S>::term> staged{
      operand_descriptor(shared + B::staged, 4 * Staged<S>::depth_stride, kBlockBytes)};
  uint32_t* stage = shared + B::staged +
                    (16 / P::elements * warp + g) / 4 * Staged<S>::depth_stride +
                    (S::pairs ? 8 : 4) * t + g % 4;
  const TapPointers<S, Columns, Halo> tap_pointers(shared_x + warp * Halo::tile_words);
  const typename B::Depth depth(shared_x + warp * Halo::tile_words);

  // The words, of x or ones, that the rows of the parameters' gradient sum. Rows past the last sum
  // anything.
  const uint32_t* entries[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int n = 64 * m + 16 * warp + 8 * r + g, c = n / S::taps, tap = n % S::taps;
      const int of_x =
          B::x + c * Halo::channel + tap / S::k * Halo::pitch + Halo::at(tap % S::k - reach);
      entries[m][r] = shared + (n < S::C * S::taps ? of_x : B::ones) + t;
    }

  // The item that this thread loads, of a row of x or of the output's gradient.
  constexpr int grad_items = kRegion / 4, first_of_grad = 64;
  static_assert(S::C * Halo::items <= first_of_grad &&
                first_of_grad + S::C * grad_items <= 32 * kWarps);
  const bool loads_grad = threadIdx.x >= first_of_grad;
  const int per_row = loads_grad ? grad_items : Halo::items;
  const int item_n = threadIdx.x - (loads_grad ? first_of_grad : 0), item_c = item_n / per_row;
  const int item_q = item_n - item_c * per_row;
  const bool loads = item_c < S::C;
  const ImageStrides from_strides{loads_grad ? grad.s.b : x.s.b, loads_grad ? grad.s.c : x.s.c,
                                  loads_grad ? grad.s.h : x.s.h, loads_grad ? grad.s.w : x.s.w};
  const Image<const T> source{loads_grad ? grad.data : x.data, from_strides};

  const int writes_q = threadIdx.x % kRegion;
  const int through_first = S::k * (threadIdx.x / kRegion) * B::through_pitch + writes_q;

  float sum_weight[M][Staged<S>::N][4] = {};
  float* totals = reinterpret_cast<float*>(shared + B::totals) + threadIdx.x % 32;
  const auto each_total = [&](const auto& f) {
#pragma unroll
    for (int m = 0; m < M; ++m)
      if (64 * m + 16 * warp < B::rows)
#pragma unroll
        for (int j = 0; j < Staged<S>::N; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            f(totals[(((4 * m + warp) * Staged<S>::N + j) * 4 + i) * 32], m, j, i);
  };
  each_total([](float& total, int, int, int) { total = 0; });
  const int64_t units = l.B * strips.across * strips.down;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t b = unit / (strips.across * strips.down);
    const int part = unit - b * (strips.across * strips.down), strip = part % strips.across;
    const int left = strip * strips.columns, top = part / strips.across * strips.rows;
    const int right = min(left + strips.columns, l.W), bottom = min(top + strips.rows, l.H);
    uint32_t mine[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int q = my_first + i * P::apart;
      mine[i] = q >= kMargin && left - kMargin + q < right ? ~0u : 0;
    }
    if (S::pairs) mine[0] = (mine[0] & 0xffff) | (mine[1] & 0xffff0000);

    const int column = left - kMargin - (loads_grad ? 0 : kBefore) + 4 * item_q;
    // The pixel that the thread writes, of channel threadIdx.x / kRegion and every second after it.
    const bool writes = writes_q >= kMargin && left - kMargin + writes_q < right;
    T* target = grad_x.at(b, threadIdx.x / kRegion, top - 2 * reach, left - kMargin + writes_q);

    int row = top - (loads_grad ? reach : 2 * reach);  // the next row to load
    const T* from = source.at(b, item_c, row, column);
    const typename Item<S>::Guard guard(column, l.W, vectors);
    Item<S> item;
    const auto load = [&] {
      item.load(from, source.s.w, guard, loads && row >= 0 && row < l.H, vectors);
      ++row, from += source.s.h;
    };
    const auto store_x = [&](int slot) {  // stored twice, so that any window of rows is contiguous
      if (!loads || loads_grad) return;
      uint32_t* to = shared_x + item_c * Halo::channel + slot * Halo::pitch;
      item.template store<Halo>(to, item_q);
      item.template store<Halo>(to + B::slots * Halo::pitch, item_q);
    };

    __syncthreads();
    if (!loads_grad)
      for (int i = 0; i < 2 * reach; ++i) {
        load();
        store_x(i);
      }
    int slot = 0;  // of the window's first row
    float sum_rows[S::C][N][4] = {};
    load();
    for (int y = top - reach; y < bottom + reach; ++y) {
      store_x(slot + 2 * reach < B::slots ? slot + 2 * reach : slot + 2 * reach - B::slots);
      if (loads && loads_grad) {
        *reinterpret_cast<float4*>(grads + item_c * kRegion + 4 * item_q) = {
            widen<float>(item[0]), widen<float>(item[1]), widen<float>(item[2]),
            widen<float>(item[3])};
      }
      __syncthreads();
      load();

      const int shift = slot * Halo::pitch;
      const bool owned = y >= top && y < bottom;
      float weights[1][N][4], dw[N][4] = {}, gradient[S::C][2];
      auto& weight = weights[0];
      Pixels<S, Columns, Halo> pixels[S::C];
      const auto visit = [&](int c) {
        gradient[c][0] = grads[c * kRegion + my_first];
        gradient[c][1] = grads[c * kRegion + my_first + P::apart];
        pixels[c].load(tap_pointers, shift, c);
#pragma unroll
        for (int j = 0; j < N; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) dw[j][i] += gradient[c][i / 2] * pixels[c](j, i % 2, i / 2);
      };
      {
        constexpr int steps = B::Depth::steps, group = S::pairs ? steps / S::C : 2;
        Words<P, group> words[2];
        sum_products<P, steps, group, true>(
            weights,
            [&](int n) -> auto& {
#pragma unroll
              for (int c = 0; c < S::C; ++c)
                if (c >= B::Depth::channels(n * group) && c < B::Depth::channels((n + 1) * group))
                  visit(c);
#pragma unroll
              for (int step = 0; step < group; ++step)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                  if (n * group + step < steps)
                    words[n % 2].set(step, i, depth.word(pixels, shift, n * group + step, i));
              return words[n % 2];
            },
            [&](int n) { return operand.from(n * group); }, [] {});
      }
      if constexpr (softmax)
        softmax_taps(weight, [t](int j, int e) { return is_tap<S, Columns>(j, t, e); });

#pragma unroll
      for (int c = 0; c < S::C; ++c) {
#pragma unroll
        for (int j = 0; j < N; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) sum_rows[c][j][i] += weight[j][i] * gradient[c][i / 2];
        if (l.residual) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (Columns::position(reach, t, i % 2).column == reach)
              sum_rows[c][reach][i] += gradient[c][i / 2];
        }
      }
      if constexpr (softmax) softmax_gradient(dw, weight);

      // x's gradient through the generator. The parameters' gradient needs dW of all pixels, which
      // is staged meanwhile.
      const GradientOperand<S> dw_operand(dw);
      if (owned) dw_operand.stage(stage, dw, mine);
      sum_products<P, GradientOperand<S>::steps, GradientOperand<S>::steps, false>(
          sum_rows, [&](int) -> const Words<P, GradientOperand<S>::steps>& { return dw_operand; },
          [&](int c) { return transposed.from(c * GradientOperand<S>::steps); }, publish_operands);
#pragma unroll
      for (int c = 0; c < S::C; ++c) {
        const TapPosition first = Columns::position(0, t, 0), second = Columns::position(0, t, 1);
        float* to = through + (S::k * c + first.column) * B::through_pitch + my_first;
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (is_tap<S, Columns>(0, t, e)) {
            float* at = to + e * (second.column - first.column) * B::through_pitch;
            if constexpr (S::pairs) {
              *reinterpret_cast<float2*>(at) = {sum_rows[c][0][e], sum_rows[c][0][e + 2]};
            } else {
              at[0] = sum_rows[c][0][e];
              at[P::apart] = sum_rows[c][0][e + 2];
            }
          }
#pragma unroll
        for (int j = 0; j < N; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sum_rows[c][j][i] = j + 1 < N ? sum_rows[c][j + 1 < N ? j + 1 : 0][i] : 0.0f;
      }
      __syncthreads();

      const auto write = [&] {
        if (y - reach >= top && writes) {
#pragma unroll
          for (int c = 0; c < S::C; c += 2) {
            if (c + threadIdx.x / kRegion >= S::C) break;
            const float* arrived = through + S::k * c * B::through_pitch + through_first;
            float sum = 0;
#pragma unroll
            for (int dx = 0; dx < S::k; ++dx) sum += arrived[dx * B::through_pitch + reach - dx];
            target[c * grad_x.s.c] = narrow<T>(sum);
          }
        }
        target += grad_x.s.h;
      };
      if (owned) {
        constexpr int steps = Staged<S>::groups / 2;
        constexpr int group = P::terms > 1 ? 2 : 4;  // as many steps as fit the registers
        constexpr int of_m = steps / group;
        Words<P, group> words[2];
        sum_products<P, steps, group, false>(
            sum_weight,
            [&](int n) -> auto& {
              const int m = n / of_m, first = n % of_m * group;
              if (64 * m + 16 * warp < B::rows) {
                uint32_t loaded[group][4];
#pragma unroll
                for (int step = 0; step < group; ++step)
#pragma unroll
                  for (int i = 0; i < 4; ++i)
                    loaded[step][i] = entries[m][i % 2][shift + 8 * (first + step) + 4 * (i / 2)];
#pragma unroll
                for (int step = 0; step < group; ++step)
#pragma unroll
                  for (int i = 0; i < 4; ++i) words[n % 2].set(step, i, loaded[step][i]);
              }
              return words[n % 2];
            },
            [&](int n) { return staged.from(n % of_m * group); }, write);
      } else {
        write();
      }
      if (y + 1 == bottom || (y - top) % rows_of_sum == rows_of_sum - 1)
        each_total([&](float& total, int m, int j, int i) {
          total += sum_weight[m][j][i];
          sum_weight[m][j][i] = 0;
        });
      slot = slot + 1 == B::slots ? 0 : slot + 1;
    }
  }

  float* to = sums + int64_t{blockIdx.x} * B::rows * 8 * Staged<S>::N;
  each_total([&](float total, int m, int j, int i) {
    const int row = 64 * m + 16 * warp + g + 8 * (i / 2);
    if (row < B::rows) to[(row * Staged<S>::N + j) * 8 + 2 * t + i % 2] = total;
  });
#endif
}

// Adds up the blocks' partial sums of the parameters' gradient.
template <typename S>
__global__ void sum_parameters(const float* sums, typename S::T* weight, ImageStrides strides,
                               typename S::T* bias, int blocks) {
  constexpr int columns = 8 * Staged<S>::N, size = BackwardShared<S>::rows * columns;
  const int n = blockIdx.x * kSumColumns + threadIdx.x;
  const auto part_sum = [&](int part) { return sums[int64_t{part} * size + n]; };
  double sum;
  if (!sum_parts(blocks, n < size, part_sum, sum)) return;
  const int row = n / columns, c = row / S::taps, at = row % S::taps, tap = n % columns;
  if (tap >= S::taps) return;
  const auto value = narrow<typename S::T>(static_cast<float>(sum));
  if (c == S::C)
    bias[tap] = value;
  else
    weight[tap * strides.b + c * strides.c + at / S::k * strides.h + at % S::k * strides.w] = value;
}

template <typename S>
void run(const Tensor& grad, const Tensor& x, const Tensor& weight,
         const std::optional<Tensor>& bias, const Layer& l, Tensor& grad_x, Tensor& grad_weight,
         Tensor& grad_bias, cudaStream_t stream) {
  using T = typename S::T;
  using B = BackwardShared<S>;
  const auto kernel = l.softmax ? backward_kernel<S, true> : backward_kernel<S, false>;
  constexpr int bytes = 4 * B::words;
  allow_shared_memory(kernel, bytes);
  const int64_t slots = resident_blocks(kernel, 32 * kWarps, bytes);

  Strips strips{};
  strips.across = (l.W + kWritten - 1) / kWritten;
  strips.columns = ((l.W + strips.across - 1) / strips.across + 3) / 4 * 4;
  const Segments segments = cut_strips(l.H, l.B * strips.across, 2 * S::reach + 1, slots);
  strips.rows = segments.rows, strips.down = segments.down;
  const int blocks = std::min(l.B * strips.across * strips.down, slots);

  constexpr int operands = B::Operand::words + B::Transposed::words,
                size = B::rows * 8 * Staged<S>::N;
  Tensor memory = scratch(x, operands + int64_t{blocks} * size);
  auto* arranged = static_cast<uint32_t*>(memory.mutable_data_ptr());
  auto* sums = reinterpret_cast<float*>(arranged + operands);
  arrange(
      generator_operand<typename B::Operand>(weight, bias),
      typename B::Transposed{static_cast<const T*>(weight.const_data_ptr()), image_strides(weight)},
      arranged, stream);
  kernel<<<blocks, 32 * kWarps, bytes, stream>>>(
      image<T>(grad), image<T>(x), vectorizable(x, 4) && vectorizable(grad, 4), arranged,
      mutable_image<T>(grad_x), sums, l, strips);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  sum_parameters<S><<<sum_blocks(size), sum_threads(), 0, stream>>>(
      sums, static_cast<T*>(grad_weight.mutable_data_ptr()), image_strides(grad_weight),
      static_cast<T*>(grad_bias.mutable_data_ptr()), blocks);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

template <typename P>
void Backward<P>::run(const Tensor& grad, const Tensor& x, const Tensor& weight,
                      const std::optional<Tensor>& bias, const Layer& l, Tensor& grad_x,
                      Tensor& grad_weight, Tensor& grad_bias, cudaStream_t stream) {
  dispatch_sizes<P>(l, [&](auto sizes) {
    using S = decltype(sizes);
    if constexpr (S::k < 7 || S::C == 1)
      sm90::run<S>(grad, x, weight, bias, l, grad_x, grad_weight, grad_bias, stream);
  });
}

}  // namespace hoconv::high_order::layer::sm90
