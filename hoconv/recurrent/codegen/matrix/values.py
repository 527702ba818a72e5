"""Says what a thread has of the values of a step, and where these are in memory.

A block computes a slab of columns of a head of a row. A thread has `rows` keys and `own` columns of
a matrix, and of other values what belongs to these.
"""

from __future__ import annotations

from collections.abc import Iterable

from hoconv.recurrent.codegen.expressions import TYPES
from hoconv.recurrent.ir.program import Program, Value, Yield, flat
from hoconv.recurrent.passes.matrix.axes import Axis
from hoconv.recurrent.passes.matrix.columns import Columns, find_sums
from hoconv.recurrent.passes.matrix.tiling import Tiling


class Values:
    """Names the values of a program's steps, and writes loops over a thread's elements of them.

    Attributes:
        ops: of a step.
        names: the variables of values.
        heads: the number of heads that blocks divide.
        in_parts: the values that blocks sum in parts, with the axes along which they do.
        parts: the number of parts of each yield.
    """

    def __init__(self, program: Program, columns: Columns, tiling: Tiling) -> None:
        self.program = program
        self.columns = columns
        self.tiling = tiling
        self.ops = list(flat(program.step))
        self.names = {r.value: f"replayed{i}" for i, r in enumerate(program.replays)}
        self.heads = columns.heads.size if columns.heads else 1
        self.in_parts = find_sums(self.ops, columns)
        self.parts = {y: self._count_parts(y) for y in program.yields}

    def _has(self, value: Value, axis: Axis | None) -> bool:
        return axis is not None and axis in self.columns.axes(value)

    def _loops(self, value: Value) -> list[tuple[str, str]]:
        """The loops over a thread's elements of a value: index and count."""
        found = [("r", "ROWS")] * self._has(value, self.columns.keys)
        return found + [("c", "COLUMNS")] * self._has(value, self.columns.columns)

    def _shape(self, value: Value) -> str:
        return "".join(f"[{count}]" for _, count in self._loops(value))

    def _elements(self, value: Value) -> int:
        counts = {"ROWS": self.tiling.rows, "COLUMNS": self.tiling.own}
        found = 1
        for _, count in self._loops(value):
            found *= counts[count]
        return found

    def _element(self, value: Value) -> str:
        return self._name(value) + "".join(f"[{index}]" for index, _ in self._loops(value))

    def _name(self, value: Value) -> str:
        return self.names.setdefault(value, f"v{len(self.names)}")

    def _guard(self, value: Value) -> str:
        """The condition that a thread's element of a value exists."""
        guards = ["at.has_row(r)"] * self._has(value, self.columns.keys)
        guards += ["at.has_column(c)"] * self._has(value, self.columns.columns)
        return " && ".join(guards)

    def _strides(self, value: Value) -> dict[Axis, int]:
        strides, apart = {}, 1
        for axis in reversed(self.columns.axes(value)):
            strides[axis] = apart
            apart *= axis.size
        return strides

    def _head(self, value: Value) -> str:
        """The first feature of a head among those of a value."""
        heads = self.columns.heads
        return f"head * {self._strides(value)[heads]}" if heads and self._has(value, heads) else "0"

    def _feature(self, value: Value) -> str:
        """The number of a thread's element among the features of a value."""
        of = {
            self.columns.heads: "head",
            self.columns.keys: "at.row(r)",
            self.columns.columns: "(slab * SLAB + at.first + c)",
        }
        found = self._strides(value).items()
        return " + ".join(f"{of[a]} * {n}" if n > 1 else of[a] for a, n in found) or "0"

    def _writer(self, value: Value, heads: bool = False) -> str:
        """The condition that a thread is the one that writes an element of a value.

        Args:
            heads: whether a thread of each head does.
        """
        found = []
        if not self._has(value, self.columns.keys):
            found.append("at.key_lane == 0")
        if not self._has(value, self.columns.columns):
            found += ["slab == 0", "threadIdx.x < LANES"]
        if self.columns.heads and not (heads or self._has(value, self.columns.heads)):
            found.append("head == 0")
        return " && ".join(found) or "true"

    def _summed(self, source: Value) -> frozenset[Axis]:
        """The axes along which blocks sum a value in parts."""
        return self.in_parts.get(source, frozenset())

    def _count_parts(self, each: Yield) -> int:
        summed, parts = self._summed(each.source), 1
        if self.columns.columns in summed:
            parts *= self.tiling.slabs
        if self.columns.heads in summed:
            parts *= self.heads
        return parts

    def _sums_lanes(self, each: Yield) -> bool:
        return self.columns.columns in self._summed(each.source)

    def _part(self, each: Yield) -> str:
        summed, found = self._summed(each.source), []
        if self.columns.heads in summed:
            found.append(f"head * {self.tiling.slabs}" if self._sums_lanes(each) else "head")
        if self._sums_lanes(each):
            found.append("slab")
        return " + ".join(found) or "0"

    def _pitch(self, value: Value) -> int:
        """The numbers in shared memory for a value of a slab."""
        if self._has(value, self.columns.keys):
            return self.tiling.padded_keys
        return self.tiling.padded_slab if self._has(value, self.columns.columns) else 1

    def _count(self, value: Value) -> int:
        """The features of a value that a block reads or writes."""
        if self._has(value, self.columns.keys):
            return self.tiling.keys
        return self.tiling.slab if self._has(value, self.columns.columns) else 1

    def _for_each(self, value: Value, statement: str) -> list[str]:
        """A statement for each of a thread's elements of a value."""
        loops = [
            line
            for index, count in self._loops(value)
            for line in ("#pragma unroll", f"for (int {index} = 0; {index} < {count}; ++{index})")
        ]
        return [*loops, statement]

    def _declare(self, value: Value) -> str:
        return f"{TYPES[value.type.dtype]} {self._name(value)}{self._shape(value)};"

    def _read_elements(self, value: Value, given: str, declare: bool = True) -> Iterable[str]:
        guard = self._guard(value)
        if guard:
            given = f"{guard} ? {given} : {TYPES[value.type.dtype]}(0)"
        if declare:
            yield self._declare(value)
        yield from self._for_each(value, f"{self._element(value)} = {given};")
