"""Runs generated CUDA on a CPU: each launch is a loop over its blocks and threads.

Threads run one after another, the last one first, to the end of the kernel; where they would wait
for each other, a row has a single one. Graphs are functions that launch again.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hoconv.jit.driver import Cubin
from hoconv.jit.generated import compile_cpp
from hoconv.recurrent.codegen.cuda import CudaSource, Launch, emit_cuda
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.passes.rows import make_row_programs
from hoconv.recurrent.runtime.buffers import bind, results
from hoconv.recurrent.runtime.interpret import GroupLoops, Tensors, count_steps
from hoconv.recurrent.runtime.workspace import Workspace, run_whole

_HEADER = """
#include <cstring>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#include "recurrent/math.h"
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __syncthreads()
static struct { unsigned x, y; } threadIdx, blockIdx, blockDim, gridDim;
namespace hoconv::recurrent {
using torch::headeronly::BFloat16;
using torch::headeronly::Half;
constexpr int64_t WARP = 1;
template <int LANES = 1, typename A, typename F> A warp_reduce(A value, F) { return value; }
template <typename... A> void block_sum(A&...) {}
template <typename... A> void block_max(A&...) {}
}
using Function = void (*)(unsigned, unsigned, unsigned, void**);
struct Kernel { const char* name; Function function; };
"""
# A kernel of the driver: a function that is given the addresses of its arguments.
_KERNEL = """
static void launch_{name}(unsigned rows, unsigned blocks, unsigned threads, void** given) {{
  gridDim.x = rows, gridDim.y = blocks, blockDim.x = {threads};
  for (blockIdx.x = 0; blockIdx.x < rows; ++blockIdx.x)
    for (blockIdx.y = blocks; blockIdx.y-- > 0;)
      for (threadIdx.x = blockDim.x; threadIdx.x-- > 0;)
        {name}({arguments});
}}
"""
# The driver's functions. The code of a library is the name of a program; a library is the table of
# its kernels.
_DRIVER = """
static const struct {{ const char* code; const Kernel* kernels; }} libraries[] = {{ {libraries} }};

extern "C" int cuLibraryLoadData(const Kernel** library, const char* code, void*, void*, unsigned,
                                 void*, void*, unsigned) {{
  for (auto& each : libraries)
    if (strcmp(each.code, code) == 0) return *library = each.kernels, 0;
  return 200;
}}
extern "C" int cuLibraryGetKernel(Function* function, const Kernel* library, const char* name) {{
  for (; library->name; ++library)
    if (strcmp(library->name, name) == 0) return *function = library->function, 0;
  return 500;
}}
extern "C" int cuLaunchKernel(Function function, unsigned rows, unsigned blocks, unsigned,
                              unsigned threads, unsigned, unsigned, unsigned, intptr_t stream,
                              void** given, void** extra) {{
  if (stream != 3 || extra != nullptr) return 400;
  function(rows, blocks, threads, given);
  return 0;
}}
extern "C" int cuGetErrorName(int status, const char** name) {{
  *name = status == 500 ? "CUDA_ERROR_NOT_FOUND" : "another";
  return 0;
}}
"""


def shim_loops(programs: Mapping[str, Program]) -> dict[str, ShimLoop]:
    """As :func:`hoconv.recurrent.runtime.cpp.compile_loops`, of generated CUDA."""
    groups = {
        name: {f"{name}_group{i}": each for i, each in enumerate(make_row_programs(p).items())}
        for name, p in programs.items()
    }
    named = dict(programs)
    named |= {name: each for of in groups.values() for name, (_, each) in of.items()}
    sources = {name: emit_cuda(program, whole=True) for name, program in named.items()}
    libraries = ", ".join(f'{{"{name}", {name}::kernels}}' for name in sources)
    parts = (_namespace(name, source) for name, source in sources.items())
    text = "".join((_HEADER, *parts, _DRIVER.format(libraries=libraries)))
    driver = ctypes.CDLL(str(compile_cpp("recurrent", text)))

    def loop(name: str) -> ShimLoop:
        of = groups.get(name, {}).items()
        found = {group: (program, loop(each)) for each, (group, program) in of}
        return ShimLoop(sources[name], Cubin(driver, name.encode(), lambda: 3), found)

    return {name: loop(name) for name in programs}


def _namespace(name: str, source: CudaSource) -> str:
    """The kernels of a program, beside those of other programs."""
    body = source.text.split("\n", 1)[1]  # without its header
    found = [i for i in (*source.before, *source.launches, source.whole) if isinstance(i, Launch)]
    alone = {launch.name: not _waits(launch.name, body) for launch in found}
    assert all(alone[launch.name] or launch.blocks == 1 for launch in found)
    threads = {name: "threads" if alone[name] else "1" for name in alone}
    two = "*static_cast<Call**>(given[0]), *static_cast<const {}*>(given[1])"
    arguments = {**dict.fromkeys((*alone, "advance"), two.format("int64_t")),
                 "start": two.format("Call")}  # fmt: skip
    if source.whole:
        arguments = {source.whole.name: "*static_cast<const Call*>(given[0])"}
    functions = [
        _KERNEL.format(name=kernel, threads=threads.get(kernel, "1"), arguments=given)
        for kernel, given in arguments.items()
    ]
    table = "".join(f'{{"{kernel}", launch_{kernel}}}, ' for kernel in arguments)
    return "\n".join((
        f"namespace {name} {{", body.replace('extern "C" __global__', "static __global__"),
        *functions, f"static const Kernel kernels[] = {{ {table}{{}} }};", "}\n",
    ))  # fmt: skip


def _waits(name: str, body: str) -> bool:
    """Returns whether the threads of a kernel wait for each other."""
    functions = re.split(r"\n(?=__device__|extern)", body)
    used = (name, *re.findall(r"kernel\d+", name))
    own = [f for f in functions if any(re.search(rf"\b{n}\(const Call", f) for n in used)]
    return any(word in f for f in own for word in ("block_", "__syncthreads"))


class ShimLoop:
    """As ``hoconv.recurrent.runtime.cuda.CudaLoop``, on a CPU; `recorded` counts what was."""

    def __init__(self, source: CudaSource, kernels: Cubin, groups: GroupLoops) -> None:
        self.source = source
        self.groups = groups
        self.kernels = kernels
        self.workspaces: dict[int, Workspace] = {}
        self.recorded = 0

    def __call__(
        self, program: Program, values: Tensors, initial: list[Tensor], seed: Tensor | None
    ) -> tuple[Tensors, list[Tensor]]:
        T, B = count_steps(program, values)
        storage = self.source.steps.storage
        if self.source.whole:
            tensors = bind(program, storage, T, B, values, initial, {})
            run_whole(self.source, self.kernels, T, B, seed, tensors, torch.device("cpu"))
            return results(program, storage, tensors, T)
        if B not in self.workspaces:
            arguments = (self.source, self.kernels, B, torch.device("cpu"), self._record)
            self.workspaces[B] = Workspace(*arguments)
        workspace = self.workspaces[B]
        tensors = bind(program, storage, T, B, values, initial, workspace.resident)
        workspace.run(T, seed, tensors)
        return results(program, storage, tensors, T)

    def _record(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        return launch
