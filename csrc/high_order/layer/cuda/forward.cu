// The op `high_order_layer`: its sizes, and which kernels compute it.

#include "high_order/layer/cuda/layer.cuh"
#include "high_order/layer/cuda/sm80/launch.cuh"
#include "high_order/layer/cuda/sm90/launch.cuh"

namespace hoconv::high_order::layer {
namespace {

Tensor layer_forward(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias, int64_t k,
                     int64_t dilation, bool softmax, bool residual, bool allow_tf32) {
  const Layer l(x, weight, bias, k, dilation, softmax, residual, allow_tf32);
  Tensor out = make_like(x);
  if (out.numel() == 0) return out;
  const Launch launch(x);
  const auto forward = sm90::serves(l) ? sm90::forward : sm80::forward;
  forward(x, weight, bias, l, out, launch.stream);
  return out;
}

}  // namespace
}  // namespace hoconv::high_order::layer

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("high_order_layer.cuda", TORCH_BOX(&hoconv::high_order::layer::layer_forward));
}
