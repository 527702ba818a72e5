// Instructions of compute capability 9.0 that CUDA has no function for: shared memory of other
// blocks of the cluster, barriers that count bytes, memory that other clusters write meanwhile, and
// tensor cores.
#pragma once

#include "recurrent/block.cuh"

namespace hoconv::recurrent {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The address, in the shared memory of another block, of what lies at `address` in one's own.
__device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
  uint32_t found;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(found) : "r"(address), "r"(rank));
  return found;
}

// The same object in the shared memory of another block.
template <typename T>
__device__ __forceinline__ T* in_block(T* object, int rank) {
  T* found;
  asm("mapa.u64 %0, %1, %2;" : "=l"(found) : "l"(object), "r"(rank));
  return found;
}

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  // Not .aligned: lanes of a warp may come here one after another.
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// A barrier in shared memory, of whose phases each ends with one call of `expect_bytes` and with
// the arrival of those bytes, in any order.
__device__ __forceinline__ void init_barrier(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Waits for the end of a phase: of the first, third, ... for parity 0.
__device__ __forceinline__ void wait_for_phase(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
}

// Stores BYTES bytes to another block and counts them at its barrier.
template <int BYTES>
__device__ __forceinline__ void push(uint32_t to, uint32_t barrier, const void* from) {
  if constexpr (BYTES == 16) {
    const uint4 v = *static_cast<const uint4*>(from);
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(to),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
        : "memory");
  } else if constexpr (BYTES == 8) {
    const uint2 v = *static_cast<const uint2*>(from);
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::
            "r"(to),
        "r"(v.x), "r"(v.y), "r"(barrier)
        : "memory");
  } else {
    static_assert(BYTES == 4);
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to),
        "r"(*static_cast<const uint32_t*>(from)), "r"(barrier)
        : "memory");
  }
}

// Makes what this thread has written before to global memory visible to copies that other threads
// begin after a barrier.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// Copies BYTES bytes of global memory to the same place in the blocks whose bits are in `mask`, and
// counts them at the barrier of each.
template <int BYTES>
__device__ __forceinline__ void copy_to(uint32_t to, uint32_t barrier, const void* from,
                                        uint32_t mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "n"(BYTES), "r"(barrier), "h"(static_cast<unsigned short>(mask))
      : "memory");
}

// Copies 16 bytes of global memory to one's own shared memory. The copies of a thread that it has
// begun since the last call of `group_copies` are a group; `wait_for_copies` waits for all groups
// but the LAST ones.
__device__ __forceinline__ void copy_word(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void group_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LAST>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LAST) : "memory");
}

// Stores 8 or 16 bytes to global memory at once.
__device__ __forceinline__ void store_global(void* to, uint2 v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_global(void* to, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
// Stores and loads 16 bytes of global memory, each half at once.
__device__ __forceinline__ void store_word(uint4* word, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(word), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_word(const uint4* word) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(word)
               : "memory");
  return v;
}

// Loads four tiles of 8 x 8 numbers of 16 bits: lane l gives the address of row l % 8 of tile l /
// 8, and gets numbers l % 4 * 2 and the next of row l / 4 of each.
__device__ __forceinline__ void load_tiles(uint32_t (&tiles)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(shared_address(row))
               : "memory");
}

// Stores two such tiles with rows and columns in each other's place: lane l < 16 gives the address
// of row l % 8 of tile l / 8, which has column l % 8 of what lanes have.
__device__ __forceinline__ void store_turned(void* row, const uint32_t (&tiles)[2]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)),
      "r"(tiles[0]), "r"(tiles[1])
      : "memory");
}

