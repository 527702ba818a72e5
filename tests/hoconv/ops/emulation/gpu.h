// A GPU of one multiprocessor, for kernels compiled as C++: the threads of a block are fibers, and
// blocks run one after another. Shared memory begins as NaN. Copies to it arrive when their thread
// waits for them. Loads and stores of several elements have to be aligned.
#pragma once

#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __shared__ static
#define __noinline__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#undef STD_CUDA_KERNEL_LAUNCH_CHECK
#undef STD_CUDA_CHECK
#define STD_CUDA_KERNEL_LAUNCH_CHECK() (void)0
#define STD_CUDA_CHECK(call) (void)(call)

using cudaStream_t = void*;
using __half = torch::headeronly::Half;
using __nv_bfloat16 = torch::headeronly::BFloat16;
using std::isfinite;
using std::isnan;
using std::max;
using std::min;

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  dim3(int64_t x = 1, int64_t y = 1, int64_t z = 1) : x(x), y(y), z(z) {}
};

namespace gpu {

constexpr int kWarp = 32, kMostThreads = 1024, kSharedBytes = 227 << 10;
constexpr size_t kStackBytes = 1 << 17;
constexpr char kUnset = char(0xff);  // NaN of all types

struct Copy {
  void* to;
  const void* from;
  int bytes;
};
struct Fiber {
  ucontext_t context;
  dim3 thread;
  bool done;
  int64_t block_barriers, warp_barriers;  // that it has come to
  std::vector<Copy> copies;
};

inline Fiber* current;
inline ucontext_t scheduler;
inline dim3 block, grid, block_size;
inline std::vector<Fiber> fibers;
inline std::vector<std::unique_ptr<char[]>> stacks;
inline std::vector<uint4> memory;
inline std::function<void()> body;
inline char slots[kMostThreads / kWarp][2][kWarp][16];

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "%s\n", what);
  abort();
}

// Waits until threads have come to as many barriers as this one, as `barriers` counts them.
inline void wait(int64_t Fiber::* barriers, size_t first, size_t count) {
  const int64_t own = ++(current->*barriers);
  const auto waits = [&] {
    return std::any_of(fibers.begin() + first, fibers.begin() + first + count,
                       [&](const Fiber& f) { return !f.done && f.*barriers < own; });
  };
  while (waits()) swapcontext(&current->context, &scheduler);
}

inline uint4* shared_memory() { return memory.data(); }

template <typename T>
T exchange(T value, int lane) {
  static_assert(sizeof(T) <= 16);
  const size_t thread = current->thread.x, warp = thread / kWarp;
  const auto& slot = slots[warp][(current->warp_barriers + 1) % 2];
  memcpy(const_cast<char*>(slot[thread % kWarp]), &value, sizeof(T));
  wait(&Fiber::warp_barriers, warp * kWarp, std::min<size_t>(kWarp, fibers.size() - warp * kWarp));
  memcpy(&value, slot[lane], sizeof(T));
  return value;
}

// The values of all lanes of the warp.
template <typename T>
void collect(const T& value, T (&all)[kWarp]) {
  static_assert(sizeof(T) <= 16);
  const size_t thread = current->thread.x, warp = thread / kWarp;
  const auto& slot = slots[warp][(current->warp_barriers + 1) % 2];
  memcpy(const_cast<char*>(slot[thread % kWarp]), &value, sizeof(T));
  wait(&Fiber::warp_barriers, warp * kWarp, std::min<size_t>(kWarp, fibers.size() - warp * kWarp));
  for (int lane = 0; lane < kWarp; ++lane) memcpy(&all[lane], slot[lane], sizeof(T));
}

template <typename T>
void check_aligned(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) fail("an address that is not aligned");
}

template <int Bytes>
void copy_async(void* to, const void* from) {
  if (reinterpret_cast<uintptr_t>(to) % Bytes || reinterpret_cast<uintptr_t>(from) % Bytes)
    fail("a copy that is not aligned");
  current->copies.push_back({to, from, Bytes});
}
inline void wait_for_copies() {
  for (const Copy& copy : current->copies) memcpy(copy.to, copy.from, copy.bytes);
  current->copies.clear();
}

