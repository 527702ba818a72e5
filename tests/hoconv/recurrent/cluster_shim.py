"""Runs generated kernels of clusters on a CPU: threads are fibers, which wait for each other.

Only instructions are emulated; what is written in terms of them (csrc/recurrent/cluster/) is
compiled as it is. A fiber runs until it waits; the first one that need not wait is next. So one
block, and one cluster of a team, gets as far ahead of the others as the kernel lets it. What a
block pushes or posts arrives at once or, where the threads run in the reverse order, when its
receiver waits for it: as early and as late as it may.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from hoconv import jit
from hoconv.jit.driver import as_argument
from hoconv.jit.generated import compile_cpp
from hoconv.recurrent.codegen.cluster.kernel import ClusterSource, emit_cluster
from hoconv.recurrent.codegen.cluster.layout import SHARED_BYTES, ClusterLayout, ClusterShape
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.passes.cluster.distribute import distribute
from hoconv.recurrent.runtime.clusters import launch_runs
from hoconv.recurrent.runtime.interpret import GroupLoops, LoopRun, Tensors

_HEADER = """
#include <ucontext.h>
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#include "recurrent/math.h"
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
using std::max;
using std::min;
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint4 __ldcg(const uint4* from) { return *from; }

namespace hoconv::recurrent {

template <typename R>
struct Rounded {
  static constexpr bool IS_BFLOAT16 = false;
  uint16_t bits;
  Rounded() = default;
  explicit Rounded(float x) : bits(R(x).x) {}
  explicit operator float() const { return R(bits, R::from_bits()); }
};
using BFloat16 = Rounded<torch::headeronly::BFloat16>;
using Half = Rounded<torch::headeronly::Half>;

struct Pushed { char* to; std::vector<char> data; };
struct Barrier {
  int64_t pending = 1, missing = 0, phase = 0;
  std::vector<Pushed> coming;
};
struct Warp {
  int64_t arrivals[2] = {};
  char slots[2][32][32];
};
struct Block {
  std::vector<char> memory;
  std::map<uint32_t, Barrier> barriers;
  std::vector<Warp> warps;
  int64_t arrivals = 0;
};
struct Cluster { std::vector<Block> blocks; int64_t arrivals = 0; };
// A word of global memory for another cluster, and how many halves of it have not been looked for.
struct Posted { uint4 word; int halves; };
struct Index { unsigned x, y; };
struct Copy { void* to; const void* from; };
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Index thread, block;
  Cluster* cluster;
  int rank;
  int64_t rounds = 0;
  std::function<bool()> ready;
  bool done = false;
  std::map<const uint4*, uint4> seen;
  std::vector<std::vector<Copy>> copies{1};  // in groups
};
static std::map<const uint4*, Posted> posted;
static Fiber* current;
static ucontext_t scheduler;
static int threads_of_block;
static Index grid, block_size;
static bool late, ran;

inline void wait_until(std::function<bool()> ready) {
  current->ready = ready;
  swapcontext(&current->context, &scheduler);
}
inline Block& own() { return current->cluster->blocks[current->rank]; }
inline char* shared_memory() { return own().memory.data(); }
inline void wait_for(int64_t& arrivals, int64_t all) {
  const int64_t round = arrivals++ / all;
  wait_until([&arrivals, round, all] { return arrivals >= (round + 1) * all; });
}
inline void __syncthreads() { wait_for(own().arrivals, threads_of_block); }
inline void cluster_sync() {
  Cluster& own = *current->cluster;
  wait_for(own.arrivals, int64_t(threads_of_block) * own.blocks.size());
}

