// Products of 16 x 16 and 16 x 8 matrices of 16-bit elements on tensor cores, and shared memory by
// its own addresses, from which a warp loads them.
#pragma once

#include "hoconv/cuda_launch.cuh"

namespace hoconv::high_order {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void store_half(uint32_t at, uint32_t half) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(static_cast<unsigned short>(half))
               : "memory");
}
__device__ __forceinline__ unsigned short load_half(uint32_t at) {
  unsigned short half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(at) : "memory");
  return half;
}
__device__ __forceinline__ void store_unit(uint32_t at, const uint32_t (&unit)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(unit[0]), "r"(unit[1]),
               "r"(unit[2]), "r"(unit[3])
               : "memory");
}

// Loads a 16 x 16 matrix. Lane l has the address of its row l % 16, at column 0 or, from lane 16
// on, 8. The result is the left operand of `multiply`; with `Transposed` two right operands, of 8
// columns each, of a matrix whose rows are the depth of the product.
template <bool Transposed = false>
__device__ __forceinline__ void load_matrix(uint32_t at, uint32_t (&to)[4]) {
  if constexpr (Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
}

// sum += left * right, of 16 x 16 and 16 x 8 elements. Lane l has of the sum the rows l / 4 and
// l / 4 + 8, two elements each from the column l % 4 * 2 on.
template <typename T>
__device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&left)[4], uint32_t right,
                                         uint32_t deeper) {
  if constexpr (std::is_same_v<T, __half>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right), "r"(deeper));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right), "r"(deeper));
}

}  // namespace hoconv::high_order
