"""Writes a loop whose steps are affine in their states as one CUDA kernel that scans.

The kernel (csrc/recurrent/scan.cuh) divides the steps among warps and blocks. A thread computes a
feature of a row. It reads the sequences once: it loads what some steps read, composes these steps,
finds the state before them through the steps of other warps, and then runs them one by one, as a
kernel without a scan does.

B batch, T time steps, i the number of steps already done, t the time step that is computed, j the
feature that a thread computes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hoconv.recurrent.codegen.expressions import TYPES, literal
from hoconv.recurrent.codegen.loops import Compute, Load, Statement
from hoconv.recurrent.codegen.single_kernel import (
    Registers,
    count_independent_features,
    final_state,
    indent,
    initial_state,
    list_statements,
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
_WARPS = {"f32": 16, "f64": 8}  # more do not fit into shared memory
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
        threads: of a block.
        steps_of_block: which a block runs between two exchanges with others.
        shared_bytes: of a block.
    """

    text: str
    steps: LoweredSteps
    features: int
    threads: int
    steps_of_block: int
    shared_bytes: int


def emit_scan(program: Program, warps: int | None = None) -> ScanSource | None:
    """Writes the kernel of a program whose steps have no product; None where they cannot be
    scanned.

    Args:
        warps: of a block; by default as many as fit.
    """
    affine = find_affine(program)
    if isinstance(affine, str) or affine.mixing or not 1 <= len(affine.states) <= _MOST_STATES:
        return None
    steps = lower_steps(program)
    size = count_independent_features([kernel for _, kernel in steps.kernels.values()])
    composed = lower_steps(_with_affine(program, affine))
    kernels = [kernel for _, kernel in composed.kernels.values()]
    if size is None or any(k.sections[1:] or any(s.scalars for s in k.sections) for k in kernels):
        return None
    wanted = {v for v in (*_flat(affine), affine.cut) if isinstance(v, Value)}
    writer = Registers(program.reverse)
    first = writer.write_all(*_select(*list_statements(kernels, size), wanted))
    second = writer.write_all(
        *list_statements([kernel for _, kernel in steps.kernels.values()], size)
    )
    dtype = affine.states[0].value.type.dtype
    warps = warps or _WARPS[dtype]
    ahead = writer.count_ahead()
    K, places = len(affine.states), warps + MOST_BLOCKS
    numbers = 2 * (places * (K * K + K + 1) + K) + places  # of Scan::Memory, a lane
    shared_bytes = LANES * numbers * BYTES[dtype]
    kernel = _Kernel(program, steps, affine, size, warps, shared_bytes, writer)
    text = kernel.write(first, second)
    return ScanSource(text, steps, size, warps * LANES, warps * ahead, shared_bytes)


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


