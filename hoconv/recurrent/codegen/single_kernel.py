"""Writes a loop whose steps have no product as one CUDA kernel: rows depend on no other row.

Where a feature depends on no other feature either, a thread runs all steps of a feature with its
states in registers. It loads what it reads of sequences several steps ahead, since no step has to
wait for the one before to know what to load. Otherwise a block runs all steps of a row, and its
threads wait for each other.

B batch, T time steps, i the number of steps already done, t the time step that is computed, j the
feature that a thread computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hoconv.recurrent.codegen.expressions import TYPES, expression
from hoconv.recurrent.codegen.loops import Compute, Kernel, Load, Statement, Store
from hoconv.recurrent.codegen.steps import LoweredSteps, offset
from hoconv.recurrent.codegen.storage import Buffer
from hoconv.recurrent.ir.program import Program, Value

# Registers for what is loaded ahead, and the most steps ahead: what memory takes to answer.
_AHEAD_VALUES, _AHEAD_STEPS = 24, 8


def count_independent_features(kernels: Sequence[Kernel]) -> int | None:
    """The number of features if each of them depends on no other one, else None."""
    sizes = {size for kernel in kernels for section in kernel.sections for size in section.loops}
    if len(sizes) != 1 or any(
        len(kernel.sections) > 1
        or any(section.scalars or section.nests for section in kernel.sections)
        for kernel in kernels
    ):
        return None
    (size,) = sizes
    scalars, loop = list_statements(kernels, size)
    if all(map(_is_own_scalar, scalars)) and all(_is_own(s, size) for s in loop):
        return size
    return None


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
        own = s.offset == 0 and location.buffer.type.size == size
        return own and location.after == isinstance(s, Store)
    if isinstance(s, Store):
        return location.buffer.kind == "sequence" and s.offset + size <= location.buffer.type.size
    return location.buffer.kind == "once" or location.buffer.name.startswith(("read", "made"))


def _kind(s: Load | Store) -> str:
    return "" if s.memory.location is None else s.memory.location.buffer.kind


class Registers:
    """Writes statements that find states, parameters and what was loaded ahead in registers.

    Attributes:
        constants: the declarations of parameters.
        ahead: what is loaded ahead: type, name, buffer, and index within a row.
    """

    def __init__(self, reverse: bool) -> None:
        self.reverse = reverse
        self.constants: list[str] = []
        self.ahead: list[tuple[str, str, Buffer, str]] = []
        self._names: dict[Value, str] = {}
        self._found: set[Value] = set()
        self._loaded: set[Value] = set()

    def write_all(self, scalars: Sequence[Statement], loop: Sequence[Statement]) -> list[str]:
        """Writes the statements of a block of code: of the scalars of a row, then of features."""
        self._loaded.clear()
        lines = [line for s in scalars for line in self.write(s, "")]
        return lines + [line for s in loop for line in self.write(s, "j")]

    def count_ahead(self) -> int:
        """Returns how many steps ahead there are registers to load."""
        return max(1, min(_AHEAD_STEPS, _AHEAD_VALUES // max(1, len(self.ahead))))

    def load(self, step: str) -> list[str]:
        """Writes what loads the values of a step, by the number of steps before it, as ``d``."""
        at = f"(T - 1 - {step})" if self.reverse else step
        return [
            f"{name}_ahead[d] = c.{buffer.name}[({at} * B + row) * {buffer.type.size} + {index}];"
            for _, name, buffer, index in self.ahead
        ]

    def write(self, s: Statement, feature: str) -> list[str]:
        """Writes a statement of the feature ``j``, or of a scalar if `feature` is empty."""
        if isinstance(s, Compute):
            operands = {v: self.name(v) for v in s.op.values}
            given = expression(s.op, operands, feature or "0")
            return [f"const {TYPES[s.op.result.type.dtype]} {self.name(s.op.result)} = {given};"]
        assert isinstance(s, Load | Store) and s.memory.location is not None  # noqa: PT018
        buffer, name = s.memory.location.buffer, self.name(s.value)
        index = " + ".join(filter(None, (feature, str(s.offset) if s.offset else ""))) or "0"
        if isinstance(s, Store):
            lines = []
            if buffer.kind != "sequence":
                lines.append(f"{buffer.name}_next = {name};")
            if buffer.kind != "state":
                lines.append(f"{self._address(buffer)}[{index}] = {name};")
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
            self.ahead.append((own, name, buffer, index))
        return [f"const {own} {name} = {name}_ahead[d];"]

    def name(self, value: Value) -> str:
        return self._names.setdefault(value, f"v{len(self._names)}")

    def _address(self, buffer: Buffer) -> str:
        rows = offset(buffer, buffer.kind == "history", self.reverse)
        return f"(c.{buffer.name}{rows} + row * {buffer.type.size})"


def write_thread_per_feature(
    program: Program, steps: LoweredSteps, size: int, name: str, threads: int
) -> list[str]:
    """Writes the kernel in which a thread runs all steps of a feature; its grid is (B, blocks).

    Args:
        size: the number of features, as by :func:`count_independent_features`.
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
        f"  constexpr int64_t ahead = {writer.count_ahead()};",
        "  const int64_t first = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;",
        "  const int64_t stride = int64_t{gridDim.y} * blockDim.x;",
        f"  for (int64_t j = first; j < {size}; j += stride) {{",
        *indent(4, writer.constants, map(begin, states)),
        *indent(4, (f"{own} {value}_ahead[ahead];" for own, value, _, _ in writer.ahead)),
        "#pragma unroll",
        "    for (int64_t d = 0; d < ahead; ++d)",
        "      if (d < T) {",
        *indent(8, writer.load("d")),
        "      }",
        "    for (int64_t begin = 0; begin < T; begin += ahead) {",
        "#pragma unroll",
        "      for (int64_t d = 0; d < ahead; ++d) {",
        "        const int64_t i = begin + d;",
        "        if (i >= T) break;",
        f"        [[maybe_unused]] const int64_t t = {'T - 1 - i' if program.reverse else 'i'};",
        *indent(8, step),
        "        if (i + ahead < T) {",
        *indent(10, writer.load("(i + ahead)")),
        "        }",
        *indent(8, (f"{buffer.name}_now = {buffer.name}_next;" for buffer in states)),
        "      }",
        "    }",
        *indent(4, (end(buffer) for buffer in states if buffer.kind == "state")),
        "  }",
        "}",
    ]


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
    """Writes the kernel in which a block runs all steps of a row, by the functions of a step."""
    return [
        f'extern "C" __global__ void __launch_bounds__({threads})',
        f"{name}(const Call c) {{",
        "  for (int64_t i = 0; i < c.T; ++i) {",
        *(line for kernel in kernels for line in (f"    {kernel}(c, i);", "    __syncthreads();")),
        "  }",
        "}",
    ]
