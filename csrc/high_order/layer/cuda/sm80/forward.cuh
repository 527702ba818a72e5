// The forward pass of the layer in one kernel: it generates the weights of a tile of pixels,
// applies them and writes the output.
//
// A block owns a tile of pixels and loads its halo tile, x with the pixels around, into shared
// memory. A warp owns M * 16 pixels of a row. Tensor cores compute their weights as a product of
// x's windows and the generator's parameters. The weights stay in registers: of 16 pixels times 8 N
// taps a lane holds those of two pixels. It multiplies them with the pixels that its taps read, and
// the four lanes that share pixels add up their sums.
//
// B batch, C channels, G groups of channels, H height, W width, k kernel size, s kernel size of the
// generator, M tiles of 16 pixels a warp, N = columns / 8 of the product.
//
// Each precision is instantiated in a source of its own (forward/), since it takes long to compile.
#pragma once

#include "high_order/layer/cuda/sm80/generator.cuh"
#include "high_order/layer/cuda/sm80/launch.cuh"

namespace hoconv::high_order::layer::sm80 {
namespace {

constexpr int kMostThreads = 256;
constexpr int kChunks = 3;  // of 32 columns: the widest halo tile
// In units of the time that a pixel takes: the time to load one element of the halo tile, and the
// fixed time of a block (its start, the offsets, the barrier).
constexpr double kLoadCost = 0.35, kBlockCost = 64;

// How an image is cut into blocks of warps * M tiles of 16 pixels, `columns` pixels wide.
struct Tiling {
  int warps, columns, rows, across, down;
  HaloTile halo;
  int64_t shared_bytes;
};

template <typename P>
Tiling choose_tiling(const Layer& l, int M, int most_shared) {
  Tiling best{};
  double least = INFINITY;
  for (int warps = kMostThreads / 32; warps >= 1; warps /= 2) {
    for (int side = 1; side <= 2 && side <= warps; ++side) {  // warps side by side in a row
      Tiling tiling{warps, 16 * M * side, warps / side};
      tiling.across = (l.W + tiling.columns - 1) / tiling.columns;
      tiling.down = (l.H + tiling.rows - 1) / tiling.rows;
      tiling.halo = make_halo_tile<P>(tiling.rows + 2 * l.reach, tiling.columns + 2 * l.reach);
      tiling.shared_bytes = 4 * (8 * int64_t{depth_steps<P>(l)} + tiling.halo.words(l));
      if (tiling.shared_bytes > most_shared || tiling.halo.columns > 32 * kChunks) continue;
      const int pixels = tiling.columns * tiling.rows;
      const double loads = double(tiling.halo.rows) * tiling.halo.columns;
      const double block = pixels + kLoadCost * loads + kBlockCost;
      const double cost = double(tiling.across) * tiling.down * block;
      if (cost < least) least = cost, best = tiling;
    }
  }
  return best;
}

// Loads the halo tile from row `top` and column `left` on. A warp issues the loads of `at_once`
// rows before it waits for the first.
template <typename P, bool Contiguous>
__device__ __forceinline__ void load_halo_tile(const Image<const typename P::T>& x, const Layer& l,
                                               const Tiling& tiling, uint32_t* shared_x, int64_t b,
                                               int top, int left) {
  using T = typename P::T;
  constexpr int at_once = 5;
  const HaloTile& halo = tiling.halo;
  const T zero = narrow<T>(0.0f);
  const int lane = threadIdx.x % 32, lines = l.C * halo.rows, columns = halo.columns;
  const int64_t next_column = Contiguous ? 1 : x.s.w;
  const T* corner = x.at(b, 0, 0, 0);
  const float per_row = 1.0f / halo.rows;
  bool exists[kChunks], next_exists[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int q = 32 * i + lane, column = left + q;
    exists[i] = q < columns && column >= 0 && column < l.W;
    next_exists[i] = P::elements == 2 && q < columns && column + 1 >= 0 && column + 1 < l.W;
  }
  for (int first = threadIdx.x / 32; first < lines; first += at_once * tiling.warps) {
    T value[at_once][kChunks], next[at_once][kChunks];
#pragma unroll
    for (int u = 0; u < at_once; ++u) {
      const int line = first + u * tiling.warps, c = (line + 0.5f) * per_row,
                row = line - c * halo.rows;
      const bool inside = line < lines && top + row >= 0 && top + row < l.H;
      const T* from = corner + c * x.s.c + (top + row) * x.s.h + (left + lane) * next_column;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        value[u][i] = next[u][i] = zero;
        if (inside && exists[i]) value[u][i] = from[32 * i * next_column];
        if (inside && next_exists[i]) next[u][i] = from[(32 * i + 1) * next_column];
      }
    }
#pragma unroll
    for (int u = 0; u < at_once; ++u) {
      const int line = first + u * tiling.warps;
      uint32_t* to = shared_x + line * halo.pitch + lane;
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
        if (line < lines && 32 * i + lane < columns)
          P::planes(value[u][i], next[u][i], to[32 * i], to[32 * i + halo.plane(l)]);
    }
  }
}

__device__ __forceinline__ float total(float value, int far) {
  return value + __shfl_xor_sync(~0u, value, far);
}

// Computes the M tiles of a warp, at row `h`; `column` is that of the lane's first pixel, `at` the
// corner of its window.
template <typename P, int k, int M>
__device__ __forceinline__ void compute(const uint32_t* at, const int* offsets,
                                        const Parameters<P>& parameters,
                                        const Image<typename P::T>& out, bool pairs, const Layer& l,
                                        const HaloTile& halo, int64_t b, int group, int h,
                                        int column) {
  using T = typename P::T;
  constexpr int N = columns_of<k>;
  const int t = threadIdx.x % 4;
  float weight[M][N][4];
  generate<P, N, M>(weight, at, offsets, halo.plane(l), parameters.of_group(group),
                    parameters.bias + group * 8 * N, parameters.steps);
  if (l.softmax)
#pragma unroll
    for (int m = 0; m < M; ++m)
      softmax_taps(weight[m], [t](int j, int e) { return 8 * j + 2 * t + e < k * k; });

  at += group * l.group_channels * halo.channel();
  const uint32_t* pixels[N][2];  // that the lane's taps read
#pragma unroll
  for (int j = 0; j < N; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) pixels[j][e] = at + tap_offset<k>(l, halo, 8 * j + 2 * t + e);
  // The tile of which the lane writes its pixels, if any.
  const int tile = M == 4 ? t : t % 2;
  column += 16 * tile;
  const bool writes = t < M && h < l.H && column < l.W;
  const uint32_t* centre = at + l.reach * halo.pitch + l.reach + 16 * tile;
  T* to = out.at(b, group * l.group_channels, h, column);
  for (int c = 0; c < l.group_channels; ++c) {
    float sum[4][2] = {};
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * j + 2 * t + e < k * k)
#pragma unroll
          for (int m = 0; m < M; ++m) {
            const float2 pixel = P::pixels(pixels[j][e] + 16 * m);
            sum[m][0] += weight[m][j][e] * pixel.x;
            sum[m][1] += weight[m][j][e + 2] * pixel.y;
          }
        pixels[j][e] += halo.channel();
      }

