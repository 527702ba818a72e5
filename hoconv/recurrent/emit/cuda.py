"""The kernels of a program's steps as CUDA: a block for a row, its threads for features.

A kernel without reductions may have several blocks beside each other for a row. The step that it
computes is counted in memory, so that a graph of a chunk of steps can be launched again for the
next ones; steps past the last do nothing.

B batch, T time steps, i steps done before this one, t the place of this one in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hoconv.recurrent.emit.expressions import TYPES
from hoconv.recurrent.emit.kernels import KernelWriter, Target
from hoconv.recurrent.emit.loops import Kernel
from hoconv.recurrent.emit.steps import Steps, lower_steps, offset, pointers, row_pointers
from hoconv.recurrent.ir import Op, Program


class _Block(Target):
    def loop(self, size: int, sums: Sequence[tuple[Op, str]], body: Sequence[str]) -> list[str]:
        return [
            f"for (int64_t j = first; j < {size}; j += stride) {{",
            *(f"  {line}" for line in body),
            "}",
            *(f"{name} = block_{op.kind}({name});" for op, name in sums),
        ]

    def scalars(self, body: Sequence[str]) -> list[str]:
        """Every thread computes them; the first one writes."""
        return [line if line.startswith("const ") else f"if (first == 0) {line}" for line in body]

    def section_end(self) -> list[str]:
        return ["__syncthreads();"]


@dataclass(frozen=True, eq=False)
class CudaSource:
    """Kernels in CUDA.

    Attributes:
        text: of a kernel for each group, called with (buffers, T, B, begin, ahead, seed): a struct
            of pointers in the order of the storage's and to scratch; the steps done before, the
            sum of what `begin` points to and `ahead`.
        steps: what the kernels are.
        one_block: names of the kernels of which a row has one block only.
    """

    text: str
    steps: Steps
    one_block: frozenset[str]


def emit_cuda(program: Program) -> CudaSource:
    """The source of a program's kernels, for nvcc and for NVRTC."""
    steps = lower_steps(program)
    lines = ['#include "recurrent/block.cuh"', "", "using namespace hoconv::recurrent;", ""]
    lines.append("struct Buffers {")
    lines += [f"  {TYPES[b.type.dtype]}* {b.name};" for b in steps.storage.buffers]
    lines += ["  char* scratch;", "};"]
    for name, kernel in steps.kernels.values():
        lines += ["", *_kernel(program, steps, name, kernel)]
    one_block = (name for name, kernel in steps.kernels.values() if needs_one_block(kernel))
    return CudaSource("\n".join(lines) + "\n", steps, frozenset(one_block))


def needs_one_block(kernel: Kernel) -> bool:
    """Whether the threads of a row wait for each other: for a reduction, or for memory."""
    return len(kernel.sections) > 1 or any(section.scalars for section in kernel.sections)


def _kernel(program: Program, steps: Steps, name: str, kernel: Kernel) -> list[str]:
    lines = [
        f'extern "C" __global__ void {name}(const Buffers b, const int64_t T, const int64_t B,',
        "    const int64_t* begin, const int64_t ahead, const int64_t seed) {",
        "  const int64_t i = *begin + ahead, row = blockIdx.x;",
        "  if (i >= T) return;",
        f"  [[maybe_unused]] const int64_t t = {'T - 1 - i' if program.reverse else 'i'};",
        "  const int64_t first = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;",
        "  const int64_t stride = int64_t{gridDim.y} * blockDim.x;",
        "  struct {",
    ]
    named = pointers(steps.storage)
    lines += [f"    {TYPES[buffer.type.dtype]}* {pointer};" for buffer, _, pointer in named]
    lines += ["    char* scratch;", "  } s;", "  s.scratch = b.scratch;"]
    lines += [
        f"  s.{pointer} = b.{buffer.name}{offset(buffer, after, program.reverse)};"
        for buffer, after, pointer in named
    ]
    body = [*row_pointers(kernel), *KernelWriter(_Block()).row(kernel)]
    return [*lines, *(f"  {line}" for line in body), "}"]
