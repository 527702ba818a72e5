#include "high_order/layer/cuda/sm90/backward.cuh"

namespace hoconv::high_order::layer {
template struct sm90::Backward<Float32>;
}