    // The four lanes add up their sums. In each step a lane gives half of its sums away, so that
    // lane t ends with tile t.
    float mine[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float two[2];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        two[m] = M == 4 ? exchange(sum[m][i], sum[m + 2][i], 2) : total(sum[m][i], 2);
      mine[i] = M >= 2 ? exchange(two[0], two[1], 1) : total(two[0], 1);
    }
    if (writes) {
      if (l.residual) {
        const float2 pixel = P::pixels(centre);
        mine[0] += pixel.x, mine[1] += pixel.y;
      }
      if (P::apart == 1 && pairs) {
        store_sum<2>(to, mine);
      } else {
        to[0] = narrow<T>(mine[0]);
        if (column + P::apart < l.W) to[P::apart * out.s.w] = narrow<T>(mine[1]);
      }
    }
    centre += halo.channel(), to += out.s.c;
  }
}

template <typename P, int k, int M>
__global__ void __launch_bounds__(kMostThreads, 2)
    forward_kernel(Image<const typename P::T> x, Parameters<P> parameters, Image<typename P::T> out,
                   bool pairs, Layer l, Tiling tiling) {
  extern __shared__ uint32_t shared[];
  int* offsets = reinterpret_cast<int*>(shared);
  uint32_t* shared_x = shared + 8 * parameters.steps;
  const HaloTile& halo = tiling.halo;
  const int tiles = tiling.across * tiling.down, warp = threadIdx.x / 32, group = blockIdx.y;
  const int64_t b = blockIdx.x / tiles;
  const int tile = blockIdx.x - b * tiles, strip = tile / tiling.across;
  const int top = strip * tiling.rows, left = (tile - strip * tiling.across) * tiling.columns;

  for (int n = threadIdx.x; n < 8 * parameters.steps; n += blockDim.x)
    offsets[n] = word_offset<P>(l, halo, n);
  if (x.s.w == 1)
    load_halo_tile<P, true>(x, l, tiling, shared_x, b, top - l.reach, left - l.reach);
  else
    load_halo_tile<P, false>(x, l, tiling, shared_x, b, top - l.reach, left - l.reach);
  __syncthreads();

  const int side = tiling.columns / (16 * M), row = warp / side, first = warp % side * 16 * M;
  const int q = first + P::first(threadIdx.x % 32 / 4);  // of the lane's first pixel
  const uint32_t* at = shared_x + row * halo.pitch + q;
  if (top + row >= l.H || left + first >= l.W) return;
  if (M > 1 && left + first + 8 * M >= l.W)  // half of the tiles would be past the row
    compute<P, k, (M > 1 ? M / 2 : 1)>(at, offsets, parameters, out, pairs, l, halo, b, group,
                                       top + row, left + q);
  else
    compute<P, k, M>(at, offsets, parameters, out, pairs, l, halo, b, group, top + row, left + q);
}

}  // namespace