class _Kernel:
    def __init__(
        self, program: Program, steps: LoweredSteps, affine: AffineSteps, size: int, warps: int,
        shared_bytes: int, writer: Registers,
    ) -> None:  # fmt: skip
        self.program = program
        self.steps = steps
        self.affine = affine
        self.size = size
        self.warps = warps
        self.shared_bytes = shared_bytes
        self.writer = writer
        self.own = TYPES[affine.states[0].value.type.dtype]
        # The buffers of each state.
        self.buffers: dict[str, tuple[Buffer, ...]] = {
            s.name: of for s, of in zip(program.states, steps.storage.initial, strict=True)
        }

    def write(self, first: Sequence[str], second: Sequence[str]) -> str:
        """Writes the kernel.

        Args:
            first: the statements that compute A, b and the condition of a step.
            second: those of the step itself.
        """
        storage, reverse = self.steps.storage, self.program.reverse
        scanned = [self.buffers[s.name] for s in self.affine.states]
        sums = [self.buffers[s.name] for s in self.program.states if s.total is not None]
        every = dict.fromkeys(buffer for of in self.buffers.values() for buffer in of)
        own, K = self.own, len(self.affine.states)
        now = [(buffer, f"now[{k}]") for k, of in enumerate(scanned) for buffer in of]
        last = [buffer for buffer in every if buffer.kind == "state" and (buffer,) not in sums]
        initial = ", ".join(initial_state(of[0], reverse) for of in scanned)
        lines = [
            HEADER, "", "using namespace hoconv::recurrent;", "",
            "struct Call {", "  int64_t T, B, blocks;", "  const int64_t* seed;",
            *(f"  {TYPES[b.type.dtype]}* {b.name};" for b in storage.buffers),
            "  char* scratch;", "};", "",
            f'extern "C" __global__ void __launch_bounds__({self.warps * LANES})',
            "scan(const Call c) {",
            "  extern __shared__ __align__(128) char shared[];",
            "  const int64_t T = c.T, B = c.B;",
            "  [[maybe_unused]] const int64_t seed = c.seed == nullptr ? 0 : *c.seed;",
            f"  constexpr int64_t ahead = {self.writer.count_ahead()};",
            f"  const int64_t place = blockIdx.x / c.blocks * {LANES} + threadIdx.x % {LANES};",
            f"  const bool inside = place < B * {self.size};",
            f"  const int64_t row = inside ? place / {self.size} : 0, j = inside ? place % "
            f"{self.size} : 0;",
            *indent(2, self.writer.constants),
            f"  {own} now[{K}] = {{{initial}}};",
            f"  Scan<{own}, {K}, {self.warps}> scan(shared, c.blocks, now);",
            f"  static_assert(sizeof(decltype(scan)::Memory) == {self.shared_bytes});",
            f"  const int64_t own_steps = (scan.rank * {self.warps} + scan.warp) * ahead;",
            f"  const int64_t all_steps = c.blocks * {self.warps} * ahead;",
            *indent(2, (f"{own} {of[0].name}_sum = 0;" for of in sums)),
            *indent(2, (f"{of} {value}_ahead[ahead];" for of, value, _, _ in self.writer.ahead)),
            "#pragma unroll",
            "  for (int64_t d = 0; d < ahead; ++d)",
            "    if (own_steps + d < T) {",
            *indent(6, self.writer.load("(own_steps + d)")),
            "    }",
            "  for (int64_t begin = own_steps; begin - own_steps < T; begin += all_steps) {",
            f"    auto steps = AffineStep<{own}, {K}>::nothing();",
            "#pragma unroll",
            "    for (int64_t d = 0; d < ahead; ++d) {",
            *self._each_step(),
            *indent(6, first),
            f"      steps.then({self._describe()});",
            "    }",
            "    scan.find_state(steps, now);",
            *indent(4, (f"{own} {b.name}_now = {value}, {b.name}_next;" for b, value in now)),
            *indent(4, (f"[[maybe_unused]] {TYPES[b.type.dtype]} {b.name}_now = 0, {b.name}_next;"
                        for b in every if b not in dict(now))),
            "#pragma unroll",
            "    for (int64_t d = 0; d < ahead; ++d) {",
            *self._each_step(),
            *indent(6, second),
            "      if (i + all_steps < T) {",
            *indent(8, self.writer.load("(i + all_steps)")),
            "      }",
            "      if (i == T - 1) {",
            *indent(8, (f"{final_state(b)} = {b.name}_next;" for b in last)),
            "      }",
            *indent(6, (f"{b.name}_now = {b.name}_next;" for b in every)),
            "    }",
            *indent(4, (f"now[{k}] = {of[0].name}_now;" for k, of in enumerate(scanned))),
            *indent(4, (f"{of[0].name}_sum += {of[0].name}_now;" for of in sums)),
            "    scan.pass_on(now);",
            "  }",
            "  scan.end();",
            *indent(2, (f"{of[0].name}_sum = scan.sum({of[0].name}_sum);" for of in sums)),
            "  if (inside && scan.rank == 0 && scan.warp == 0) {",
            *indent(4, (f"{final_state(of[0])} = {of[0].name}_sum;" for of in sums)),
            "  }",
            "}",
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def _each_step(self) -> list[str]:
        step = "T - 1 - i" if self.program.reverse else "i"
        return [
            "      const int64_t i = begin + d;",
            "      if (i >= T || !inside) break;",
            f"      [[maybe_unused]] const int64_t t = {step};",
        ]

    def _describe(self) -> str:
        """Writes a step as an AffineStep."""
        dtype = self.affine.states[0].value.type.dtype

        def name(operand: Operand) -> str:
            given = isinstance(operand, Value)
            return self.writer.name(operand) if given else literal(operand, dtype)

        rows = ", ".join(f"{{{', '.join(map(name, row))}}}" for row in self.affine.matrix)
        cut = "0" if self.affine.cut is None else f"{self.own}({name(self.affine.cut)})"
        own = f"AffineStep<{self.own}, {len(self.affine.states)}>"
        return f"{own}{{{{{rows}}}, {{{', '.join(map(name, self.affine.offset))}}}, {cut}}}"
