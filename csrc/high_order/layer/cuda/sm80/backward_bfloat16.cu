#include "high_order/layer/cuda/sm80/backward.cuh"

namespace hoconv::high_order::layer::sm80 {

template void run_backward<HalfPrecision<__nv_bfloat16>>(const Tensor&, const Tensor&,
                                                         const Tensor&,
                                                         const std::optional<Tensor>&, const Layer&,
                                                         Tensor&, Tensor&, Tensor&, cudaStream_t);

}  // namespace hoconv::high_order::layer::sm80