template <typename P>
void Forward<P>::run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                     const Layer& l, Tensor& out, cudaStream_t stream) {
  using T = typename P::T;
  Tensor memory;
  const auto run = [&](auto kernel_size) {
    constexpr int size = decltype(kernel_size)::value, N = columns_of<size>;
    constexpr int most = size == 7 ? 2 : 4;
    const auto parameters = arrange_parameters<P>(weight, bias, l, N, memory, stream);
    const auto with_tiles = [&](auto tiles) {
      constexpr int M = decltype(tiles)::value;
      const int most_shared = most_shared_memory();
      Tiling tiling =
          choose_tiling<P>(l, M, most_shared / 2 - kReservedShared);  // two blocks a multiprocessor
      if (!tiling.warps) tiling = choose_tiling<P>(l, M, most_shared);
      STD_TORCH_CHECK(tiling.warps, "x: too many channels for the fused kernel");
      const int64_t blocks = l.B * tiling.across * tiling.down;
      STD_TORCH_CHECK(blocks < (int64_t{1} << 31) && l.G <= kMaxGridYZ, "x: too large");
      allow_shared_memory(forward_kernel<P, size, M>, tiling.shared_bytes);
      forward_kernel<P, size, M>
          <<<dim3(blocks, l.G), 32 * tiling.warps, tiling.shared_bytes, stream>>>(
              image<T>(x), parameters, mutable_image<T>(out), vectorizable(out, 2), l, tiling);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    };
    // More tiles a warp load the parameters less often; fewer fit narrow images.
    if (l.W > 8 * most)
      with_tiles(std::integral_constant<int, most>{});
    else
      with_tiles(std::integral_constant<int, most / 2>{});
  };
  switch (l.k) {
    case 3:
      return run(std::integral_constant<int, 3>{});
    case 5:
      return run(std::integral_constant<int, 5>{});
    default:
      return run(std::integral_constant<int, 7>{});
  }
}

}  // namespace hoconv::high_order::layer::sm80
