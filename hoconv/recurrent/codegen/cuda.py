"""The kernels of a program's steps as CUDA: threads for features, one or more blocks for a row.

Which step a kernel computes is counted in memory, and so is where its tensors are: a recorded chunk
of steps can be launched again for the next ones, and for other tensors. Steps past the last one do
nothing. The last kernel of a step and the first of the next are one: where products are between
kernels, there are as many of the one as of the other.

B batch, T time steps, i steps done before this one, t the place of this one in time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hoconv.recurrent.codegen.expressions import TYPES
from hoconv.recurrent.codegen.kernels import KernelWriter, Target, accesses
from hoconv.recurrent.codegen.loops import Kernel
from hoconv.recurrent.codegen.steps import Steps, lower_steps, offset, pointers, row_pointers
from hoconv.recurrent.ir.program import Group, Op, Program
from hoconv.recurrent.passes.stage import products, stage

HEADER = '#include "recurrent/block.cuh"'
# Threads of a block that waits for no other thread: few, so that small batches fill a GPU, too.
_THREADS = 128
_MOST_THREADS = 1024
_WARP = 32


class _Block(Target):
    def loop(self, size: int, sums: Sequence[tuple[Op, str]], body: Sequence[str]) -> list[str]:
        kinds = dict.fromkeys(op.kind for op, _ in sums)
        named = {kind: ", ".join(name for op, name in sums if op.kind == kind) for kind in kinds}
        return [
            f"for (int64_t j = first; j < {size}; j += stride) {{",
            *(f"  {line}" for line in body),
            "}",
            *(f"block_{kind}({names});" for kind, names in named.items()),
        ]

    def scalars(self, body: Sequence[str]) -> list[str]:
        """Every thread computes them; the first one writes."""
        return [line if line.startswith("const ") else f"if (first == 0) {line}" for line in body]

    def barrier(self) -> list[str]:
        return ["__syncthreads();"]


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: a grid of (B, `blocks`) blocks of `threads`."""

    name: str
    blocks: int
    threads: int


@dataclass(frozen=True, eq=False)
class CudaSource:
    """Kernels in CUDA.

    Attributes:
        text: of kernels that are called with (call, ahead): the address of a ``Call``, and how many
            steps after its `begin`. A ``Call`` is T, B, begin, the address of the seed or null,
            those of the storage's buffers in their order, and that of scratch, 8 bytes each. Then
            there are ``start(call, given)``, which writes a whole ``Call``, and ``advance(call,
            steps)``, which adds to its `begin`; of one thread each.
        steps: what the kernels are. Products read and write fixed places.
        before: what is launched before the first step.
        launches: the products of a step and the kernels between them, in order.
    """

    text: str
    steps: Steps
    before: tuple[Launch, ...]
    launches: tuple[Op | Launch, ...]


def emit_cuda(program: Program) -> CudaSource:
    """The source of a program's kernels, for NVRTC."""
    program = stage(program)
    fixed = {v for op in products(program) for v in (op.values[0], op.result)}
    steps = lower_steps(program, fixed)
    lines = [HEADER, "", "using namespace hoconv::recurrent;", ""]
    lines += ["struct Call {", "  int64_t T, B, begin;", "  const int64_t* seed;"]
    lines += [f"  {TYPES[b.type.dtype]}* {b.name};" for b in steps.storage.buffers]
    lines += ["  char* scratch;", "};", ""]
    lines.append(
        'extern "C" __global__ void start(Call* call, const Call given) { *call = given; }'
    )
    lines.append('extern "C" __global__ void advance(Call* call, const int64_t steps) {')
    lines += ["  call->begin += steps;", "}"]
    for name, kernel in steps.kernels.values():
        lines += ["", *_kernel(program, steps, name, kernel)]

    def launch(*parts: tuple[str, Kernel]) -> Launch:
        alone = all(map(_waits_for_none, (kernel for _, kernel in parts))) and _apart(*parts)
        made = _shape("_".join(["run", *(name for name, _ in parts)]), parts, alone)
        lines.extend(["", *_launched(made, [name for name, _ in parts], alone)])
        return made

    before: list[Launch] = []
    launches: list[Op | Launch] = []
    items = list(steps.items)
    around = _around(program, items)
    if around:
        items = items[1:]
        before.append(launch(steps.kernels[around[1]]))
    for item in items:
        if isinstance(item, Op):
            launches.append(item)
        elif around and item is around[0]:
            launches.append(launch(*(steps.kernels[group] for group in around)))
        else:
            launches.append(launch(steps.kernels[item]))
    return CudaSource("\n".join(lines) + "\n", steps, tuple(before), tuple(launches))


