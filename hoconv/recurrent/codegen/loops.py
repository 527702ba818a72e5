"""Lowers a group of ops to loops over the features of a row, for any target.

A kernel is a sequence of sections. A section has one loop for each vector length, and then scalars:
values of one feature. An op that reads the result of a reduction, or another feature of a vector
than the one it computes, goes to a later section. A vector that a later section reads is spilled to
memory: to its home location, or to scratch memory of the row. An op that reads its operands by axes
is a loop nest of its own, from memory to memory. What only repeats features that are in memory
before the kernel can be read in a loop, at an index that is computed: targets may ask for that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from hoconv.recurrent.codegen.storage import Location, Storage
from hoconv.recurrent.ir.axes import layout
from hoconv.recurrent.ir.kinds import BY_AXES, is_reduction
from hoconv.recurrent.ir.program import Group, Op, Type, Value

_ALIGNMENT = 64  # bytes: vectors in scratch start at multiples of the widest vector register


@dataclass(frozen=True)
class Memory:
    """The memory of a value's rows: a location, or the scratch of the row.

    Attributes:
        number, start: of scratch: which of the kernel's, and its offset in bytes.
    """

    location: Location | None
    type: Type
    number: int = 0
    start: int = 0


@dataclass(frozen=True, eq=False)
class Load:
    """Reads the feature at an offset from the loop's index.

    Attributes:
        repeat: of a value that repeats others, as :attr:`hoconv.recurrent.ir.axes.Layout.repeat`.
    """

    value: Value
    memory: Memory
    offset: int = 0
    repeat: tuple[int, int] | None = None

    def index(self, feature: str) -> str:
        """The index of what is read for a feature of the loop, without the offset."""
        return feature if self.repeat is None else "{} / {} % {}".format(feature, *self.repeat)


@dataclass(frozen=True, eq=False)
class Compute:
    """Computes an elementwise op."""

    op: Op


@dataclass(frozen=True, eq=False)
class Reduce:
    """Accumulates a reduction: initialised before the loop, known after it."""

    op: Op


@dataclass(frozen=True, eq=False)
class Store:
    """Writes the feature at an offset from the loop's index."""

    value: Value
    memory: Memory
    offset: int = 0


Statement = Load | Compute | Reduce | Store


def repeats(s: Statement) -> bool:
    """Returns whether a statement reads other features than that of its loop."""
    return isinstance(s, Load) and s.repeat is not None


@dataclass(frozen=True, eq=False)
class Nest:
    """Computes an op that reads its operands by axes.

    Attributes:
        operands: the memory of each operand; None of one that is a scalar, in a register.
        places: where the result is written.
    """

    op: Op
    operands: tuple[Memory | None, ...]
    places: tuple[Memory, ...]


@dataclass
class Section:
    """Loops by the number of their iterations and loop nests, then scalars."""

    loops: dict[int, list[Statement]] = field(default_factory=lambda: defaultdict(list))
    nests: list[Nest] = field(default_factory=list)
    scalars: list[Statement] = field(default_factory=list)


@dataclass
class Kernel:
    """The loops over one row. `first` has the scalars that are computed before all sections."""

    first: list[Statement]
    sections: list[Section]
    scratch_bytes: int


def lower(
    group: Group, storage: Storage, copies: Sequence[Value] = (), indexed: bool = False
) -> Kernel:
    """Lowers a group; its kernel also stores `copies`, values that it does not compute.

    Args:
        indexed: whether loops read what is repeated at an index that they compute.
    """
    return _Lowering(group, storage, copies, indexed).kernel