inline void run_block(int threads, bool reversed) {
  fibers = std::vector<Fiber>(threads);
  for (int i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    f.thread.x = i;
    f.done = false;
    f.block_barriers = f.warp_barriers = 0;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stacks[i].get();
    f.context.uc_stack.ss_size = kStackBytes;
    f.context.uc_link = &scheduler;
    makecontext(&f.context, +[] { body(), current->done = true; }, 0);
  }
  for (bool left = true; left;) {
    left = false;
    for (int i = 0; i < threads; ++i) {
      Fiber& f = fibers[reversed ? threads - 1 - i : i];
      if (f.done) continue;
      left = true;
      current = &f;
      swapcontext(&scheduler, &f.context);
    }
  }
  for (const Fiber& f : fibers)
    if (!f.copies.empty()) fail("a copy that nobody waits for");
}

template <typename F>
void launch(dim3 blocks, int64_t threads, int64_t bytes, F&& kernel) {
  constexpr unsigned most_yz = 65535;
  if (!blocks.x || !blocks.y || !blocks.z || blocks.y > most_yz || blocks.z > most_yz ||
      threads > kMostThreads || bytes > kSharedBytes)
    fail("a launch that CUDA refuses");
  while (static_cast<int64_t>(stacks.size()) < threads) stacks.emplace_back(new char[kStackBytes]);
  grid = blocks, block_size = dim3(threads), body = kernel;
  bool reversed = false;
  for (unsigned z = 0; z < blocks.z; ++z)
    for (unsigned y = 0; y < blocks.y; ++y)
      for (unsigned x = 0; x < blocks.x; ++x, reversed = !reversed) {
        block.x = x, block.y = y, block.z = z;
        memory.assign(bytes / sizeof(uint4) + 2, uint4{});
        memset(memory.data(), kUnset, memory.size() * sizeof(uint4));
        run_block(threads, reversed);
        const char* const end = reinterpret_cast<const char*>(memory.data()) + bytes;
        if (std::any_of(end, end + sizeof(uint4), [](char c) { return c != kUnset; }))
          fail("a store behind shared memory");
      }
}

}  // namespace gpu

#define threadIdx (gpu::current->thread)
#define blockIdx (gpu::block)
#define gridDim (gpu::grid)
#define blockDim (gpu::block_size)

