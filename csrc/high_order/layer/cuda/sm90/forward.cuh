// The forward pass of the layer in one kernel, on Hopper.
//
// A block owns 64 columns and up to 16 rows of pixels. It loads their halo tile into shared memory,
// and beside it the generator's parameters, which the tensor cores read there. A warp owns every
// fourth row, 16 pixels at a time: it loads the pixels that their taps read, generates the weights
// from these, multiplies both, and the four lanes that share pixels add up their sums.
// Each precision is instantiated in a source of its own (forward/), since it takes long to compile.
#pragma once

#include "high_order/layer/cuda/sm90/launch.cuh"
#include "high_order/layer/cuda/sm90/products.cuh"

namespace hoconv::high_order::layer::sm90 {
namespace {

constexpr int kMostRows = 16;

template <typename S>
struct ForwardShared {
  using Halo = HaloTile<S, kMostRows + 2 * S::reach>;
  using Columns = Compact<S>;
  using Depth = ColumnDepth<S, Columns>;
  using Operand = GeneratorOperand<S, Columns, Depth>;
  static constexpr int words = Operand::words + Halo::words;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Loads the halo tile from column `left` and row `top` on. A thread issues all its loads before it
// waits for the first.
template <typename S>
__device__ __forceinline__ void load_halo_tile(const Image<const typename S::T>& x, bool vectors,
                                               const Layer& l, uint32_t* shared_x, int64_t b,
                                               int top, int left, int rows) {
  using Halo = typename ForwardShared<S>::Halo;
  constexpr int at_once = 32 * kWarps / Halo::items, passes = (Halo::rows + at_once - 1) / at_once;
  const int q = threadIdx.x % Halo::items, first = threadIdx.x / Halo::items;
  const typename Item<S>::Guard guard(left + 4 * q, l.W, vectors);
  const typename S::T* from = x.at(b, 0, top + first, guard.column);
  Item<S> item[passes][S::C];
#pragma unroll
  for (int pass = 0; pass < passes; ++pass) {
    const int row = first + pass * at_once, h = top + row;
    const bool inside = first < at_once && row < rows && h >= 0 && h < l.H;
#pragma unroll
    for (int c = 0; c < S::C; ++c)
      item[pass][c].load(from + c * x.s.c, x.s.w, guard, inside, vectors);
    from += at_once * x.s.h;
  }
#pragma unroll
  for (int pass = 0; pass < passes; ++pass) {
    const int row = first + pass * at_once;
    if (first < at_once && row < rows)
#pragma unroll
      for (int c = 0; c < S::C; ++c)
        item[pass][c].template store<Halo>(shared_x + c * Halo::channel + row * Halo::pitch, q);
  }
}

#endif

// Blocks of a multiprocessor: as many as leave the registers that a lane's pixels take.
template <typename S>
constexpr int blocks_a_multiprocessor = S::k == 7 && S::C == 3          ? 2
                                        : S::k == 7 || S::P::terms == 2 ? 3
                                                                        : 4;

template <typename S, bool softmax>
__global__ void __launch_bounds__(32 * kWarps, blocks_a_multiprocessor<S>)
    forward_kernel(Image<const typename S::T> x, bool vectors, const uint32_t* arranged,
                   Image<typename S::T> out, Layer l, int rows, int across, int down) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using F = ForwardShared<S>;
  using Halo = typename F::Halo;
  using Columns = typename F::Columns;
  constexpr int N = Columns::N;
  extern __shared__ __align__(128) uint32_t shared[];
  const int64_t b = blockIdx.x / (across * down);
  const int block = blockIdx.x - b * (across * down), strip = block / across;
  const int top = strip * rows, left = (block - strip * across) * kRegion;

