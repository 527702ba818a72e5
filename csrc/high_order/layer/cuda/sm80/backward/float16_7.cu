#include "high_order/layer/cuda/sm80/backward.cuh"

namespace hoconv::high_order::layer {
template struct sm80::Backward<HalfPrecision<__half>, 7>;
}
