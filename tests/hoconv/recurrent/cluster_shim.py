"""Runs generated kernels of clusters on a CPU: threads are fibers, which wait for each other.

A fiber runs until it waits; the first one that need not wait is next. So one block gets as far
ahead of the others as the kernel lets it. What a block pushes arrives at once or, where the threads
run in the reverse order, when its receiver waits for it: as early and as late as it may.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

from torch import Tensor

from hoconv.jit.generated import compile_cpp
from hoconv.recurrent.codegen.cluster import ClusterSource, emit_cluster
from hoconv.recurrent.codegen.cluster_layout import ClusterLayout, ClusterShape
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.passes.distribute import distribute
from hoconv.recurrent.runtime.buffers import bind, results
from hoconv.recurrent.runtime.interpret import GroupLoops, Tensors, count_steps
from hoconv.recurrent.runtime.workspace import describe_call

_HEADER = """
#include <ucontext.h>
#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#include "recurrent/math.h"
#define __global__
#define __launch_bounds__(...)
using std::max;
using std::min;
struct uint4 { uint32_t x, y, z, w; };

namespace hoconv::recurrent {
using torch::headeronly::BFloat16;
using torch::headeronly::Half;

struct Pushed { char* to; std::vector<char> data; };
struct Barrier {
  int64_t expected = -1, received = 0, completed = 0;
  std::vector<Pushed> coming;
};
struct Block {
  std::vector<char> memory;
  Barrier barriers[2];
  int64_t arrivals = 0;
};
struct Cluster { std::vector<Block> blocks; int64_t arrivals = 0; };
struct Index { unsigned x; };
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Index thread, block;
  int rank;
  std::function<bool()> ready;
  bool done = false;
};
static Cluster* cluster;
static Fiber* current;
static ucontext_t scheduler;
static int threads_of_block;
static bool late;

inline void wait_until(std::function<bool()> ready) {
  current->ready = ready;
  swapcontext(&current->context, &scheduler);
}
inline Block& own() { return cluster->blocks[current->rank]; }
inline int cluster_rank() { return current->rank; }
inline char* shared_memory() { return own().memory.data(); }
inline void wait_for(int64_t& arrivals, int64_t all) {
  const int64_t round = arrivals++ / all;
  wait_until([&arrivals, round, all] { return arrivals >= (round + 1) * all; });
}
inline void __syncthreads() { wait_for(own().arrivals, threads_of_block); }
inline void cluster_sync() {
  wait_for(cluster->arrivals, int64_t(threads_of_block) * cluster->blocks.size());
}
inline void settle(Barrier& b) {
  if (b.expected >= 0 && b.received == b.expected) b.received = 0, b.expected = -1, ++b.completed;
}

struct Exchanges {
  int64_t count = 0;
  void start(uint64_t*) {}
  void expect(int64_t bytes) {
    if (current->thread.x) return;
    Barrier& b = own().barriers[count % 2];
    b.expected = bytes;
    settle(b);
  }
  void wait() {
    Barrier& b = own().barriers[count % 2];
    const int64_t round = count++ / 2;
    wait_until([&b, round] {
      for (Pushed& pushed : b.coming) {
        memcpy(pushed.to, pushed.data.data(), pushed.data.size());
        b.received += pushed.data.size();
      }
      b.coming.clear();
      settle(b);
      return b.completed > round;
    });
  }
  void push(int rank, const void* place, const void* from, int64_t bytes) const {
    Block& to = cluster->blocks[rank];
    char* there = to.memory.data() + (static_cast<const char*>(place) - shared_memory());
    Barrier& b = to.barriers[count % 2];
    if (late) {
      const char* bits = static_cast<const char*>(from);
      b.coming.push_back({there, {bits, bits + bytes}});
      return;
    }
    memcpy(there, from, bytes);
    b.received += bytes;
    settle(b);
  }
};

template <int C, int THREADS, int ROWS, int COLUMNS, int STRIDE, typename T>
void push_rows(const Exchanges& exchanges, T* from) {
  if (current->thread.x) return;
  for (int rank = 0; rank < C; ++rank)
    for (int r = 0; rank != current->rank && r < ROWS; ++r)
      exchanges.push(rank, from + r * STRIDE, from + r * STRIDE, COLUMNS * sizeof(T));
}
template <int C, int THREADS, int ROWS, int COLUMNS, int STRIDE, int SPLIT, typename A>
void push_sums(const Exchanges& exchanges, const A* from, A* to) {
  if (current->thread.x) return;
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < ROWS; ++r)
      for (int column = 0; column < COLUMNS; ++column) {
        A sum = 0;
        for (int s = 0; s < SPLIT; ++s)
          sum += from[(s * ROWS + r) * STRIDE + c * COLUMNS + column];
        exchanges.push(c, to + (current->rank * ROWS + r) * COLUMNS + column, &sum, sizeof(A));
      }
}
template <int THREADS, int ROWS> constexpr int ROUNDS = ROWS;
template <int THREADS, int ROWS, int COLUMNS, typename A, typename F>
void reduce_rows(A (&values)[ROWS], const A* from, int columns, A neutral, F combine) {
  for (int r = 0; r < ROWS; ++r) {
    values[r] = neutral;
    for (int column = 0; column < columns; ++column)
      values[r] = combine(values[r], from[r * COLUMNS + column]);
  }
}
template <int C, int THREADS, int ROWS, typename A>
void push_reduced(const Exchanges& exchanges, const A (&values)[ROWS], A* to) {
  for (int r = 0; current->thread.x == 0 && r < ROWS; ++r)
    for (int c = 0; c < C; ++c)
      if (C == 1) to[r] = values[r];
      else exchanges.push(c, to + current->rank * ROWS + r, &values[r], sizeof(A));
}

