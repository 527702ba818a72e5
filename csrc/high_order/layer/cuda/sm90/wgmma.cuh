// Products of a warpgroup (four warps) on Hopper's tensor cores (PTX ISA, wgmma.mma_async): A, 64
// rows, from registers; B from shared memory; sums in registers. Needs sm_90a.
//
// Each warp has 16 of the rows, as fragments of A and of the sums like those of mma.m16n8
// (precision.cuh). A product has a depth of 8 words. B is in shared memory as blocks of 8 columns
// by 4 words: 16 bytes a column, its words next to each other.
#pragma once

#include "high_order/layer/cuda/precision.cuh"

namespace hoconv::high_order::layer::sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Orders earlier writes of the sums and operands in registers before the products that follow.
__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_end() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `Pending` groups of products are unfinished.
template <int Pending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Makes this thread's writes to shared memory visible to products that read them as B after a
// barrier.
__device__ __forceinline__ void publish_operands() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

constexpr int kBlockBytes = 128;  // 8 columns of 16 bytes

// The descriptor of an operand B whose blocks are `depth_stride` bytes apart along the depth and
// `column_stride` bytes along the columns.
__device__ __forceinline__ uint64_t operand_descriptor(const void* blocks, int depth_stride,
                                                       int column_stride) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(blocks));
  return uint64_t{(address & 0x3ffff) >> 4} | uint64_t(depth_stride >> 4) << 16 |
         uint64_t(column_stride >> 4) << 32;
}

#define HOCONV_SUMS(kind, j) kind(c[j][0]), kind(c[j][1]), kind(c[j][2]), kind(c[j][3])
#define HOCONV_WGMMA(columns, type, last, registers, add, ...)                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add                                         \
               ", 0;\n"                                                                        \
               "wgmma.mma_async.sync.aligned.m64n" columns type " " registers ", p, 1, 1" last \
               ";\n}\n"                                                                        \
               : __VA_ARGS__                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define HOCONV_WGMMA_OF(type, last, add, kind)                                                     \
  if constexpr (N == 2)                                                                            \
    HOCONV_WGMMA("16", type, last, "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12", add,         \
                 HOCONV_SUMS(kind, 0), HOCONV_SUMS(kind, 1));                                      \
  else if constexpr (N == 3)                                                                       \
    HOCONV_WGMMA("24", type, last,                                                                 \
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}, {%12,%13,%14,%15}, %16", add,           \
                 HOCONV_SUMS(kind, 0), HOCONV_SUMS(kind, 1), HOCONV_SUMS(kind, 2));                \
  else if constexpr (N == 4)                                                                       \
    HOCONV_WGMMA("32", type, last,                                                                 \
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, "    \
                 "%20",                                                                            \
                 add, HOCONV_SUMS(kind, 0), HOCONV_SUMS(kind, 1), HOCONV_SUMS(kind, 2),            \
                 HOCONV_SUMS(kind, 3));                                                            \
  else if constexpr (N == 5)                                                                       \
    HOCONV_WGMMA("40", type, last,                                                                 \
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19}, "       \
                 "{%20,%21,%22,%23}, %24",                                                         \
                 add, HOCONV_SUMS(kind, 0), HOCONV_SUMS(kind, 1), HOCONV_SUMS(kind, 2),            \
                 HOCONV_SUMS(kind, 3), HOCONV_SUMS(kind, 4));                                      \
  else                                                                                             \
    HOCONV_WGMMA("56", type, last,                                                                 \
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21," \
                 "%22,%23,%24,%25,%26,%27}, {%28,%29,%30,%31}, %32",                               \
                 add, HOCONV_SUMS(kind, 0), HOCONV_SUMS(kind, 1), HOCONV_SUMS(kind, 2),            \
                 HOCONV_SUMS(kind, 3), HOCONV_SUMS(kind, 4), HOCONV_SUMS(kind, 5),                 \
                 HOCONV_SUMS(kind, 6))
#define HOCONV_WGMMA_KIND(type, last)       \
  if (add) {                                \
    HOCONV_WGMMA_OF(type, last, "1", "+f"); \
  } else {                                  \
    HOCONV_WGMMA_OF(type, last, "0", "=f"); \
  }

// Starts c = a * b, or c += a * b if `add`, which must be a constant. All four warps call it
// together.
template <typename P, int N>
__device__ __forceinline__ void multiply(float (&c)[N][4], const uint32_t (&a)[4], uint64_t b,
                                         bool add) {
  static_assert((N >= 2 && N <= 5) || N == 7);
  if constexpr (P::elements == 1) {
    HOCONV_WGMMA_KIND("k8.f32.tf32.tf32", "");
  } else if constexpr (std::is_same_v<typename P::T, __half>) {
    HOCONV_WGMMA_KIND("k16.f32.f16.f16", ", 0");
  } else {
    HOCONV_WGMMA_KIND("k16.f32.bf16.bf16", ", 0");
  }
}

#undef HOCONV_WGMMA_KIND
#undef HOCONV_WGMMA_OF
#undef HOCONV_WGMMA
#undef HOCONV_SUMS

#endif

}  // namespace hoconv::high_order::layer::sm90
