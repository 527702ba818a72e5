"""Writes a loop whose steps are affine in their states as one CUDA kernel that scans.

The kernel (csrc/recurrent/scan.cuh) divides the steps among warps and blocks. A thread computes a
feature of a row. It reads the sequences once: it loads what a round of steps reads, composes these
steps, finds the state before them through the steps of other warps, and then runs them one by one,
as a kernel without a scan does, but for what is computed already.

B batch, T time steps, i the number of steps already done, t the time step that is computed, j the
feature that a thread computes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hoconv.recurrent.codegen.expressions import TYPES, literal
from hoconv.recurrent.codegen.loops import Compute, Load, Statement, Store
from hoconv.recurrent.codegen.single_kernel import (
    Registers,
    final_state,
    find_independent_features,
    indent,
    initial_state,
    list_statements,
    write_count,
)
from hoconv.recurrent.codegen.steps import LoweredSteps, lower_steps
from hoconv.recurrent.codegen.storage import Buffer
from hoconv.recurrent.ir.program import (
    BYTES,
    Group,
    Operand,
    Program,
    Type,
    Value,
    Yield,
    flat,
)
from hoconv.recurrent.passes.affine import AffineSteps, find_affine

HEADER = '#include "recurrent/scan.cuh"'
MOST_BLOCKS = 8  # of a cluster, as in csrc/recurrent/scan.cuh
LANES = 32
_MOST_WARPS = {"f32": 16, "f64": 8}  # of a block: more have too few registers
_BARRIER_BYTES = 4 * 8  # of Scan::Memory
_MOST_STATES = 2  # the product of two steps takes this cubed


@dataclass(frozen=True, eq=False)
class ScanSource:
    """A kernel that scans.

    Attributes:
        text: a kernel ``scan`` with the argument ``Call``: T, B, the number of blocks of a cluster,
            the address of the seed or null, the addresses of ``storage.buffers`` in order, null.
            Each cluster computes LANES features.
        steps: the lowered steps.
        features: of a row.
        steps_of_warp: which a warp runs in a round.
        most_warps: of a block.
        shared_bytes: of a block.
    """

    text: str
    steps: LoweredSteps
    features: int
    steps_of_warp: int
    most_warps: int
    shared_bytes: int


def emit_scan(program: Program) -> ScanSource | None:
    """Writes the kernel of a program whose steps have no product; None where they cannot be
    scanned."""
    affine = find_affine(program)
    if isinstance(affine, str) or affine.mixing or not 1 <= len(affine.states) <= _MOST_STATES:
        return None
    steps = lower_steps(program)
    sizes = find_independent_features([kernel for _, kernel in steps.kernels.values()])
    composed = lower_steps(_with_affine(program, affine))
    kernels = [kernel for _, kernel in composed.kernels.values()]
    if len(sizes) != 1 or any(
        k.sections[1:] or any(s.scalars for s in k.sections) for k in kernels
    ):
        return None
    (size,) = sizes
    wanted = {v for v in (*_flat(affine), affine.cut) if isinstance(v, Value)}
    composing = _select(*list_statements(kernels, size), wanted)
    scalars, loop = list_statements([kernel for _, kernel in steps.kernels.values()], size)
    loop, kept = _without(loop, composing[1])
    writer = Registers(program.reverse)
    first, second = writer.write_all(*composing), writer.write_all(scalars, loop)
    names = {writer.name(v): TYPES[v.type.dtype] for v in kept}
    first += [f"{name}_kept[d] = {name};" for name in names]
    second = [*(f"const {own} {name} = {name}_kept[d];" for name, own in names.items()), *second]
    dtype = affine.states[0].value.type.dtype
    K, places = len(affine.states), _MOST_WARPS[dtype] + MOST_BLOCKS
    of_step = K * K + K + (affine.cut is not None)
    numbers = 2 * (places * of_step + K) + places  # of Scan::Memory, a lane
    shared_bytes = _BARRIER_BYTES + LANES * numbers * BYTES[dtype]
    kernel = _Kernel(program, steps, affine, size, shared_bytes, writer)
    text = kernel.write(
        first, second, [f"{own} {name}_kept[ahead];" for name, own in names.items()]
    )
    return ScanSource(text, steps, size, writer.count_ahead(), _MOST_WARPS[dtype], shared_bytes)


def _flat(affine: AffineSteps) -> list[Operand]:
    return [*(x for row in affine.matrix for x in row), *affine.offset]


def _with_affine(program: Program, affine: AffineSteps) -> Program:
    """The program whose steps also compute and yield A, b and the condition."""
    wanted = dict.fromkeys(v for v in (*_flat(affine), affine.cut) if isinstance(v, Value))
    yields = (
        Yield(f"affine_{i}", v, Value(Type("sequence", v.type.shape, v.type.dtype)))
        for i, v in enumerate(wanted)
    )
    return replace(
        program,
        step=(Group((*flat(program.step), *affine.before, *affine.ops)),),
        yields=(*program.yields, *yields),
    )


def _select(
    scalars: Sequence[Statement], loop: Sequence[Statement], wanted: Collection[Value]
) -> tuple[list[Statement], list[Statement]]:
    """The statements that compute some values, and that store nothing."""
    found = set(wanted)

    def select(statements: Sequence[Statement]) -> list[Statement]:
        kept: list[Statement] = []
        for s in reversed(statements):
            if isinstance(s, Compute) and s.op.result in found:
                found.update(s.op.values)
                kept.append(s)
            elif isinstance(s, Load) and s.value in found:
                kept.append(s)
        return kept[::-1]

    loop = select(loop)
    return select(scalars), loop


def _without(
    statements: Sequence[Statement], done: Sequence[Statement]
) -> tuple[list[Statement], list[Value]]:
    """Returns the statements without what others have computed, and what they read of that."""
    computed = {s.op.result: None for s in done if isinstance(s, Compute)}
    rest = [s for s in statements if not isinstance(s, Compute) or s.op.result not in computed]
    read = {s.value for s in rest if isinstance(s, Store)}
    read.update(v for s in rest if isinstance(s, Compute) for v in s.op.values)
    rest = [s for s in rest if not isinstance(s, Load) or s.value in read]
    return rest, [v for v in computed if v in read]


class _Kernel:
    def __init__(
        self, program: Program, steps: LoweredSteps, affine: AffineSteps, size: int,
        shared_bytes: int, writer: Registers,
    ) -> None:  # fmt: skip
        self.program = program
        self.steps = steps
        self.affine = affine
        self.size = size
        self.shared_bytes = shared_bytes
        self.writer = writer
        self.own = TYPES[affine.states[0].value.type.dtype]
        self._cuts = "false" if affine.cut is None else "true"
        self.step = f"AffineStep<{self.own}, {len(affine.states)}, {self._cuts}>"
        # The buffers of each state.
        self.buffers: dict[str, tuple[Buffer, ...]] = {
            s.name: of for s, of in zip(program.states, steps.storage.initial, strict=True)
        }

    def write(self, first: Sequence[str], second: Sequence[str], kept: Sequence[str]) -> str:
        """Writes the kernel.

        Args:
            first: the statements that compute A, b and the condition of a step.
            second: those of the step itself.
            kept: the declarations of what the first compute for the second.
        """
        storage, reverse = self.steps.storage, self.program.reverse
        scanned = [self.buffers[s.name] for s in self.affine.states]
        sums = [self.buffers[s.name] for s in self.program.states if s.total is not None]
        every = dict.fromkeys(buffer for of in self.buffers.values() for buffer in of)
        own, K = self.own, len(self.affine.states)
        most_warps = _MOST_WARPS[self.affine.states[0].value.type.dtype]
        now = {buffer: f"now[{k}]" for k, of in enumerate(scanned) for buffer in of}
        last = [buffer for buffer in every if buffer.kind == "state" and (buffer,) not in sums]
        initial = ", ".join(initial_state(of[0], reverse) for of in scanned)
        before = (
            *kept,
            f"{self.step} steps = {self.step}::nothing();",
            "#pragma unroll",
            "for (int d = 0; d < ahead; ++d) {",
            *indent(2, self.writer.write_step(first)),
            f"  if (runs) steps.then({self._describe()});",
            "}",
            "scan.find_state(steps, now);",
            *(f"{own} {b.name}_now = {value}, {b.name}_next;" for b, value in now.items()),
            *(f"[[maybe_unused]] {TYPES[b.type.dtype]} {b.name}_now = 0, {b.name}_next;"
              for b in every if b not in now),
        )  # fmt: skip
        after = (
            "if (count > 0 && begin + count == T) {",
            *indent(2, (f"{final_state(b)} = {b.name}_now;" for b in last)),
            "}",
            *(f"now[{k}] = {of[0].name}_now;" for k, of in enumerate(scanned)),
            *(f"{of[0].name}_sum += {of[0].name}_now;" for of in sums),
            "scan.pass_on(now);",
        )
        lines = [
            HEADER, "", "using namespace hoconv::recurrent;", "",
            "struct Call {", "  int64_t T, B, blocks;", "  const int64_t* seed;",
            *(f"  {TYPES[b.type.dtype]}* {b.name};" for b in storage.buffers),
            "  char* scratch;", "};", "",
            f'extern "C" __global__ void __launch_bounds__({most_warps * LANES})',
            "scan(const Call c) {",
            "  extern __shared__ __align__(128) char shared[];",
            "  const int64_t T = c.T, B = c.B;",
            "  [[maybe_unused]] const int64_t seed = c.seed == nullptr ? 0 : *c.seed;",
            f"  constexpr int ahead = {self.writer.count_ahead()};",
            f"  const int64_t place = blockIdx.x / c.blocks * {LANES} + threadIdx.x % {LANES};",
            f"  const bool inside = place < B * {self.size};",
            f"  const int64_t row = inside ? place / {self.size} : 0, j = inside ? place % "
            f"{self.size} : 0;",
            f"  {write_count('(inside ? T : 0)')}",
            *indent(2, self.writer.constants),
            f"  {own} now[{K}] = {{{initial}}};",
            f"  const int64_t every = c.blocks * (blockDim.x / {LANES}) * ahead;",
            f"  Scan<{own}, {K}, {self._cuts}, {most_warps}> scan(shared, c.blocks, "
            "(T + every - 1) / every);",
            f"  static_assert(sizeof(decltype(scan)::Memory) == {self.shared_bytes});",
            *indent(2, (f"{own} {of[0].name}_sum = 0;" for of in sums)),
            *indent(2, self.writer.begin("(scan.rank * scan.warps + scan.warp) * ahead")),
            "  for (int64_t begin = first; begin - first < T; begin += every) {",
            *indent(4, self.writer.write_round("every", before, second, every, after)),
            "  }",
            *indent(2, (f"{of[0].name}_sum = scan.sum({of[0].name}_sum);" for of in sums)),
            "  if (inside && scan.rank == 0 && scan.warp == 0) {",
            *indent(4, (f"{final_state(of[0])} = {of[0].name}_sum;" for of in sums)),
            "  }",
            "}",
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def _describe(self) -> str:
        """Writes a step as an AffineStep."""
        dtype = self.affine.states[0].value.type.dtype

        def name(operand: Operand) -> str:
            given = isinstance(operand, Value)
            return self.writer.name(operand) if given else literal(operand, dtype)

        rows = ", ".join(f"{{{', '.join(map(name, row))}}}" for row in self.affine.matrix)
        cut = "" if self.affine.cut is None else f"{self.own}({name(self.affine.cut)})"
        offsets = ", ".join(map(name, self.affine.offset))
        return f"{self.step}{{{{{cut}}}, {{{rows}}}, {{{offsets}}}}}"