// Adds the product of a tile of 16 x 16 numbers and one of 16 x 8 to one of 16 x 8.
__device__ __forceinline__ void multiply_tile(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1, BFloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_tile(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1, Half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t as_bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float as_float(uint32_t bits) { return __uint_as_float(bits); }
// Rounds to 10 bits of mantissa, which a product in TF32 reads.
__device__ __forceinline__ uint32_t round_to_tf32(float x) {
  uint32_t bits;
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));  // one instruction
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#endif
  return bits;
}
// The same of 16 x 8 numbers in TF32 and 8 x 8.
__device__ __forceinline__ void multiply_tile(float (&sum)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Products of four neighbouring warps, which only compute capability 9.0 has. The code of others
// does not contain them: they are templates.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool HAS_WARPGROUPS = true;
#else
constexpr bool HAS_WARPGROUPS = false;
#endif

// Describes tiles of 8 rows of 16 bytes in shared memory, of which those of further rows follow
// each other, and that of the next columns lies so many bytes further on. The tiles that lie 16 n
// bytes further on have the description plus n. All lanes of a warp have the same, and the compiler
// knows: registers of a warp hold it.
__device__ __forceinline__ uint32_t describe_tiles(const void* tiles, uint32_t next_columns) {
  const uint32_t own = shared_address(tiles) & 0x3ffff;  // above it is the rank of the block
  return __shfl_sync(0xffffffffu, own / 16 | next_columns / 16 << 16, 0);
}

// What threads have written to shared memory before a barrier is visible to products that begin.
template <typename T>
__device__ __forceinline__ void begin_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Products since the last call are a group; all but the last N groups have ended.
template <typename T>
__device__ __forceinline__ void group_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <typename T, int N>
__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Adds the product of a tile of 64 x 16 numbers, of which each warp has 16 rows, and one of 16 x 24
// in shared memory. The first one is in registers, as of multiply_tile, or in shared memory, too.
#define HOCONV_SUMS(s)                                                                          \
  "+f"(s[0][0][0]), "+f"(s[0][0][1]), "+f"(s[0][0][2]), "+f"(s[0][0][3]), "+f"(s[1][0][0]),     \
      "+f"(s[1][0][1]), "+f"(s[1][0][2]), "+f"(s[1][0][3]), "+f"(s[2][0][0]), "+f"(s[2][0][1]), \
      "+f"(s[2][0][2]), "+f"(s[2][0][3])
#define HOCONV_MULTIPLY(types) \
  "wgmma.mma_async.sync.aligned.m64n24k16.f32." types " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}, "
#define HOCONV_TILES(name, low) ".reg .b64 " name "; mov.b64 " name ", {" low ", 8}; "
template <typename T>
__device__ __forceinline__ void multiply_tiles(float (&sum)[3][1][4], const uint32_t (&a)[4],
                                               uint32_t b) {
  if constexpr (T::IS_BFLOAT16)
    asm volatile("{" HOCONV_TILES("b", "%16")
                     HOCONV_MULTIPLY("bf16.bf16") "{%12,%13,%14,%15}, b, 1, 1, 1, 0;}"
                 : HOCONV_SUMS(sum)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
  else
    asm volatile("{" HOCONV_TILES("b", "%16")
                     HOCONV_MULTIPLY("f16.f16") "{%12,%13,%14,%15}, b, 1, 1, 1, 0;}"
                 : HOCONV_SUMS(sum)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
template <typename T>
__device__ __forceinline__ void multiply_tiles(float (&sum)[3][1][4], uint32_t a, uint32_t b) {
  if constexpr (T::IS_BFLOAT16)
    asm volatile("{" HOCONV_TILES("a", "%12") HOCONV_TILES("b", "%13")
                     HOCONV_MULTIPLY("bf16.bf16") "a, b, 1, 1, 1, 0, 0;}"
                 : HOCONV_SUMS(sum)
                 : "r"(a), "r"(b));
  else
    asm volatile("{" HOCONV_TILES("a", "%12") HOCONV_TILES("b", "%13")
                     HOCONV_MULTIPLY("f16.f16") "a, b, 1, 1, 1, 0, 0;}"
                 : HOCONV_SUMS(sum)
                 : "r"(a), "r"(b));
}
#undef HOCONV_SUMS
#undef HOCONV_MULTIPLY
#undef HOCONV_TILES

}  // namespace hoconv::recurrent