class _Lowering:
    def __init__(
        self, group: Group, storage: Storage, copies: Sequence[Value], indexed: bool
    ) -> None:
        self.storage = storage
        self.made = {op.result: op for op in group.ops}
        self.section: dict[Value, int] = {}
        self.first: list[Statement] = []
        self.sections: list[Section] = []
        self.scratch: dict[Value, Memory] = {}
        self.scratch_bytes = 0
        self.loaded: set[tuple] = set()
        self.repeated: dict[Value, Load] = {}
        if indexed:
            found = map(self._find_repeated, group.ops)
            self.repeated = {load.value: load for load in found if load is not None}
        for op in group.ops:
            self.section[op.result] = self._section(op)
        read = {v for op in group.ops for v in self._read(op)}
        self.late = {v for op in group.ops for v in self._read(op) if self._from_memory(v, op)}
        for op in group.ops:
            if op.kind != "slice" or op.result in read or self.storage.stores.get(op.result):
                self._place(op)
        for value in copies:
            statements = self._loop(0, value) if value.type.size > 1 else self.first
            statements.append(Load(value, Memory(storage.homes[value], value.type)))
            self._store(value, statements)
        self.kernel = Kernel(self.first, self.sections, self.scratch_bytes)

    def _find_repeated(self, op: Op) -> Load | None:
        """Finds the load of an op that only repeats what is in memory before the kernel."""
        if op.kind != "arrange" or (repeat := layout(op).repeat) is None:
            return None
        (source,), offset = op.values, 0
        if source in self.made and self.made[source].kind == "slice":
            offset = int(self.made[source].attrs[0])
            (source,) = self.made[source].values
        if source in self.made:
            return None
        return Load(op.result, self._memory(source), offset, repeat)

    def _is_nest(self, op: Op) -> bool:
        return op.kind in BY_AXES and op.result not in self.repeated

    def _read(self, op: Op) -> tuple[Value, ...]:
        """Returns what an op reads in loops. What it repeats of a slice it reads from memory."""
        return () if op.result in self.repeated else op.values

    def _section(self, op: Op) -> int:
        """The section of an op; -1 for a scalar that is known before all sections."""
        row, nest = op.result.type.size > 1, self._is_nest(op)
        at = 0 if row or nest else -1
        for value in self._read(op):
            if value not in self.made:
                known = 0 if is_reduction(op.kind) and value.type.size > 1 else -1
            elif value.type.size == 1:
                known = self.section[value] + ((row and op.kind != "cat") or nest)
            else:
                known = self.section[value] + self._later(value, op)
            at = max(at, known)
        return at

    def _later(self, value: Value, op: Op) -> bool:
        """Returns whether an op can read a vector of this kernel only after the loop that computes
        it."""
        if op.kind == "slice":
            return op.result.type.size > 1  # scalars come after the loops
        return op.kind in BY_AXES or self._in_memory(value)

    def _in_memory(self, value: Value) -> bool:
        """Returns whether a vector of this kernel is in no register: it is put together in
        memory."""
        return self.made[value].kind == "cat" or self._is_nest(self.made[value])

    def _from_memory(self, value: Value, op: Op) -> bool:
        """Returns whether an op reads a vector of this kernel from memory instead of from a
        register."""
        if value not in self.made or value.type.size == 1:
            return False
        if op.kind in ("slice", *BY_AXES) or self._in_memory(value):
            return True
        return op.kind != "cat" and self.section[value] < self.section[op.result]

    def _memory(self, value: Value) -> Memory:
        if value in self.storage.homes:
            return Memory(self.storage.homes[value], value.type)
        if value not in self.scratch:
            self.scratch[value] = Memory(None, value.type, len(self.scratch), self.scratch_bytes)
            self.scratch_bytes += -(-value.type.row_bytes // _ALIGNMENT) * _ALIGNMENT
        return self.scratch[value]

    def _in_section(self, section: int) -> Section:
        while len(self.sections) <= section:
            self.sections.append(Section())
        return self.sections[section]

    def _loop(self, section: int, value: Value) -> list[Statement]:
        return self._in_section(section).loops[value.type.size]

    def _scalars(self, section: int) -> list[Statement]:
        return self.first if section < 0 else self._in_section(section).scalars

    def _ready(self, value: Value, section: int, op: Op | None = None) -> None:
        """Loads an operand, unless a register of the same loop or of the row holds it already."""
        scalar = value.type.size == 1
        if value in self.made and (op is None or not self._from_memory(value, op)):
            return
        statements = self.first if scalar else self._loop(section, value)
        key = (value, -1 if scalar else section)
        if key not in self.loaded:
            self.loaded.add(key)
            statements.append(Load(value, self._memory(value)))

    def _place(self, op: Op) -> None:
        result, section = op.result, self.section[op.result]
        if op.kind == "cat":
            self._place_cat(op)
            return
        if self._is_nest(op):
            self._place_nest(op)
            return
        row = result.type.size > 1
        statements = self._loop(section, result) if row else self._scalars(section)
        if op.result in self.repeated:
            statements.append(self.repeated[op.result])
        elif op.kind == "slice":
            source = op.values[0]
            if source.type.size == 1:
                self._ready(source, section)
                statements.append(Compute(op))
            else:
                statements.append(Load(result, self._memory(source), int(op.attrs[0])))
        elif is_reduction(op.kind) and op.values[0].type.size > 1:
            self._ready(op.values[0], section, op)
            self._loop(section, op.values[0]).append(Reduce(op))
        else:
            for value in op.values:
                self._ready(value, section, op)
            statements.append(Compute(op))
        self._store(result, statements)

    def _store(self, value: Value, statements: list[Statement]) -> None:
        places = [Memory(p, value.type) for p in self.storage.stores.get(value, ())]
        if value in self.late and value not in self.storage.homes:
            places.append(self._memory(value))
        statements += [Store(value, memory) for memory in places]

    def _place_cat(self, op: Op) -> None:
        """Stores each part of a ``cat`` at its offset, in the loop that computes the part."""
        result = op.result
        places = [Memory(p, result.type) for p in self.storage.stores.get(result, ())]
        if not places:
            places.append(self._memory(result))
        start = 0
        for part in op.values:
            at = self.section.get(part, -1)
            if part.type.size == 1:
                self._ready(part, at)
                statements = self._scalars(at)
            else:
                later = part in self.made and self._in_memory(part)
                at = max(at, 0) + later
                self._ready(part, at, op)
                statements = self._loop(at, part)
            statements += [Store(part, memory, start) for memory in places]
            start += part.type.size

    def _place_nest(self, op: Op) -> None:
        """Computes an op that reads its operands by axes, from memory to memory."""
        result, section = op.result, self.section[op.result]
        operands: list[Memory | None] = []
        for value in op.values:
            if value.type.size > 1:
                operands.append(self._memory(value))
            else:
                self._ready(value, section)
                operands.append(None)
        places = [Memory(p, result.type) for p in self.storage.stores.get(result, ())]
        places = places or [self._memory(result)]
        self._in_section(section).nests.append(Nest(op, tuple(operands), tuple(places)))
        if result.type.size == 1:
            self._scalars(section).append(Load(result, places[0]))