template <typename T, int M, int K, int ROWS, int THREADS, int SPLIT, int HELD>
struct Product {
  std::function<double(int, int)> weight;
  template <typename R, typename C>
  void load(const T* weights, int64_t row_stride, int64_t column_stride, R row, C column, uint4*) {
    weight = [=](int m, int k) -> double {
      const int64_t i = row(m), j = column(k);
      return i < 0 || j < 0 ? 0 : static_cast<double>(weights[i * row_stride + j * column_stride]);
    };
  }
  template <int X_STRIDE, int Y_STRIDE, typename A>
  void multiply(const T* x, A* y, const uint4*) {
    for (int m = current->thread.x; m < M; m += THREADS)
      for (int row = 0; row < ROWS; ++row) {
        double sum = 0;
        for (int k = 0; k < K; ++k)
          sum += weight(m, k) * static_cast<double>(x[row * X_STRIDE + k]);
        for (int s = 0; s < (sizeof(T) == 2 ? SPLIT : 1); ++s)
          y[(s * ROWS + row) * Y_STRIDE + m] = s ? 0 : sum;
      }
  }
};

// Runs the clusters of a launch, one after another.
inline void run_clusters(int clusters, int blocks, int threads, int64_t bytes, bool reversed,
                         std::function<void()> kernel) {
  static std::function<void()> body;
  body = kernel;
  threads_of_block = threads, late = reversed;
  for (int c = 0; c < clusters; ++c) {
    Cluster own;
    own.blocks.resize(blocks);
    for (Block& block : own.blocks) block.memory.assign(bytes, char(0xff));
    cluster = &own;
    std::vector<Fiber> fibers(blocks * threads);
    for (int i = 0; i < blocks * threads; ++i) {
      Fiber& f = fibers[i];
      const int place = reversed ? blocks * threads - 1 - i : i;
      f.rank = place / threads;
      f.thread.x = place % threads, f.block.x = c * blocks + f.rank;
      f.stack.reset(new char[1 << 17]);
      f.ready = [] { return true; };
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.get(), f.context.uc_stack.ss_size = 1 << 17;
      f.context.uc_link = &scheduler;
      makecontext(&f.context, +[] { body(); current->done = true; }, 0);
    }
    for (bool ran = true; ran;) {
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
  }
}
}
#define threadIdx (hoconv::recurrent::current->thread)
#define blockIdx (hoconv::recurrent::current->block)
"""
_MEMORY = "extern __shared__ __align__(128) char shared[];"


def shim_clusters(
    programs: Mapping[str, Program], shape: ClusterShape, reversed: bool = False
) -> dict[str, ShimClusters]:
    """As :func:`hoconv.recurrent.runtime.cpp.compile_loops`, of kernels of clusters."""
    sources = {
        name: emit_cluster(ClusterLayout(distribute(program, shape.blocks == 1), shape))
        for name, program in programs.items()
    }
    text = "".join((_HEADER, *(_namespace(name, source) for name, source in sources.items())))
    library = ctypes.CDLL(str(compile_cpp("recurrent", text)))
    return {
        name: ShimClusters(source, getattr(library, f"launch_{name}"), reversed)
        for name, source in sources.items()
    }


def _namespace(name: str, source: ClusterSource) -> str:
    body = source.text.split("\n", 1)[1].replace('extern "C" __global__', "static")
    assert _MEMORY in body
    body = body.replace(_MEMORY, "char* const shared = shared_memory();")
    shape = source.layout.shape
    sizes = f"{shape.blocks}, {shape.threads}, {source.layout.shared_bytes}"
    return f"""
namespace {name} {{
{body}
}}
extern "C" void launch_{name}(const {name}::Call* call, int clusters, bool reversed) {{
  hoconv::recurrent::run_clusters(clusters, {sizes}, reversed,
                                  [=] {{ {name}::run_cluster(*call); }});
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
        T, B = count_steps(program, values)
        storage = self.source.storage
        tensors = bind(program, storage, values, initial, {})
        call = describe_call(storage, T, B, seed, tensors)
        clusters = -(-B // self.source.layout.shape.rows)
        self.launch(ctypes.byref(call), clusters, ctypes.c_bool(self.reversed))
        return results(program, storage, tensors, T)
