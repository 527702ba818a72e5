// The matrix product whose mantissas' products come from a table: a thread sums an element by the
// definition. The table is read through the L1 cache.
//
// M, N rows and columns of the result, K what is summed over.

#include <algorithm>

#include "approx/cuda/view.cuh"
#include "approx/problem.h"

namespace hoconv::approx {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1 << 20;  // beyond these, each thread takes several elements

__global__ void multiply_by_table(const __grid_constant__ Product p, MantissaTable table) {
  const int64_t size = p.batch * p.M * p.N, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += step) {
    const int64_t n = i % p.N, m = i / p.N % p.M, matrix = i / p.N / p.M;
    const Coordinate row = p.left.row_coordinate(m), column = p.right.row_coordinate(n);
    float total = 0;
    for (int64_t chunk = 0; chunk < p.K; chunk += kChunk) {
      float sum = 0;
      for (int64_t k = chunk; k < min(chunk + kChunk, p.K); ++k) {
        const float x = p.left(matrix, row, p.left.column_coordinate(k));
        const float y = p.right(matrix, column, p.right.column_coordinate(k));
        const bool left_out = (p.left.leaves_out && float_bits(x) == INT32_MIN) ||
                              (p.right.leaves_out && float_bits(y) == INT32_MIN);
        if (!left_out) sum = __fadd_rn(sum, table.multiply(x, y));
      }
      total = chunk == 0 ? sum : __fadd_rn(total, sum);
    }
    p.out.data[matrix * p.out.batch + Target::offset(p.out.row_digits, p.out.row, m) +
               Target::offset(p.out.column_digits, p.out.column, n)] = total;
  }
}

}  // namespace

void gemm_by_table(const MantissaTable& table, const Product& p, cudaStream_t stream) {
  const int64_t blocks = (p.batch * p.M * p.N + kThreads - 1) / kThreads;
  multiply_by_table<<<std::min(blocks, kMostBlocks), kThreads, 0, stream>>>(p, table);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace hoconv::approx