// What the lanes of a warp give, when all have come.
template <typename T>
const char (*collect(const T& given))[32] {
  static_assert(sizeof(T) <= 32);
  Warp& warp = own().warps[current->thread.x / 32];
  const int64_t round = current->rounds++;
  memcpy(warp.slots[round % 2][current->thread.x % 32], &given, sizeof(T));
  int64_t& arrivals = warp.arrivals[round % 2];
  ++arrivals;
  wait_until([&arrivals, round] { return arrivals >= (round / 2 + 1) * 32; });
  return warp.slots[round % 2];
}
inline void __syncwarp() { collect(0); }
template <typename A>
A __shfl_xor_sync(uint32_t, A value, int lanes) {
  A other;
  memcpy(&other, collect(value)[(current->thread.x % 32) ^ lanes], sizeof(A));
  return other;
}

// An address is the block's rank and the place in its memory.
inline uint32_t shared_address(const void* pointer) {
  return current->rank << 20 | (static_cast<const char*>(pointer) - shared_memory());
}
inline uint32_t address_in(uint32_t address, int rank) {
  return rank << 20 | (address & ((1 << 20) - 1));
}
template <typename T>
T* in_block(T* object, int rank) {
  char* const there = current->cluster->blocks[rank].memory.data();
  return reinterpret_cast<T*>(there + (reinterpret_cast<char*>(object) - shared_memory()));
}
inline int cluster_rank() { return current->rank; }
inline Barrier& barrier_at(uint32_t address) {
  return current->cluster->blocks[address >> 20].barriers.at(address);
}
inline void settle(Barrier& b) {
  if (b.pending == 0 && b.missing == 0) b.pending = 1, ++b.phase;
}
inline void init_barrier(uint32_t address) { own().barriers[address] = Barrier(); }
inline void fence_barrier_init() {}
inline void expect_bytes(uint32_t address, uint32_t bytes) {
  Barrier& b = barrier_at(address);
  b.missing += bytes;
  if (--b.pending < 0) abort();  // a barrier that has not ended its phase
  settle(b);
}
inline void arrive(Barrier& b, int64_t bytes) {
  b.missing -= bytes;
  if (b.missing < 0 && b.pending == 0) abort();  // more than are expected
  settle(b);
}
inline void wait_for_phase(uint32_t address, uint32_t parity) {
  Barrier& b = barrier_at(address);
  wait_until([&b, parity] {
    for (Pushed& pushed : b.coming) {
      memcpy(pushed.to, pushed.data.data(), pushed.data.size());
      arrive(b, pushed.data.size());
    }
    b.coming.clear();
    return b.phase % 2 != parity;
  });
}
template <int BYTES>
void push(uint32_t to, uint32_t barrier, const void* from) {
  Block& receiver = current->cluster->blocks[to >> 20];
  char* const there = receiver.memory.data() + (to & ((1 << 20) - 1));
  if (to >> 20 != barrier >> 20 || to % BYTES) abort();
  Barrier& b = barrier_at(barrier);
  if (late) {
    const char* bits = static_cast<const char*>(from);
    b.coming.push_back({there, {bits, bits + BYTES}});
    return;
  }
  memcpy(there, from, BYTES);
  arrive(b, BYTES);
}

inline void fence_async_proxy() {}
template <int BYTES>
void copy_to(uint32_t to, uint32_t barrier, const void* from, uint32_t mask) {
  if (reinterpret_cast<uintptr_t>(from) % 16) abort();
  for (size_t rank = 0; rank < current->cluster->blocks.size(); ++rank)
    for (int at = 0; at < BYTES && mask >> rank & 1; at += 16)
      push<16>(address_in(to, rank) + at, address_in(barrier, rank),
               static_cast<const char*>(from) + at);
}

inline void copy_word(void* to, const void* from) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) abort();
  if (late)
    current->copies.back().push_back({to, from});
  else
    memcpy(to, from, 16);
}
template <typename T>
void store_global(void* to, T v) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(T)) abort();
  memcpy(to, &v, sizeof(T));
}
inline void group_copies() { current->copies.emplace_back(); }
template <int LAST>
void wait_for_copies() {
  auto& groups = current->copies;
  for (; groups.size() > LAST + 1; groups.erase(groups.begin()))
    for (const Copy& copy : groups[0]) memcpy(copy.to, copy.from, 16);
}

