#include "approx/cuda/gemm.cuh"

template struct hoconv::approx::Gemm<hoconv::approx::Logarithmic<3, true>>;
