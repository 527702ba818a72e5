#include "high_order/layer/cuda/sm80/backward.cuh"

template void hoconv::run_backward<hoconv::TF32>(const Tensor&, const Tensor&, const Tensor&,
                                                 const std::optional<Tensor>&, const Layer&,
                                                 Tensor&, Tensor&, Tensor&, cudaStream_t);
