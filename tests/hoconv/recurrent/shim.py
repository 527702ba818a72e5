"""Runs generated CUDA on a CPU: each launch is a loop over its blocks and threads.

Threads run one after another, the last one first, to the end of the kernel; where they would wait
for each other, a row has a single one. Graphs are functions that launch again.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoconv.build.generated import compile_cpp
from hoconv.recurrent.buffers import bind, results
from hoconv.recurrent.emit.cuda import Launch, emit_cuda
from hoconv.recurrent.interpret import Tensors, steps
from hoconv.recurrent.ir import Program
from hoconv.recurrent.workspace import Workspace

_HEADER = """
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#include "recurrent/math.h"
#define __global__ __attribute__((visibility("hidden")))
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __syncthreads()
static struct { unsigned x, y; } threadIdx, blockIdx, blockDim, gridDim;
namespace hoconv::recurrent {
using torch::headeronly::BFloat16;
using torch::headeronly::Half;
template <typename... A> void block_sum(A&...) {}
template <typename... A> void block_max(A&...) {}
}
"""
_LAUNCH = """
extern "C" void launch_{name}(int64_t rows, int64_t blocks, int64_t threads, const Call* call,
                              const int64_t* ahead) {{
  gridDim.y = blocks, blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < rows; ++blockIdx.x)
    for (blockIdx.y = blocks; blockIdx.y-- > 0;)
      for (threadIdx.x = threads; threadIdx.x-- > 0;) {name}(call, *ahead);
}}
"""
_ONCE = """
extern "C" void launch_start(int64_t, int64_t, int64_t, Call* call, const Call* given) {
  start(call, *given);
}
extern "C" void launch_advance(int64_t, int64_t, int64_t, Call* call, const int64_t* steps) {
  advance(call, *steps);
}
"""


class ShimLoop:
    """As :class:`hoconv.recurrent.cuda.CudaLoop`, on a CPU; `recorded` counts what was recorded."""

    def __init__(self, program: Program) -> None:
        self.source = emit_cuda(program)
        body = self.source.text.split("\n", 1)[1]
        launches = [i for i in (*self.source.before, *self.source.launches)
                    if isinstance(i, Launch)]  # fmt: skip
        calls = "".join(_LAUNCH.format(name=launch.name) for launch in launches)
        self.library = ctypes.CDLL(str(compile_cpp("recurrent", _HEADER + body + calls + _ONCE)))
        self.alone = {launch.name for launch in launches if not self._waits(launch.name, body)}
        self.workspaces: dict[int, Workspace] = {}
        self.recorded = 0

    def __call__(
        self, program: Program, values: Tensors, initial: list[Tensor], seed: Tensor | None
    ) -> tuple[Tensors, list[Tensor]]:
        T, B = steps(program, values), initial[0].shape[0]
        if B not in self.workspaces:
            arguments = (self.source, self._launch, B, torch.device("cpu"), self._record)
            self.workspaces[B] = Workspace(*arguments)
        workspace = self.workspaces[B]
        storage = self.source.steps.storage
        tensors = bind(program, storage, values, initial, workspace.resident)
        workspace.run(T, seed, tensors)
        return results(program, storage, tensors, T)

    def _waits(self, name: str, body: str) -> bool:
        """Whether the threads of a kernel wait for each other."""
        functions = re.split(r"\n(?=__device__|extern)", body)
        used = (name, *re.findall(r"kernel\d+", name))
        own = [f for f in functions if any(re.search(rf"\b{n}\(const Call", f) for n in used)]
        return any(word in f for f in own for word in ("block_", "__syncthreads"))

    def _launch(
        self, name: str, rows: int, blocks: int, threads: int, call: Any, argument: Any
    ) -> None:
        if name not in self.alone:
            assert blocks == 1
            threads = 1
        shape = map(ctypes.c_int64, (rows, blocks, threads))
        self.library[f"launch_{name}"](*shape, call, ctypes.byref(argument))

    def _record(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        return launch
