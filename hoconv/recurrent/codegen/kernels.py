"""Writes a kernel's loops as C statements; a target adds what differs between C++ and CUDA.

Sizes are marked (:mod:`hoconv.recurrent.codegen.sizes`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from hoconv.recurrent.codegen.expressions import TYPES, expression, initial, literal, reduced
from hoconv.recurrent.codegen.loops import (
    Kernel,
    Load,
    Memory,
    Nest,
    Reduce,
    Statement,
    Store,
    repeats,
)
from hoconv.recurrent.codegen.sizes import size
from hoconv.recurrent.ir.axes import Axes, Layout, layout
from hoconv.recurrent.ir.functions import FUNCTIONS, Reduction
from hoconv.recurrent.ir.program import Op, Value


class Target(ABC):
    """A target's iteration over the features of a row."""

    @abstractmethod
    def loop(self, size: int, sums: Sequence[tuple[Op, str]], body: Sequence[str]) -> list[str]:
        """A loop over features ``j`` < size; `sums` are the reductions in its body, and names."""

    @abstractmethod
    def nest(self, nest: LoopNest) -> list[str]:
        """The loops of an op that reads its operands by axes."""

    @abstractmethod
    def scalars(self, body: Sequence[str]) -> list[str]:
        """Statements that define scalars; a row executes the stores among them once."""

    @abstractmethod
    def barrier(self) -> list[str]:
        """Makes the stores of the loops before it visible to all threads of the row."""


@dataclass(frozen=True)
class LoopNest:
    """An op that reads its operands by axes, as a target writes it.

    Attributes:
        own: the type of the result.
        axes: of the op.
        operands: the pointer to each operand, or its variable if it has no axes.
        places: the pointers to where the result is written.
        initial: what the reduced axes begin with.
        combine: the expression of what was reduced so far, {0}, and one more, {1}.
        openmp: the operator of OpenMP's reduction clause.
    """

    own: str
    axes: Layout
    operands: tuple[str, ...]
    places: tuple[str, ...]
    initial: str
    combine: str
    openmp: str

    def product(self) -> str:
        """The product of the operands at a position, whose index along axis a is ``i<a>``."""
        parts = []
        for name, of in zip(self.operands, self.axes.operands, strict=True):
            parts.append(f"{name}[{self.index(of)}]" if of else name)
        return " * ".join(parts)

    def index(self, of: Axes) -> str:
        """The index of a position among features that lie along some axes."""
        strides = self.axes.strides(of)
        terms = (f"i{a}" if n == 1 else f"i{a} * {size(n)}" for a, n in strides.items())
        return " + ".join(terms) or "0"


class KernelWriter:
    """Writes the statements for the row of index ``row`` at time step ``t``."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.names: dict[Value, str] = {}

    def row(self, kernel: Kernel) -> list[str]:
        """All statements for a row."""
        lines = self.target.scalars(self._statements(kernel.first, "0")) if kernel.first else []
        for i, section in enumerate(kernel.sections):
            for count, statements in sorted(section.loops.items()):
                sums = [s.op for s in statements if isinstance(s, Reduce)]
                for op in sums:
                    own = TYPES[op.result.type.dtype]
                    lines.append(f"{own} {self._name(op.result)} = {initial(op)};")
                named = [(op, self._name(op.result)) for op in sums]
                lines += self.target.loop(count, named, self._statements(statements, "j"))
            for nest in section.nests:
                lines += self.target.nest(self._nest(nest))
            if any(isinstance(s, Load) for s in section.scalars):
                lines += self.target.barrier()
            if section.scalars:
                lines += self.target.scalars(self._statements(section.scalars, "0"))
            if i + 1 < len(kernel.sections):
                lines += self.target.barrier()
        return lines

    def _name(self, value: Value) -> str:
        return self.names.setdefault(value, f"v{len(self.names)}")

    def _nest(self, nest: Nest) -> LoopNest:
        own = nest.op.result.type.dtype
        total = FUNCTIONS["max" if nest.op.kind == "largest" else "sum"]
        assert isinstance(total, Reduction)
        operands = (
            self._name(value) if memory is None else pointer(memory)
            for value, memory in zip(nest.op.values, nest.operands, strict=True)
        )  # fmt: skip
        return LoopNest(
            TYPES[own], layout(nest.op), tuple(operands), tuple(map(pointer, nest.places)),
            literal(total.identity, own) if own != "bool" else "false", total.c, total.openmp,
        )  # fmt: skip

    def _statements(self, statements: Sequence[Statement], feature: str) -> list[str]:
        return [self._statement(s, feature) for s in statements]

    def _statement(self, s: Statement, feature: str) -> str:
        if isinstance(s, Reduce):
            total, value = self._name(s.op.result), self._name(s.op.values[0])
            return f"{total} = {reduced(s.op, total, value)};"
        if isinstance(s, Store):
            return f"{element(s.memory, feature, s.offset)} = {self._name(s.value)};"
        value = s.value if isinstance(s, Load) else s.op.result
        own = TYPES[value.type.dtype]
        if isinstance(s, Load):
            given = element(s.memory, s.index(feature), s.offset)
        else:
            given = expression(s.op, {v: self._name(v) for v in s.op.values}, feature)
        return f"const {own} {self._name(value)} = {given};"


def pointer(memory: Memory) -> str:
    """The name of the pointer to a row."""
    if memory.location is None:
        return f"scratch{memory.number}"
    return f"{memory.location.buffer.name}{'_after' * memory.location.after}"


def element(memory: Memory, feature: str, offset: int) -> str:
    """The expression of a feature in memory."""
    index = feature
    if offset:
        index = size(offset) if feature == "0" else f"{feature} + {size(offset)}"
    return f"{pointer(memory)}[{index}]"


@dataclass(frozen=True)
class Access:
    """One load or store of a kernel.

    Attributes:
        size: the iterations of its loop; 1 outside of loops, 0 in a loop nest, or where it repeats
            features.
        offset: from the loop's index to the feature in memory.
    """

    memory: Memory
    size: int
    offset: int
    writes: bool


def accesses(kernel: Kernel) -> list[Access]:
    """All loads and stores of a kernel."""
    loops = [(size, s) for section in kernel.sections for size, s in section.loops.items()]
    loops += [(1, kernel.first), *((1, section.scalars) for section in kernel.sections)]
    found = [
        Access(s.memory, 0 if repeats(s) else size, s.offset, isinstance(s, Store))
        for size, statements in loops
        for s in statements
        if isinstance(s, Load | Store)
    ]
    for nest in (nest for section in kernel.sections for nest in section.nests):
        found += [Access(m, 0, 0, False) for m in nest.operands if m is not None]
        found += [Access(m, 0, 0, True) for m in nest.places]
    return found


def memories(kernel: Kernel) -> list[Memory]:
    """The distinct memories that a kernel reads or writes."""
    return list({pointer(a.memory): a.memory for a in accesses(kernel)}.values())
