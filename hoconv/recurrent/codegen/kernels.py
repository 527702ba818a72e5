"""Writes a kernel's loops as C statements; a target adds what differs between C++ and CUDA."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from hoconv.recurrent.codegen.expressions import TYPES, expression, initial, reduced
from hoconv.recurrent.codegen.loops import Kernel, Load, Memory, Reduce, Statement, Store
from hoconv.recurrent.ir.program import Op, Value


class Target(ABC):
    """A target's iteration over the features of a row."""

    @abstractmethod
    def loop(self, size: int, sums: Sequence[tuple[Op, str]], body: Sequence[str]) -> list[str]:
        """A loop over features ``j`` < size; `sums` are the reductions in its body, and names."""

    @abstractmethod
    def scalars(self, body: Sequence[str]) -> list[str]:
        """Statements that define scalars; a row executes the stores among them once."""

    @abstractmethod
    def barrier(self) -> list[str]:
        """Makes the stores of the loops before it visible to all threads of the row."""


class KernelWriter:
    """Writes the statements for the row of index ``row`` at time step ``t``."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.names: dict[Value, str] = {}

    def row(self, kernel: Kernel) -> list[str]:
        """All statements for a row."""
        lines = self.target.scalars(self._statements(kernel.first, "0")) if kernel.first else []
        for i, section in enumerate(kernel.sections):
            for size, statements in sorted(section.loops.items()):
                sums = [s.op for s in statements if isinstance(s, Reduce)]
                for op in sums:
                    own = TYPES[op.result.type.dtype]
                    lines.append(f"{own} {self._name(op.result)} = {initial(op)};")
                named = [(op, self._name(op.result)) for op in sums]
                lines += self.target.loop(size, named, self._statements(statements, "j"))
            if any(isinstance(s, Load) for s in section.scalars):
                lines += self.target.barrier()
            if section.scalars:
                lines += self.target.scalars(self._statements(section.scalars, "0"))
            if i + 1 < len(kernel.sections):
                lines += self.target.barrier()
        return lines

    def _name(self, value: Value) -> str:
        return self.names.setdefault(value, f"v{len(self.names)}")

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
            given = element(s.memory, feature, s.offset)
        else:
            given = expression(s.op, {v: self._name(v) for v in s.op.values}, feature)
        return f"const {own} {self._name(value)} = {given};"


def pointer(memory: Memory) -> str:
    """The name of the pointer to a row."""
    if memory.location is None:
        return f"scratch{memory.scratch}"
    return f"{memory.location.buffer.name}{'_after' * memory.location.after}"


def element(memory: Memory, feature: str, offset: int) -> str:
    """The expression of a feature in memory."""
    index = f"{feature} + {offset}" if offset and feature != "0" else str(offset or feature)
    return f"{pointer(memory)}[{index}]"


@dataclass(frozen=True)
class Access:
    """One load or store of a kernel.

    Attributes:
        size: the iterations of its loop; 1 outside of loops.
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
    return [
        Access(s.memory, size, s.offset, isinstance(s, Store))
        for size, statements in loops
        for s in statements
        if isinstance(s, Load | Store)
    ]


def memories(kernel: Kernel) -> list[Memory]:
    """The distinct memories that a kernel reads or writes."""
    return list({pointer(a.memory): a.memory for a in accesses(kernel)}.values())