inline void __syncthreads() { gpu::wait(&gpu::Fiber::block_barriers, 0, gpu::fibers.size()); }
inline bool __syncthreads_and(bool vote) {
  static bool votes[gpu::kMostThreads];
  votes[threadIdx.x] = vote;
  __syncthreads();
  const bool all = std::all_of(votes, votes + gpu::fibers.size(), [](bool v) { return v; });
  __syncthreads();  // before the next votes
  return all;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return gpu::exchange(value, lane % gpu::kWarp);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  return gpu::exchange(value, threadIdx.x % gpu::kWarp ^ lanes);
}
template <typename T>
T __ldg(const T* p) {
  gpu::check_aligned(p);
  return *p;
}
template <typename T>
T __ldcs(const T* p) {
  return __ldg(p);
}
template <typename T>
void __stcs(T* p, T value) {
  gpu::check_aligned(p);
  *p = value;
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  bool votes[gpu::kWarp];
  gpu::collect(vote, votes);
  unsigned bits = 0;
  for (int lane = 0; lane < gpu::kWarp; ++lane) bits |= unsigned{votes[lane]} << lane;
  return bits;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= unsigned(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
inline int __dp2a_lo(int a, int b, int c) {
  return c + static_cast<int16_t>(a) * static_cast<int8_t>(b) +
         (a >> 16) * static_cast<int8_t>(b >> 8);
}
inline unsigned __dp2a_lo(unsigned a, unsigned b, unsigned c) {
  return c + (a & 0xffff) * (b & 0xff) + (a >> 16) * (b >> 8 & 0xff);
}
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t{a} * b >> 32; }
inline float __uint_as_float(unsigned bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}
inline float __half2float(__half x) { return x; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
// Each rounds, whatever the compiler would join.
inline float rounded(volatile float x) { return x; }
inline float __fadd_rn(float a, float b) { return rounded(a + b); }
inline float __fsub_rn(float a, float b) { return rounded(a - b); }
inline float __fmul_rn(float a, float b) { return rounded(a * b); }
inline float __fdiv_rn(float a, float b) { return rounded(a / b); }
inline __half __float2half_rn(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }

// An H100.
enum cudaDeviceAttr {
  cudaDevAttrMaxSharedMemoryPerBlockOptin = gpu::kSharedBytes,
  cudaDevAttrMaxRegistersPerMultiprocessor = 1 << 16,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 228 << 10,
  cudaDevAttrMultiProcessorCount = 132,
};
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <typename Kernel>
int cudaFuncSetAttribute(Kernel, int, int) {
  return 0;
}

namespace hoconv {

inline int device_attribute(cudaDeviceAttr attribute) { return attribute; }

// As high_order/tensor_cores.cuh.
namespace high_order {

inline uint32_t shared_address(const void* p) {
  return static_cast<const char*>(p) - reinterpret_cast<const char*>(gpu::memory.data());
}
template <typename T>
T* shared_at(uint32_t address) {
  T* p = reinterpret_cast<T*>(reinterpret_cast<char*>(gpu::memory.data()) + address);
  if (address + sizeof(T) > gpu::memory.size() * sizeof(uint4)) gpu::fail("no shared memory");
  gpu::check_aligned(p);
  return p;
}
inline void store_half(uint32_t at, uint32_t half) { *shared_at<uint16_t>(at) = half; }
inline unsigned short load_half(uint32_t at) { return *shared_at<uint16_t>(at); }
inline void store_unit(uint32_t at, const uint32_t (&unit)[4]) {
  *shared_at<uint4>(at) = {unit[0], unit[1], unit[2], unit[3]};
}
struct Row {  // of an 8 x 8 matrix
  uint16_t e[8];
};
template <bool Transposed = false>
void load_matrix(uint32_t at, uint32_t (&to)[4]) {
  Row own, rows[gpu::kWarp];
  memcpy(&own, shared_at<uint4>(at), sizeof(own));
  gpu::collect(own, rows);
  const int lane = threadIdx.x % gpu::kWarp, row = lane / 4, column = lane % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const Row* matrix = rows + 8 * i;
    const uint16_t low = Transposed ? matrix[column].e[row] : matrix[row].e[column];
    const uint16_t high = Transposed ? matrix[column + 1].e[row] : matrix[row].e[column + 1];
    to[i] = low | uint32_t{high} << 16;
  }
}
template <typename T>
void multiply(float (&sum)[4], const uint32_t (&left)[4], uint32_t right, uint32_t deeper) {
  const auto element = [](uint32_t word, int i) {
    const uint16_t bits = word >> 16 * i;
    T value;
    memcpy(&value, &bits, sizeof(value));
    return static_cast<float>(value);
  };
  uint4 lefts[gpu::kWarp];
  uint2 rights[gpu::kWarp];
  gpu::collect(uint4{left[0], left[1], left[2], left[3]}, lefts);
  gpu::collect(uint2{right, deeper}, rights);
  const int lane = threadIdx.x % gpu::kWarp;
  for (int n = 0; n < 4; ++n) {
    const int row = lane / 4, column = lane % 4 * 2 + n % 2;
    for (int k = 0; k < 16; ++k) {
      const uint4& of_row = lefts[row * 4 + k % 8 / 2];
      const uint2& of_column = rights[column * 4 + k % 8 / 2];
      const uint32_t upper = k < 8 ? of_row.x : of_row.z, lower = k < 8 ? of_row.y : of_row.w;
      sum[n] +=
          element(n < 2 ? upper : lower, k % 2) * element(k < 8 ? of_column.x : of_column.y, k % 2);
    }
  }
}

}  // namespace high_order

struct Launch {
  template <typename Tensor>
  explicit Launch(const Tensor&) {}
  cudaStream_t stream = nullptr;
};

}  // namespace hoconv
