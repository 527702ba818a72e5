// limits.cuh for Python, which calls the functions by their C names.

#include "high_order/layer/cuda/limits.cuh"

extern "C" const char* hoconv_high_order_layer_why_unfused(int64_t k, int64_t s, int64_t C,
                                                           int64_t dilation, const char* dtype,
                                                           int64_t shared_memory) {
  thread_local std::string reasons;  // until the next call of the thread
  reasons = hoconv::high_order::layer::why_unfused(k, s, C, dilation, dtype, shared_memory);
  return reasons.c_str();
}

extern "C" int64_t hoconv_high_order_layer_least_width_backward(int64_t k, int64_t s, int64_t C,
                                                                int64_t G, int64_t dilation,
                                                                bool three_products, bool hopper) {
  return hoconv::high_order::layer::least_width_backward(k, s, C, G, dilation, three_products,
                                                         hopper);
}
