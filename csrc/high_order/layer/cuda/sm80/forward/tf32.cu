#include "high_order/layer/cuda/sm80/forward.cuh"

namespace hoconv::high_order::layer {
template struct sm80::Forward<TF32>;
}
