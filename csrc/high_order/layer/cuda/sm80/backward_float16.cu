#include "high_order/layer/cuda/sm80/backward.cuh"

template void hoconv::run_backward<hoconv::Half<__half>>(const Tensor&, const Tensor&,
                                                         const Tensor&,
                                                         const std::optional<Tensor>&, const Layer&,
                                                         Tensor&, Tensor&, Tensor&, cudaStream_t);
