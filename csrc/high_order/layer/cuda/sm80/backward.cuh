// Launches the backward kernel with as many blocks as the GPU runs at the same time, and the
// kernels that add up their partial sums. Each precision and k is instantiated in a source of its
// own (backward/), since it takes long to compile.
//
// B batch, C channels, G groups of channels, H height, W width, k kernel size, K = k * k taps,
// s kernel size of the generator, N = columns / 8 of the product, Q channels a chunk.
#pragma once

#include "high_order/layer/cuda/segments.cuh"
#include "high_order/layer/cuda/sm80/backward_kernel.cuh"
#include "high_order/layer/cuda/sm80/backward_sums.cuh"
#include "high_order/layer/cuda/sm80/launch.cuh"

namespace hoconv::high_order::layer::sm80 {

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

  // As many warps as the width needs and shared memory fits; strips of nearly equal widths.
  Strips p{};
  p.warps = std::min((l.W + 2 * l.reach + 15) / 16, kMostWarps);
  int64_t shared_bytes;
  for (;;) {
    const int most = p.region() - 2 * l.reach;
    p.across = (l.W + most - 1) / most, p.columns = (l.W + p.across - 1) / p.across;
    p.kept = l.reach + l.tap_reach + 1, p.delayed = l.reach - l.generator_reach + 1;
    p.halo = make_halo_tile<P>(2 * (2 * l.reach + 1), p.region() + 2 * l.reach);
    shared_bytes = 4 * BackwardShared<P, N, Q>(l, p, parameters.steps).total;
    if (shared_bytes <= most_shared_memory()) break;
    p.warps -= 1;
    STD_TORCH_CHECK(p.region() > 2 * l.reach, "x: too many channels for the fused kernel");
  }
  const auto kernel = backward_kernel<P, k, s, Q>;
  allow_shared_memory(kernel, shared_bytes);
  const int64_t resident = resident_blocks(kernel, 32 * p.warps, shared_bytes);
  const int64_t slots = std::max<int64_t>(resident / chunks, 1);
  const Segments segments = cut_strips(l.H, l.B * p.across, 2 * l.reach + 2, slots);
  p.rows = segments.rows, p.down = segments.down;
  const int blocks = std::min(l.B * p.across * p.down, slots);

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
    sum_weight<T, Q><<<dim3(sum_blocks(rows * columns), chunks), sum_threads(), 0, stream>>>(
        weight_sums, static_cast<T*>(grad_weight.mutable_data_ptr()), image_strides(grad_weight), l,
        blocks, p.warps, rows, columns, group);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    sum_bias<T><<<1, kBiasThreads, 0, stream>>>(bias_sums,
                                                static_cast<T*>(grad_bias.mutable_data_ptr()), l,
                                                blocks * p.warps, columns, group);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

template <typename P, int k>
void Backward<P, k>::run(const Tensor& grad, const Tensor& x, const Tensor& weight,
                         const std::optional<Tensor>& bias, const Layer& l, Tensor& grad_x,
                         Tensor& grad_weight, Tensor& grad_bias, cudaStream_t stream) {
  const auto with_generator = [&](auto s) {
    sm80::run<P, k, decltype(s)::value>(grad, x, weight, bias, l, grad_x, grad_weight, grad_bias,
                                        stream);
  };
  switch (l.s) {
    case 1:
      return with_generator(std::integral_constant<int, 1>{});
    case 3:
      return with_generator(std::integral_constant<int, 3>{});
    case 5:
      return with_generator(std::integral_constant<int, 5>{});
    default:
      return with_generator(std::integral_constant<int, 7>{});
  }
}

}  // namespace hoconv::high_order::layer::sm80
