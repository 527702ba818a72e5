"""Writes a loop whose steps have no product as one CUDA kernel: rows depend on no other row.

Where a feature depends on no other feature either, a thread runs all steps of a feature with its
states in registers. It loads what it reads of sequences a round of steps ahead, since no step has
to wait for the one before to know what to load. Without states no step waits for another at all: a
thread computes a feature of a few rows, whatever their steps; values of other sizes are computed by
other blocks. Otherwise a block runs all steps of a row, and its threads wait for each other.

B batch, T time steps, i the number of steps already done, t the time step that is computed, j the
feature that a thread computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hoconv.recurrent.codegen.expressions import TYPES, expression
from hoconv.recurrent.codegen.loops import Compute, Kernel, Load, Statement, Store, repeats
from hoconv.recurrent.codegen.steps import LoweredSteps
from hoconv.recurrent.codegen.storage import Buffer
from hoconv.recurrent.ir.program import BYTES, Program, Value, flat

# Registers for what a round reads, and its most steps: what memory takes to answer.
_AHEAD_REGISTERS, _AHEAD_STEPS = 32, 16
_REGISTER_BYTES = 4
# Rows of a thread where none depends on another. A GPU with 132 multiprocessors and 5 TB/s, whose
# memory answers after some 700 ns, needs 26 KB on the way to each multiprocessor: 8 rows of one
# number in half precision in 1536 threads are 24 KB. More rows take instructions, and registers
# that more threads could use.
_ROWS = 8


def find_independent_features(kernels: Sequence[Kernel]) -> tuple[int, ...]:
    """Finds the sizes of what is computed of a row if each feature depends on no other one, of its
    size or of another; the largest first."""
    sizes = {size for kernel in kernels for section in kernel.sections for size in section.loops}
    if any(
        len(kernel.sections) > 1
        or any(section.scalars or section.nests for section in kernel.sections)
        for kernel in kernels
    ):
        return ()
    for size in sizes:
        scalars, loop = list_statements(kernels, size)
        if not (all(map(_is_own_scalar, scalars)) and all(_is_own(s, size) for s in loop)):
            return ()
    return tuple(sorted(sizes, reverse=True))


def are_rows_alike(program: Program) -> bool:
    """Returns whether what is computed of a row depends neither on its step nor on its place in the
    batch, as states, random masks and constants do."""
    given = (*(v for _, v in program.sequences), *program.made_before)
    return not (
        program.states
        or any(op.kind == "keep" for op in flat(program.step))
        or any(v.type.rate == "constant" for v in given)
    )


def list_statements(
    kernels: Sequence[Kernel], size: int
) -> tuple[list[Statement], list[Statement]]:
    """The scalars of a row, and what is done for each of its features."""
    loops = [s for k in kernels for section in k.sections for s in section.loops.get(size, ())]
    return [s for kernel in kernels for s in kernel.first], loops


def _is_own_scalar(s: Statement) -> bool:
    """Returns whether a scalar of a row is read or computed, but belongs to no state and is not
    stored."""
    return isinstance(s, Compute) or (isinstance(s, Load) and _kind(s) in ("once", "sequence"))


def _is_own(s: Statement, size: int) -> bool:
    """Returns whether a statement touches, of what the loop writes, its own feature only."""
    if isinstance(s, Compute):
        return True
    if not isinstance(s, Load | Store) or s.memory.location is None:
        return False
    location = s.memory.location
    if location.buffer.kind in ("state", "history"):
        own = s.offset == 0 and location.buffer.type.size == size and not repeats(s)
        return own and location.after == isinstance(s, Store)
    if isinstance(s, Store):
        return location.buffer.kind == "sequence" and s.offset + size <= location.buffer.type.size
    return location.buffer.kind == "once" or location.buffer.name.startswith(("read", "made"))


def _kind(s: Load | Store) -> str:
    return "" if s.memory.location is None else s.memory.location.buffer.kind


class Registers:
    """Writes statements that find states, parameters and sequences in registers, and rounds of
    steps. In a round a thread runs up to ``ahead`` steps of a feature, while what the next round
    reads of sequences is on its way from memory.

    Attributes:
        constants: the declarations of parameters.
        reads: what is read of sequences: type, name, buffer, and index within a row.
        writes: the sequences and histories that are written.
    """

    def __init__(self, reverse: bool) -> None:
        self.reverse = reverse
        self.constants: list[str] = []
        self.reads: list[tuple[str, str, Buffer, str]] = []
        self.writes: dict[Buffer, None] = {}
        self._names: dict[Value, str] = {}
        self._found: set[Value] = set()
        self._loaded: set[Value] = set()

    def write_all(self, scalars: Sequence[Statement], loop: Sequence[Statement]) -> list[str]:
        """Writes the statements of a block of code: of the scalars of a row, then of features."""
        self._loaded.clear()
        lines = [line for s in scalars for line in self.write(s, "")]
        return lines + [line for s in loop for line in self.write(s, "j")]

    def count_ahead(self, most: int = _AHEAD_STEPS) -> int:
        """Returns how many steps of a round there are registers for."""
        registers = sum(-(-BYTES[b.type.dtype] // _REGISTER_BYTES) for _, _, b, _ in self.reads)
        return max(1, min(most, _AHEAD_REGISTERS // max(1, registers)))

    def begin(self, first: str) -> list[str]:
        """Writes what comes before the rounds of a thread, whose first step is `first`."""
        step, after = ("T - 1 - first", "(t - 1)") if self.reverse else ("first", "(t + 1)")
        return [
            f"const int64_t first = {first}, t = {step};",
            *(f"{own} {name}_coming[ahead] = {{}};" for own, name, _, _ in self.reads),
            *(
                f"const {own}* {name}_from = c.{buffer.name} + "
                f"{'row' if buffer.kind == 'constant' else '(t * B + row)'} * {buffer.type.size}"
                f" + {index};"
                for own, name, buffer, index in self.reads
            ),
            *(
                f"{TYPES[b.type.dtype]}* {b.name}_to = c.{b.name} + "
                f"({after if b.kind == 'history' else 't'} * B + row) * {b.type.size};"
                for b in self.writes
            ),
            *self._load("count_steps(first)", "ahead"),
        ]

    def write_round(
        self, every: str, before: Iterable[str], step: Sequence[str], states: Iterable[Buffer],
        after: Iterable[str],
    ) -> list[str]:  # fmt: skip
        """Writes a round.

        Args:
            every: the number of steps from the first of a round to that of the thread's next round.
            before: what the thread does before it runs the steps.
            step: the statements of a step.
            states: that the steps change.
            after: what the thread does after the steps.
        """
        skipped = f"({every} - ahead) * B"
        return [
            *self._begin_round(),
            *(self._move(name, buffer, skipped) for name, buffer in self._moving()),
            *self._load(f"count_steps(begin + {every})", every),
            *before,
            *self._write_steps(step, states),
            *(self._move(f"{b.name}_to", b, skipped) for b in self.writes),
            *after,
        ]

    def write_only_round(self, step: Sequence[str]) -> list[str]:
        """Writes the round of a thread that runs no other one, of steps without states."""
        begin = "[[maybe_unused]] const int64_t begin = first;"
        return [begin, *self._begin_round(), *self._write_steps(step, ())]

    def _begin_round(self) -> list[str]:
        return [
            "const int count = count_steps(begin);",
            *(f"{own} {name}_read[ahead];" for own, name, _, _ in self.reads),
            "#pragma unroll",
            "for (int d = 0; d < ahead; ++d) {",
            *indent(2, (f"{name}_read[d] = {name}_coming[d];" for _, name, _, _ in self.reads)),
            "}",
        ]

    def _write_steps(self, step: Sequence[str], states: Iterable[Buffer]) -> list[str]:
        return [
            "#pragma unroll",
            "for (int d = 0; d < ahead; ++d) {",
            *indent(2, self.write_step(step)),
            *indent(2, (f"{b.name}_now = runs ? {b.name}_next : {b.name}_now;" for b in states)),
            *indent(2, (self._move(f"{b.name}_to", b, "B") for b in self.writes)),
            "}",
        ]

    def write_step(self, step: Iterable[str]) -> list[str]:
        """Writes the step ``d`` of a round. Its values are computed where it does not run, too."""
        return [
            "[[maybe_unused]] const bool runs = d < count;",
            "[[maybe_unused]] const int64_t i = begin + d;",
            f"[[maybe_unused]] const int64_t t = {'T - 1 - i' if self.reverse else 'i'};",
            *step,
        ]

    def write(self, s: Statement, feature: str) -> list[str]:
        """Writes a statement of the feature ``j``, or of a scalar if `feature` is empty."""
        if isinstance(s, Compute):
            operands = {v: self.name(v) for v in s.op.values}
            given = expression(s.op, operands, feature or "0")
            return [f"const {TYPES[s.op.result.type.dtype]} {self.name(s.op.result)} = {given};"]
        assert isinstance(s, Load | Store) and s.memory.location is not None  # noqa: PT018
        buffer, name = s.memory.location.buffer, self.name(s.value)
        if isinstance(s, Load) and feature:
            feature = s.index(feature)
        index = " + ".join(filter(None, (feature, str(s.offset) if s.offset else ""))) or "0"
        if isinstance(s, Store):
            lines = []
            if buffer.kind != "sequence":
                lines.append(f"{buffer.name}_next = {name};")
            if buffer.kind != "state":
                self.writes[buffer] = None
                lines.append(f"if (runs) {self._to(buffer)}[{index}] = {name};")
            return lines
        if s.value in self._loaded:
            return []
        self._loaded.add(s.value)
        own, first = TYPES[s.value.type.dtype], s.value not in self._found
        self._found.add(s.value)
        if buffer.kind == "once":
            if first:
                self.constants.append(f"const {own} {name} = c.{buffer.name}[{index}];")
            return []
        if buffer.kind in ("state", "history"):
            return [f"const {own} {name} = {buffer.name}_now;"]
        if first:
            self.reads.append((own, name, buffer, index))
        return [f"const {own} {name} = {name}_read[d];"]

    def name(self, value: Value) -> str:
        return self._names.setdefault(value, f"v{len(self._names)}")

    def _load(self, count: str, every: str) -> list[str]:
        """Writes the loads of a round, after which the addresses are those of the next round."""
        return [
            "{",
            f"  const int loads = {count};",
            "#pragma unroll",
            "  for (int d = 0; d < ahead; ++d) {",
            *(
                f"    if (d < loads) {name}_coming[d] = *{name}_from;"
                for _, name, _, _ in self.reads
            ),
            *(f"    {self._move(name, buffer, 'B')}" for name, buffer in self._moving()),
            "  }",
            "}",
        ]

    def _moving(self) -> Iterator[tuple[str, Buffer]]:
        """Lists what each step reads elsewhere than the step before: pointers and buffers."""
        for _, name, buffer, _ in self.reads:
            if buffer.kind != "constant":
                yield f"{name}_from", buffer

    def _move(self, pointer: str, buffer: Buffer, rows: str) -> str:
        return f"{pointer} {'-' if self.reverse else '+'}= {rows} * {buffer.type.size};"

    def _to(self, buffer: Buffer) -> str:
        """The row that a step writes."""
        if buffer.kind == "history" and self.reverse:  # before the first row comes the last one
            last = f"c.{buffer.name} + (T * B + row) * {buffer.type.size}"
            return f"(t == 0 ? {last} : {buffer.name}_to)"
        return f"{buffer.name}_to"


def write_count(steps: str) -> str:
    """Writes the function that counts the steps of the round that begins at one, of all `steps`."""
    return (
        f"const auto count_steps = [=](int64_t from) {{ const int64_t left = {steps} - from; "
        "return left <= 0 ? 0 : left < ahead ? static_cast<int>(left) : ahead; };"
    )


def write_thread_per_feature(
    program: Program, steps: LoweredSteps, size: int, name: str, threads: int
) -> list[str]:
    """Writes the kernel in which a thread runs all steps of a feature; its grid is (B, blocks).

    Args:
        size: the number of features, the only one of :func:`find_independent_features`.
    """
    kernels = [kernel for _, kernel in steps.kernels.values()]
    writer = Registers(program.reverse)
    step = writer.write_all(*list_statements(kernels, size))
    states = dict.fromkeys(buffer for of in steps.storage.initial for buffer in of)

    def begin(buffer: Buffer) -> str:
        own, initial = TYPES[buffer.type.dtype], initial_state(buffer, program.reverse)
        return f"{own} {buffer.name}_now = {initial}, {buffer.name}_next;"

    def end(buffer: Buffer) -> str:
        return f"{final_state(buffer)} = {buffer.name}_now;"

    return [
        f'extern "C" __global__ void __launch_bounds__({threads})',
        f"{name}(const Call c) {{",
        "  const int64_t T = c.T, B = c.B, row = blockIdx.x;",
        "  [[maybe_unused]] const int64_t seed = c.seed == nullptr ? 0 : *c.seed;",
        f"  constexpr int ahead = {writer.count_ahead()};",
        f"  {write_count('T')}",
        "  const int64_t beginning = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;",
        "  const int64_t stride = int64_t{gridDim.y} * blockDim.x;",
        f"  for (int64_t j = beginning; j < {size}; j += stride) {{",
        *indent(4, writer.constants, map(begin, states), writer.begin("0")),
        "    for (int64_t begin = first; begin < T; begin += ahead) {",
        *indent(6, writer.write_round("ahead", (), step, states, ())),
        "    }",
        *indent(4, (end(buffer) for buffer in states if buffer.kind == "state")),
        "  }",
        "}",
    ]


def write_rows_alike(
    steps: LoweredSteps, sizes: Sequence[int], name: str, threads: int
) -> tuple[int, int, list[str]]:
    """Writes the kernel in which a thread computes a feature of a round of rows that are alike, see
    :func:`are_rows_alike`; its grid is (T * B / the rows of a round, blocks).

    To the kernel, the rows of all steps are as many steps of a batch of one: a row of step t is row
    t * B + row of a sequence, and the order of the steps does not matter. The features of each size
    are those of a block and the next ones.

    Args:
        sizes: as by :func:`find_independent_features`.

    Returns:
        The rows of a round, the blocks, and the lines.
    """
    kernels = [kernel for _, kernel in steps.kernels.values()]
    written = []
    for size in sizes:
        writer = Registers(reverse=False)
        written.append((size, writer, writer.write_all(*list_statements(kernels, size))))
    rows = min(writer.count_ahead(_ROWS) for _, writer, _ in written)
    blocks, features = 0, []
    for size, writer, step in written:
        features += [
            f"  if (const int64_t j = number - {blocks * threads}; j >= 0 && j < {size}) {{",
            *indent(4, writer.constants, writer.begin("int64_t{blockIdx.x} * ahead")),
            *indent(4, writer.write_only_round(step)),
            "  }",
        ]
        blocks += -(-size // threads)
    lines = [
        f'extern "C" __global__ void __launch_bounds__({threads})',
        f"{name}(const Call c) {{",
        "  const int64_t T = c.T * c.B;",
        "  constexpr int64_t B = 1, row = 0;",
        f"  constexpr int ahead = {rows};",
        f"  {write_count('T')}",
        "  const int64_t number = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;",
        *features,
        "}",
    ]
    return rows, blocks, lines


def initial_state(buffer: Buffer, reverse: bool) -> str:
    """The feature of a state before the first step, in memory."""
    row = "((T - 1) * B + row)" if buffer.kind == "history" and reverse else "row"
    return f"c.{buffer.name}[{row} * {buffer.type.size} + j]"


def final_state(buffer: Buffer) -> str:
    """The feature of a state after the last step, in memory; not of a history."""
    return f"c.{buffer.name}[(T % 2 * B + row) * {buffer.type.size} + j]"


def indent(spaces: int, *lines: Iterable[str]) -> Iterator[str]:
    return (" " * spaces + line for each in lines for line in each)


def write_block_per_row(kernels: Sequence[str], name: str, threads: int) -> list[str]:
    """Writes the kernel in which a block runs all steps of some rows, one after another, by the
    functions of a step."""
    barrier = "__syncthreads();"
    return [
        f'extern "C" __global__ void __launch_bounds__({threads})',
        f"{name}(const Call c) {{",
        "  for (int64_t row = blockIdx.x; row < c.B; row += gridDim.x)",
        "    for (int64_t i = 0; i < c.T; ++i) {",
        *(f"      {line}" for kernel in kernels for line in (f"{kernel}(c, i, row);", barrier)),
        "    }",
        "}",
    ]