inline void arrive(const uint4* word) {
  const auto found = posted.find(word);
  if (found == posted.end()) return;
  uint4 *const to = const_cast<uint4*>(word), from = found->second.word;
  if (--found->second.halves) {
    to->x = from.x, to->y = from.y;
  } else {
    to->z = from.z, to->w = from.w;
    posted.erase(found);
  }
  ran = true;
}
inline void store_word(uint4* word, uint4 value) {
  if (posted.count(word)) abort();  // nobody has read the last one
  posted[word] = {value, late ? 2 : 1};
  if (!late) *word = value;
}
inline uint4 load_word(const uint4* word) {
  arrive(word);
  if (const auto found = current->seen.find(word); found != current->seen.end()) {
    const uint4 seen = found->second;  // its reader polls it
    wait_until([seen, word] {
      arrive(word);
      return memcmp(word, &seen, sizeof(uint4)) != 0;
    });
    current->seen.erase(word);
    return *word;
  }
  return current->seen[word] = *word;
}

inline void load_tiles(uint32_t (&tiles)[4], const void* row) {
  const char(*rows)[32] = collect(row);
  const int lane = current->thread.x % 32;
  for (int tile = 0; tile < 4; ++tile) {
    const char* from;
    memcpy(&from, rows[tile * 8 + lane / 4], sizeof(from));
    memcpy(&tiles[tile], from + lane % 4 * 4, 4);
  }
}
inline void store_turned(void* row, const uint32_t (&tiles)[2]) {
  struct Given { uint32_t tiles[2]; char* row; } given = {{tiles[0], tiles[1]}, (char*)row};
  const char(*lanes)[32] = collect(given);
  const int lane = current->thread.x % 32;
  for (int tile = 0; tile < 2; ++tile)
    for (int z = 0; z < 2; ++z) {
      Given to;
      memcpy(&to, lanes[tile * 8 + lane % 4 * 2 + z], sizeof(Given));
      memcpy(to.row + lane / 4 * 2, (const char*)&tiles[tile] + z * 2, 2);
    }
  __syncwarp();
}
template <typename T>
void multiply_tile(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
  struct Given { uint32_t a[4], b[2]; } given = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const char(*lanes)[32] = collect(given);
  const auto half = [](uint32_t word, int which) {
    T value;
    value.bits = word >> 16 * which;
    return float(value);
  };
  const int lane = current->thread.x % 32;
  for (int z = 0; z < 4; ++z) {
    const int row = lane / 4 + z / 2 * 8, column = lane % 4 * 2 + z % 2;
    for (int k = 0; k < 16; ++k) {
      Given of_row, of_column;
      memcpy(&of_row, lanes[row % 8 * 4 + k % 8 / 2], sizeof(Given));
      memcpy(&of_column, lanes[column * 4 + k % 8 / 2], sizeof(Given));
      sum[z] += half(of_row.a[row / 8 + k / 8 * 2], k % 2) * half(of_column.b[k / 8], k % 2);
    }
  }
}

