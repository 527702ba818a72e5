// Checks a matrix product, and calls the kernel of its multiplier (gemm.cuh).

#include <string>

#include "approx/cuda/view.cuh"

namespace hoconv::approx {

void gemm(const Chosen& multiplier, const Product& p, const Tensor& like, cudaStream_t stream) {
  if (p.batch * p.M * p.N == 0) return;
  STD_TORCH_CHECK(p.M < (int64_t{1} << 31) && p.N < (int64_t{1} << 31) && p.K < (int64_t{1} << 31),
                  "a product's rows, columns and depth: expected less than 2^31 each");
  if (multiplier.entries) return gemm_by_table(multiplier.table(like), p, stream);
  with_multiplier(multiplier.name,
                  [&](auto definition) { Gemm<decltype(definition)>::run(p, like, stream); });
}

}  // namespace hoconv::approx