  copy_operand<F::Operand::words>(shared, arranged);
  uint32_t* shared_x = shared + F::Operand::words;
  load_halo_tile<S>(x, vectors, l, shared_x, b, top - S::reach, left - kBefore,
                    rows + 2 * S::reach);
  __syncthreads();

  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int tiles = (min(l.W - left, kRegion) + 15) / 16;
  // The one of the lane's two pixels that it writes.
  const int mine = t / 2, first = left + S::P::first(g) + mine * S::P::apart;
  const TapPointers<S, Columns, Halo> tap_pointers(shared_x);
  const typename F::Depth depth(shared_x);
  constexpr int steps = F::Depth::steps, group = S::P::terms > 1 ? 2 : steps;
  const ArrangedSteps<typename S::P, N> operand{
      operand_descriptor(shared, kBlockBytes, 2 * kBlockBytes)};
  for (int row = warp; top + row - warp < l.H && row < rows; row += kWarps) {
    typename S::T* to = out.at(b, 0, top + row, first);
    for (int tile = 0; tile < tiles; ++tile, to += 16 * out.s.w) {
      const int shift = row * Halo::pitch + tile * Halo::tile_words;
      Pixels<S, Columns, Halo> pixels[S::C];
#pragma unroll
      for (int c = 0; c < S::C; ++c) pixels[c].load(tap_pointers, shift, c);
      float weights[1][N][4];
      auto& weight = weights[0];
      Words<typename S::P, group> words[2];
      sum_products<typename S::P, steps, group, true>(
          weights,
          [&](int n) -> auto& {
#pragma unroll
            for (int step = 0; step < group; ++step)
#pragma unroll
              for (int i = 0; i < 4; ++i)
                if (n * group + step < steps)
                  words[n % 2].set(step, i, depth.word(pixels, shift, n * group + step, i));
            return words[n % 2];
          },
          [&](int n) { return operand.from(n * group); }, [] {});
      if constexpr (softmax)
        softmax_taps(weight, [t](int j, int e) { return is_tap<S, Columns>(j, t, e); });

      float sum[S::C];  // of the lane's pixel: the sum of two of the four lanes that share it
#pragma unroll
      for (int c = 0; c < S::C; ++c) {
        float both[2] = {};
#pragma unroll
        for (int j = 0; j < N; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) both[i / 2] += weight[j][i] * pixels[c](j, i % 2, i / 2);
        sum[c] = exchange(both[0], both[1], 2);
      }
      // Even lanes end with channels 0 and 2, odd ones with channel 1.
      const bool writes = top + row < l.H && first + 16 * tile < l.W;
#pragma unroll
      for (int c = 0; c < S::C; c += 2) {
        const bool odd = t % 2 && c + 1 < S::C;
        float value = exchange(sum[c], sum[c + 1 < S::C ? c + 1 : c], 1);
        if (!writes || (t % 2 && !odd)) continue;
        if (l.residual) {
          const float2 pixel = S::P::pixels(shared_x + shift + g + S::reach * Halo::pitch +
                                            Halo::at(0) + (c + odd) * Halo::channel);
          value += mine ? pixel.y : pixel.x;
        }
        to[(c + odd) * out.s.c] = narrow<typename S::T>(value);
      }
    }
  }
#endif
}

}  // namespace

template <typename P>
void Forward<P>::run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                     const Layer& l, Tensor& out, cudaStream_t stream) {
  dispatch_sizes<P>(l, [&](auto sizes) {
    using S = decltype(sizes);
    using T = typename S::T;
    using Operand = typename ForwardShared<S>::Operand;
    Tensor memory = scratch(weight, Operand::words);
    auto* operand = static_cast<uint32_t*>(memory.mutable_data_ptr());
    arrange(generator_operand<Operand>(weight, bias), operand, stream);
    const int across = (l.W + kRegion - 1) / kRegion;
    int rows = kMostRows;  // fewer where that would leave multiprocessors with less than two blocks
    const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
    while (rows > kWarps && l.B * across * ((l.H + rows - 1) / rows) < 2 * multiprocessors)
      rows /= 2;
    const int down = (l.H + rows - 1) / rows;
    const int64_t blocks = l.B * across * down;
    STD_TORCH_CHECK(blocks < (int64_t{1} << 31), "x: too large");
    constexpr int bytes = 4 * ForwardShared<S>::words;
    const auto kernel = l.softmax ? forward_kernel<S, true> : forward_kernel<S, false>;
    allow_shared_memory(kernel, bytes);
    kernel<<<blocks, 32 * kWarps, bytes, stream>>>(image<T>(x), vectorizable(x, 4), operand,
                                                   mutable_image<T>(out), l, rows, across, down);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace hoconv::high_order::layer::sm90
