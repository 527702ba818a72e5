// The layer that generates its weights, around these kernels.

#include "dynamic_conv1d/cuda/kernels.cuh"
#include "dynamic_conv1d/layer.h"

namespace hoconv::dynamic_conv1d {
namespace {

using OwnLayer = Layer<&forward, &grad_input, &grad_weight>;

}  // namespace
}  // namespace hoconv::dynamic_conv1d

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("dynamic_conv1d_layer.cuda", TORCH_BOX(&hoconv::dynamic_conv1d::OwnLayer::forward));
  m.impl("dynamic_conv1d_layer_backward.cuda",
         TORCH_BOX(&hoconv::dynamic_conv1d::OwnLayer::backward));
}