def _around(program: Program, items: Sequence[Op | Group]) -> tuple[Group, Group] | None:
    """The last kernel of a step and the first of the next, where `fuse` has left two."""
    first, last = items[0], items[-1]
    if first is last or not (isinstance(first, Group) and isinstance(last, Group)):
        return None
    fused = first in program.step and (last in program.step or not last.ops)
    return (last, first) if fused else None


def _waits_for_none(kernel: Kernel) -> bool:
    """Whether no thread of a row waits for another: for a reduction, or for memory."""
    return len(kernel.sections) < 2 and not any(section.scalars for section in kernel.sections)


def _apart(*parts: tuple[str, Kernel]) -> bool:
    """Whether, of what several kernels read and write, each thread has its own features."""
    where: dict[str, list[set]] = defaultdict(lambda: [set() for _ in parts])
    written = set()
    for i, (_, kernel) in enumerate(parts):
        for access in accesses(kernel):
            place = access.memory.place
            name = "scratch" if place is None else place.buffer.name
            where[name][i].add((access.size, access.offset))
            written |= {name} if access.writes else set()
    shared = (by for name, by in where.items() if name in written and sum(map(bool, by)) > 1)
    return all(len(set().union(*by)) == 1 and min(min(s) for s in by if s)[0] > 1 for by in shared)


def _shape(name: str, parts: Sequence[tuple[str, Kernel]], alone: bool) -> Launch:
    sizes = (size for _, kernel in parts for section in kernel.sections for size in section.loops)
    widest = max(sizes, default=1)
    warps = -(-widest // _WARP) * _WARP
    if not alone:
        return Launch(name, 1, min(warps, _MOST_THREADS))
    threads = min(warps, _THREADS)
    return Launch(name, -(-widest // threads), threads)


def _launched(launch: Launch, names: Sequence[str], alone: bool) -> list[str]:
    """A kernel that runs parts of one step and of those after it."""
    lines = [
        f'extern "C" __global__ void __launch_bounds__({launch.threads})',
        f"{launch.name}(const Call* call, const int64_t ahead) {{",
        "  const Call c = *call;",
        "  const int64_t i = c.begin + ahead;",
    ]
    # What one part wrote is read by the next.
    between = '  asm volatile("" ::: "memory");' if alone else "  __syncthreads();"
    for k, name in enumerate(names):
        lines += [f"  if (i + {k} < c.T) {name}(c, i + {k});", between]
    return [*lines[:-1], "}"]


def _kernel(program: Program, steps: Steps, name: str, kernel: Kernel) -> list[str]:
    lines = [
        f"__device__ __forceinline__ void {name}(const Call& c, const int64_t i) {{",
        "  [[maybe_unused]] const int64_t T = c.T, B = c.B, row = blockIdx.x;",
        f"  [[maybe_unused]] const int64_t t = {'T - 1 - i' if program.reverse else 'i'};",
        "  [[maybe_unused]] const int64_t seed = c.seed == nullptr ? 0 : *c.seed;",
        "  const int64_t first = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;",
        "  const int64_t stride = int64_t{gridDim.y} * blockDim.x;",
        "  struct {",
    ]
    named = pointers(steps.storage)
    lines += [f"    {TYPES[buffer.type.dtype]}* {pointer};" for buffer, _, pointer in named]
    lines += ["    char* scratch;", "  } s;", "  s.scratch = c.scratch;"]
    lines += [
        f"  s.{pointer} = c.{buffer.name}{offset(buffer, after, program.reverse)};"
        for buffer, after, pointer in named
    ]
    body = [*row_pointers(kernel), *KernelWriter(_Block()).row(kernel)]
    return [*lines, *(f"  {line}" for line in body), "}"]
