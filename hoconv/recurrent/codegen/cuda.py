"""Writes the kernels of a program's steps in CUDA: a thread computes features, blocks compute rows.

A kernel reads the number of its step and the addresses of its tensors from memory. A CUDA graph of
several steps can therefore be launched again for later steps and for other tensors. A kernel past
the last step returns at once. The last kernel of a step and the first kernel of the next step are
fused across the loop's back edge: a step with n products then launches n kernels instead of n + 1.
A loop without products may be one kernel (single_kernel.py).

B batch, T time steps, i the number of steps already done, t the time step that is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hoconv.recurrent.codegen.expressions import TYPES
from hoconv.recurrent.codegen.groups import find_groups, write_groups
from hoconv.recurrent.codegen.kernels import KernelWriter, LoopNest, Target, accesses
from hoconv.recurrent.codegen.loops import Kernel
from hoconv.recurrent.codegen.single_kernel import (
    are_rows_alike,
    find_independent_features,
    write_block_per_row,
    write_rows_alike,
    write_thread_per_feature,
)
from hoconv.recurrent.codegen.sizes import as_constants
from hoconv.recurrent.codegen.steps import LoweredSteps, lower_steps, offset, pointers, row_pointers
from hoconv.recurrent.ir.axes import Axes, Layout
from hoconv.recurrent.ir.program import Group, Op, Program
from hoconv.recurrent.passes.rows import repeat_reads
from hoconv.recurrent.passes.stage import products, stage

HEADER = '#include "recurrent/block.cuh"'
# Threads of a block without barriers: few, so that small batches, too, fill a GPU with blocks.
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

    def nest(self, nest: LoopNest) -> list[str]:
        """A thread computes features of the result, and loops over the reduced axes; or a warp
        does, whose lanes read neighbours, where these are many."""
        axes = nest.axes
        shared = axes.count(axes.reduced) >= _WARP and _is_last(axes)
        by = " / WARP" if shared else ""
        lines = [
            f"for (int64_t j = first{by}; j < {axes.count(axes.result)}; j += stride{by}) {{",
            *(f"  {line}" for line in _place(axes, axes.result, "j")),
            f"  {nest.own} total = {nest.initial};",
        ]
        given = nest.product()
        value = nest.combine.format("total", given) if axes.reduced else given
        if shared:
            combine = nest.combine.format("a", "b")
            lines += [
                f"  for (int64_t n = first % WARP; n < {axes.count(axes.reduced)}; n += WARP) {{",
                *(f"    {line}" for line in _place(axes, axes.reduced, "n")),
                f"    total = {value};",
                "  }",
                f"  total = warp_reduce(total, []({nest.own} a, {nest.own} b) "
                f"{{ return {combine}; }});",
                *(f"  if (first % WARP == 0) {place}[j] = total;" for place in nest.places),
            ]
            return [*lines, "}"]
        for axis in axes.reduced:
            lines.append(f"  for (int64_t i{axis} = 0; i{axis} < {axes.sizes[axis]}; ++i{axis})")
        lines.append(f"  total = {value};")
        return [*lines, *(f"  {place}[j] = total;" for place in nest.places), "}"]

    def scalars(self, body: Sequence[str]) -> list[str]:
        """Every thread computes the scalars; the first one stores them."""
        return [line if line.startswith("const ") else f"if (first == 0) {line}" for line in body]

    def barrier(self) -> list[str]:
        return ["__syncthreads();"]


def _is_last(axes: Layout) -> bool:
    """Returns whether features that are reduced are neighbours in an operand."""
    return any(own and own[-1] in axes.reduced for own in axes.operands)


def _place(axes: Layout, along: Axes, number: str) -> list[str]:
    """The indices along some axes of the feature of a number."""
    return [
        f"const int64_t i{axis} = {number} / {apart} % {axes.sizes[axis]};"
        for axis, apart in axes.strides(along).items()
    ]


@dataclass(frozen=True)
class Launch:
    """The launch of a kernel: a grid of (:meth:`count_rows`, `blocks`) blocks of `threads`.

    Attributes:
        rows: that a block takes of the T * B rows of all steps; None if it takes one of the B rows
            of a step, or of each step.
    """

    name: str
    blocks: int
    threads: int
    rows: int | None = None

    def count_rows(self, T: int, B: int) -> int:
        """Returns how many blocks take all rows of T steps, for the same features."""
        return B if self.rows is None else -(-T * B // self.rows)


@dataclass(frozen=True, eq=False)
class CudaSource:
    """Kernels in CUDA.

    Attributes:
        text: kernels with the arguments (call, ahead): the address of a ``Call``, and the number of
            steps from its `begin` to the step to compute. A ``Call`` has fields of 8 bytes: T, B,
            begin, the address of the seed or null, the addresses of ``storage.buffers`` in order,
            the address of the scratch. Two more kernels have one thread each: ``start(call,
            given)`` writes a whole ``Call``; ``advance(call, steps)`` adds to its `begin`.
        steps: the lowered steps. Products read and write fixed addresses.
        before: the kernels to launch before the first step.
        launches: the products of a step and the kernels between them, in order.
        whole: the kernel that runs all steps instead of these, if there is one; its argument is a
            ``Call`` itself. If there is scratch, any number of blocks computes all rows.
    """

    text: str
    steps: LoweredSteps
    before: tuple[Launch, ...] = ()
    launches: tuple[Op | Launch, ...] = ()
    whole: Launch | None = None


def emit_cuda(program: Program, whole: bool = False) -> CudaSource:
    """Writes the kernels of a program for NVRTC.

    Args:
        whole: whether one kernel runs all steps, if they have no product.
    """
    program = stage(program)
    whole = whole and not products(program)
    groups = find_groups(program) if whole and are_rows_alike(program) else None
    if whole and not program.states and groups is None:
        program = repeat_reads(program)
    fixed = {v for op in products(program) for v in (op.values[0], op.result)}
    steps = lower_steps(program, fixed, indexed=True)
    lines = [HEADER, "", "using namespace hoconv::recurrent;", ""]
    lines += ["struct Call {", "  int64_t T, B, begin;", "  const int64_t* seed;"]
    lines += [f"  {TYPES[b.type.dtype]}* {b.name};" for b in steps.storage.buffers]
    lines += ["  char* scratch;", "};", ""]
    if groups:  # which are in registers
        steps = replace(steps, scratch_bytes=0)
        rows, blocks, threads, written = write_groups(program, steps.storage, groups, "run_all")
        made = Launch("run_all", blocks, threads, rows)
        return CudaSource("\n".join((*lines, *written)) + "\n", steps, whole=made)
    parts = list(steps.kernels.values())
    if whole:
        made, written = _write_whole(program, steps)
        return CudaSource("\n".join((*lines, *written)) + "\n", steps, whole=made)
    lines.append(
        'extern "C" __global__ void start(Call* call, const Call given) { *call = given; }'
    )
    lines.append('extern "C" __global__ void advance(Call* call, const int64_t steps) {')
    lines += ["  call->begin += steps;", "}"]
    for name, kernel in parts:
        lines += ["", *_write_kernel(program, steps, name, kernel)]

    def launch(*parts: tuple[str, Kernel]) -> Launch:
        alone = all(_needs_no_barrier(kernel) for _, kernel in parts)
        alone = alone and _touch_own_features(*parts)
        made = _choose_launch("_".join(["run", *(name for name, _ in parts)]), parts, alone)
        lines.extend(["", *_write_entry(made, [name for name, _ in parts], alone)])
        return made

    before: list[Launch] = []
    launches: list[Op | Launch] = []
    items = list(steps.items)
    wraparound = _find_wraparound(program, items)
    if wraparound:
        items = items[1:]
        before.append(launch(steps.kernels[wraparound[1]]))
    for item in items:
        if isinstance(item, Op):
            launches.append(item)
        elif wraparound and item is wraparound[0]:
            launches.append(launch(*(steps.kernels[group] for group in wraparound)))
        else:
            launches.append(launch(steps.kernels[item]))
    return CudaSource("\n".join(lines) + "\n", steps, tuple(before), tuple(launches))


def _write_whole(program: Program, steps: LoweredSteps) -> tuple[Launch, list[str]]:
    """Writes the kernel of all steps, which have no product."""
    parts = list(steps.kernels.values())
    sizes = find_independent_features([kernel for _, kernel in parts])
    alike = bool(sizes) and are_rows_alike(program)
    made = _choose_launch("run_all", parts, alone=alike or len(sizes) == 1)
    if alike:
        rows, blocks, lines = write_rows_alike(steps, sizes, made.name, made.threads)
        return replace(made, rows=rows, blocks=blocks), lines
    if len(sizes) == 1:
        return made, write_thread_per_feature(program, steps, *sizes, made.name, made.threads)
    functions = [
        line
        for name, kernel in parts
        for line in ("", *_write_kernel(program, steps, name, kernel))
    ]
    names = [name for name, _ in parts]
    return made, [*functions, "", *write_block_per_row(names, made.name, made.threads)]


def _find_wraparound(program: Program, items: Sequence[Op | Group]) -> tuple[Group, Group] | None:
    """The last kernel of a step and the first of the next step, if the program has been fused."""
    first, last = items[0], items[-1]
    if first is last or not (isinstance(first, Group) and isinstance(last, Group)):
        return None
    fused = first in program.step and (last in program.step or not last.ops)
    return (last, first) if fused else None


def _needs_no_barrier(kernel: Kernel) -> bool:
    """Returns whether no thread waits for another thread of its row: for a reduction, or for a
    store."""
    return len(kernel.sections) < 2 and not any(
        section.scalars or section.nests for section in kernel.sections
    )


def _touch_own_features(*parts: tuple[str, Kernel]) -> bool:
    """Returns whether each thread reads, of what another kernel writes, only its own features."""
    where: dict[str, list[set]] = defaultdict(lambda: [set() for _ in parts])
    written = set()
    for i, (_, kernel) in enumerate(parts):
        for access in accesses(kernel):
            location = access.memory.location
            name = "scratch" if location is None else location.buffer.name
            where[name][i].add((access.size, access.offset))
            written |= {name} if access.writes else set()
    shared = (by for name, by in where.items() if name in written and sum(map(bool, by)) > 1)
    return all(len(set().union(*by)) == 1 and min(min(s) for s in by if s)[0] > 1 for by in shared)


def _choose_launch(name: str, parts: Sequence[tuple[str, Kernel]], alone: bool) -> Launch:
    sections = [section for _, kernel in parts for section in kernel.sections]
    sizes = [size for section in sections for size in section.loops]
    sizes += [nest.op.result.type.size for section in sections for nest in section.nests]
    widest = max(sizes, default=1)
    warps = -(-widest // _WARP) * _WARP
    if not alone:
        return Launch(name, 1, min(warps, _MOST_THREADS))
    threads = min(warps, _THREADS)
    return Launch(name, -(-widest // threads), threads)


def _write_entry(launch: Launch, names: Sequence[str], alone: bool) -> list[str]:
    """Writes the ``__global__`` function that runs part k for step i + k."""
    lines = [
        f'extern "C" __global__ void __launch_bounds__({launch.threads})',
        f"{launch.name}(const Call* call, const int64_t ahead) {{",
        "  const Call c = *call;",
        "  const int64_t i = c.begin + ahead;",
    ]
    # A part reads what the part before it wrote.
    between = '  asm volatile("" ::: "memory");' if alone else "  __syncthreads();"
    for k, name in enumerate(names):
        lines += [f"  if (i + {k} < c.T) {name}(c, i + {k}, blockIdx.x);", between]
    return [*lines[:-1], "}"]


def _write_kernel(program: Program, steps: LoweredSteps, name: str, kernel: Kernel) -> list[str]:
    lines = [
        f"__device__ __forceinline__ void {name}(const Call& c, const int64_t i, "
        "const int64_t row) {",
        "  [[maybe_unused]] const int64_t T = c.T, B = c.B;",
        f"  [[maybe_unused]] const int64_t t = {'T - 1 - i' if program.reverse else 'i'};",
        "  [[maybe_unused]] const int64_t seed = c.seed == nullptr ? 0 : *c.seed;",
        "  const int64_t first = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;",
        "  const int64_t stride = int64_t{gridDim.y} * blockDim.x;",
        "  struct {",
    ]
    named = pointers(steps.storage)
    lines += [f"    {TYPES[buffer.type.dtype]}* {pointer};" for buffer, _, pointer in named]
    lines += ["    char* scratch;", "  } s;"]
    # Each block has scratch for one row.
    own = f"(int64_t{{blockIdx.x}} - row) * {steps.scratch_bytes}"
    lines.append(f"  s.scratch = c.scratch + {own};")
    lines += [
        f"  s.{pointer} = c.{buffer.name}{offset(buffer, after, program.reverse)};"
        for buffer, after, pointer in named
    ]
    body = [*row_pointers(kernel, steps.scratch_bytes), *KernelWriter(_Block()).row(kernel)]
    return [as_constants(line) for line in (*lines, *(f"  {line}" for line in body), "}")]