inline uint32_t as_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t round_to_tf32(float x) {
  const uint32_t bits = as_bits(x);
  const bool finite = (bits & 0x7f800000) != 0x7f800000;
  return (bits + (finite ? 0x1000 : 0)) & 0xffffe000;
}
inline void multiply_tile(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Given { float a[4], b[2]; } given;
  memcpy(given.a, a, sizeof(a)), memcpy(given.b, b, sizeof(b));
  const char(*lanes)[32] = collect(given);
  const int lane = current->thread.x % 32;
  for (int z = 0; z < 4; ++z) {
    const int row = lane / 4 + z / 2 * 8, column = lane % 4 * 2 + z % 2;
    for (int k = 0; k < 8; ++k) {
      Given of_row, of_column;
      memcpy(&of_row, lanes[row % 8 * 4 + k % 4], sizeof(Given));
      memcpy(&of_column, lanes[column * 4 + k % 4], sizeof(Given));
      sum[z] += of_row.a[row / 8 + k / 4 * 2] * of_column.b[k / 4];
    }
  }
}
constexpr int64_t WARP = 32;
template <int LANES = WARP, typename A, typename F>
A warp_reduce(A value, F combine) {
  for (int lanes = LANES / 2; lanes > 0; lanes /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  return value;
}

constexpr bool HAS_WARPGROUPS = true;
inline uint32_t describe_tiles(const void* tiles, uint32_t next_columns) {
  return (shared_address(tiles) & 0x3ffff) / 16 | next_columns / 16 << 16;
}
template <typename T>
void begin_products() {}
template <typename T>
void group_products() {}
template <typename T, int N>
void end_products() {}
// Numbers k and the next of a row of tiles of 8 rows of 16 bytes.
inline uint32_t read_tiles(uint32_t tiles, int row, int k) {
  const size_t at = (tiles & 0xffff) + (tiles >> 16) * (k / 8) + row;
  uint32_t word;
  if (at * 16 + 16 > own().memory.size()) abort();
  memcpy(&word, shared_memory() + at * 16 + k % 8 * 2, 4);
  return word;
}
template <typename T>
void multiply_tiles(float (&sum)[3][1][4], const uint32_t (&a)[4], uint32_t b) {
  const int lane = current->thread.x % 32;
  for (int n = 0; n < 3; ++n) {
    const int row = n * 8 + lane / 4, k = lane % 4 * 2;
    multiply_tile(sum[n][0], a, read_tiles(b, row, k), read_tiles(b, row, k + 8), T());
  }
}
template <typename T>
void multiply_tiles(float (&sum)[3][1][4], uint32_t a, uint32_t b) {
  const int lane = current->thread.x % 32, k = lane % 4 * 2;
  const int row = current->thread.x / 32 % 4 * 16 + lane / 4;
  const uint32_t of[4] = {read_tiles(a, row, k), read_tiles(a, row + 8, k),
                          read_tiles(a, row, k + 8), read_tiles(a, row + 8, k + 8)};
  multiply_tiles<T>(sum, of, b);
}

// Runs the teams of a launch, of so many clusters each, one after another.
inline void run_clusters(int clusters, int runs, int blocks, int threads, int team, int64_t bytes,
                         bool reversed, std::function<void()> kernel) {
  static std::function<void()> body;
  body = kernel;
  threads_of_block = threads, late = reversed, block_size = {unsigned(threads), 1};
  grid = {unsigned(clusters * blocks), unsigned(runs)};
  for (int first = 0; first < clusters * runs; first += team) {
    std::vector<Cluster> own(team);
    for (Cluster& cluster : own) {
      cluster.blocks.resize(blocks);
      for (Block& block : cluster.blocks) {
        block.memory.assign(bytes, char(0xff));
        block.warps.resize(threads / 32);
      }
    }
    std::vector<Fiber> fibers(team * blocks * threads);
    for (size_t i = 0; i < fibers.size(); ++i) {
      Fiber& f = fibers[i];
      const int place = reversed ? fibers.size() - 1 - i : i;
      f.cluster = &own[place / threads / blocks];
      f.rank = place / threads % blocks;
      f.thread.x = place % threads;
      f.block = {unsigned(first % clusters * blocks + place / threads), unsigned(first / clusters)};
      f.stack.reset(new char[1 << 17]);
      f.ready = [] { return true; };
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.get(), f.context.uc_stack.ss_size = 1 << 17;
      f.context.uc_link = &scheduler;
      makecontext(&f.context, +[] { body(); current->done = true; }, 0);
    }
    for (ran = true; ran;) {
      ran = false;
      for (Fiber& f : fibers)
        if (!f.done && f.ready()) {
          current = &f;
          swapcontext(&scheduler, &f.context);
          ran = true;
          break;
        }
    }
    for (Fiber& f : fibers)
      if (!f.done) abort();  // fibers wait for each other for ever
    if (!posted.empty()) abort();  // a word that nobody reads
  }
}
}
#define threadIdx (hoconv::recurrent::current->thread)
#define blockIdx (hoconv::recurrent::current->block)
#define gridDim (hoconv::recurrent::grid)
#define blockDim (hoconv::recurrent::block_size)
"""
_INCLUDED = r'#include "(recurrent/.*)"'
_MEMORY = "extern __shared__ __align__(128) char shared[];"


def shim_clusters(
    programs: Mapping[str, Program], shape: ClusterShape, reversed: bool = False,
    most_shared_bytes: int = SHARED_BYTES, runs: int = 1,
) -> dict[str, ShimClusters]:  # fmt: skip
    """As :func:`hoconv.recurrent.runtime.cpp.compile_loops`, of kernels of clusters."""

    def lay_out(program: Program) -> ClusterLayout:
        shared = distribute(program, shape.blocks == 1)
        return ClusterLayout(shared, shape, most_shared_bytes)

    sources = {name: emit_cluster(lay_out(program), runs) for name, program in programs.items()}
    files = re.findall(_INCLUDED, (jit.CSRC / "recurrent/cluster.cuh").read_text())
    named = (_namespace(name, source) for name, source in sources.items())
    text = "".join((with_fibers(*files), *named))
    library = ctypes.CDLL(str(compile_cpp("recurrent", text)))
    return {
        name: ShimClusters(source, getattr(library, f"launch_{name}"), reversed)
        for name, source in sources.items()
    }


def with_fibers(*files: str) -> str:
    """Returns the emulation of a GPU by fibers, and the contents of files that kernels include."""
    functions = "".join((jit.CSRC / file).read_text() for file in files)
    return _HEADER + re.sub(_INCLUDED, "", functions).replace("#pragma once", "")


def as_function(text: str) -> str:
    """The text of a kernel as that of a function, which a fiber runs."""
    body = text.split("\n", 1)[1].replace('extern "C" __global__', "static")
    assert _MEMORY in body
    return body.replace(_MEMORY, "char* const shared = shared_memory();")


def _namespace(name: str, source: ClusterSource) -> str:
    body = as_function(source.text)
    shape = source.layout.shape
    sizes = f"{shape.blocks}, {shape.threads}, {shape.clusters}, {source.layout.shared_bytes}"
    return f"""
namespace {name} {{
{body}
}}
extern "C" void launch_{name}(const {name}::Calls* calls, int clusters, bool reversed) {{
  hoconv::recurrent::run_clusters(clusters, {source.runs}, {sizes}, reversed,
                                  [=] {{ {name}::run_cluster(*calls); }});
}}
"""


class ShimClusters:
    """Runs the steps of one program, as ``hoconv.recurrent.runtime.cuda.CudaLoop``."""

    groups: GroupLoops = {}

    def __init__(self, source: ClusterSource, launch: Callable[..., None], reversed: bool) -> None:
        self.source = source
        self.launch = launch
        self.reversed = reversed

    def __call__(
        self, program: Program, values: Tensors, initial: list[Tensor], seed: Tensor | None
    ) -> tuple[Tensors, list[Tensor]]:
        return self.run_together([LoopRun(program, values, initial, seed)])[0]

    def run_together(self, runs: Sequence[LoopRun]) -> list[tuple[Tensors, list[Tensor]]]:
        def launch(calls: list[int], clusters: int) -> None:
            given = ctypes.byref(as_argument(calls))
            self.launch(given, clusters, ctypes.c_bool(self.reversed))

        assert len(runs) == self.source.runs
        return launch_runs(self.source, runs, launch)
