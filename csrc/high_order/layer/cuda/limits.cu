// limits.cuh for Python, which calls the function by its C name.

#include "high_order/layer/cuda/limits.cuh"

extern "C" const char* hoconv_high_order_layer_why_unfused(int64_t k, int64_t s, int64_t C,
                                                           int64_t dilation, const char* dtype,
                                                           bool allow_tf32, int64_t shared_memory) {
  thread_local std::string reasons;  // until the next call of the thread
  reasons =
      hoconv::high_order::layer::why_unfused(k, s, C, dilation, dtype, allow_tf32, shared_memory);
  return reasons.c_str();
}
