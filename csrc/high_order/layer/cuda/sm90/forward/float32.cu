#include "high_order/layer/cuda/sm90/forward.cuh"

namespace hoconv::high_order::layer {
template struct sm90::Forward<Float32>;
}
