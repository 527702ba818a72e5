"""Writes a kernel of rows whose features form groups: those of a head, say.

Where ops relate features of the same group alone, lanes of a warp compute a group of a row, and no
group waits for another. A lane keeps its features in registers: of n features in a group, L lanes
have features lane, lane + L, lane + 2 L, ... What a group has one number of, all of its lanes
compute; a sum over a group is one of lanes.

A value has a number for each group, for each feature of a group, or both: then those of a group are
neighbours. Steps have no states, so that the rows of all steps are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hoconv.recurrent.codegen.expressions import TYPES, expression, literal
from hoconv.recurrent.codegen.single_kernel import indent
from hoconv.recurrent.codegen.storage import Location, Storage
from hoconv.recurrent.ir.axes import layout
from hoconv.recurrent.ir.functions import FUNCTIONS, Reduction
from hoconv.recurrent.ir.kinds import is_elementwise, is_reduction
from hoconv.recurrent.ir.program import Op, Program, Value, flat

_WARP = 32
_MOST_FEATURES = 256  # of a group: a lane has registers for eight features of some values
_THREADS = 256  # of a block, about


@dataclass(frozen=True)
class Groups:
    """The groups of a row.

    Attributes:
        count: of a row.
        size: the features of each.
    """

    count: int
    size: int

    @property
    def lanes(self) -> int:
        """Returns how many lanes share a group."""
        return min(_WARP, 1 << (self.size - 1).bit_length())

    @property
    def rows(self) -> int:
        """Returns how many rows a block computes; of one with many groups, several blocks compute
        some each."""
        return max(1, _THREADS // (self.count * self.lanes))

    def axes_of(self, value: Value) -> str | None:
        """Returns of what a value has a number each: ``g`` groups, ``i`` features of a group, both
        or neither; None if of something else."""
        # Of a single group, the features are those of a row. The last of equal sizes counts.
        sizes = {self.count * self.size: "gi", self.size: "i", self.count: "g", 1: ""}
        return sizes.get(value.type.size)


def find_groups(program: Program) -> Groups | None:
    """Finds the groups of the features of a program without states; None if ops relate others."""
    ops = list(flat(program.step))
    sums = [layout(op).sizes for op in ops if op.kind in ("einsum", "largest")]
    if not sums or not 1 <= len(sums[0]) <= 2:
        return None
    count, size = (1, *sums[0])[-2:]  # without an axis of groups, a row is one
    groups = Groups(count, size)
    if not 1 < size <= _MOST_FEATURES:
        return None
    made = {op.result: op for op in ops}
    return groups if all(_stays_in_group(op, groups, made) for op in ops) else None


def _stays_in_group(op: Op, groups: Groups, made: dict[Value, Op]) -> bool:
    """Returns whether no number of the result depends on those of other groups."""
    axes = [groups.axes_of(v) for v in op.values]
    own = groups.axes_of(op.result)
    if any(v in made and made[v].kind == "cat" for v in op.values):
        return False
    if op.kind == "cat":
        return None not in axes
    if own is None:
        return False
    if op.kind == "slice":
        return op.values[0] not in made
    if None in axes:
        return False
    if op.kind in ("arrange", "einsum", "largest"):
        of = layout(op)
        named = {(1, groups.size): "gi", (groups.size,): "i", (groups.count, groups.size): "gi"}
        if (names := named.get(of.sizes)) is None:
            return False
        found = ["".join(names[axis] for axis in each) for each in (*of.operands, of.result)]
        if groups.count == 1:
            found = [each.replace("g", "") for each in found]
        return found == [*axes, own] and set("".join(found[:-1])) - set(own) <= {"i"}
    if is_reduction(op.kind):
        return groups.count == 1 and axes == ["i"]
    return op.kind == "fill" or (is_elementwise(op.kind) and set(axes) <= {own, ""})


def write_groups(
    program: Program, storage: Storage, groups: Groups, name: str
) -> tuple[int, int, int, list[str]]:
    """Writes the kernel; its grid is (T * B / the rows of a block, blocks).

    Returns:
        The rows of a block, the blocks, the threads of each, and the lines.
    """
    lanes = groups.count * groups.lanes * groups.rows
    threads = min(_THREADS, -(-lanes // _WARP) * _WARP)
    blocks = -(-lanes // threads)
    writer = _Writer(groups, storage)
    for op in flat(program.step):
        writer.place(op)
    lines = [
        f'extern "C" __global__ void __launch_bounds__({threads})',
        f"{name}(const Call c) {{",
        f"  constexpr int LANES = WARP < {groups.lanes} ? WARP : {groups.lanes};",
        f"  constexpr int SIZE = {groups.size}, EACH = (SIZE + LANES - 1) / LANES;",
        "  const int64_t number = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;",
        "  const int lane = number % LANES;",
        f"  const int64_t group = number / LANES, g = group % {groups.count};",
        f"  const int64_t row = int64_t{{blockIdx.x}} * {groups.rows} + group / {groups.count};",
        f"  const bool there = group < {groups.count * groups.rows} && row < c.T * c.B;",
        *indent(2, writer.loads, writer.lines),
        "}",
    ]
    return groups.rows, blocks, threads, lines


@dataclass
class _Writer:
    """Writes ops; what is read of memory comes first."""

    groups: Groups
    storage: Storage
    loads: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    names: dict[Value, str] = field(default_factory=dict)

    def place(self, op: Op) -> None:
        result = op.result
        if op.kind == "cat":
            for at in self.storage.stores.get(result, ()):
                start = 0
                for part in op.values:
                    self._store(part, at, start)
                    start += part.type.size
            return
        if op.kind == "slice":
            self._load(result, self.storage.homes[op.values[0]], int(op.attrs[0]))
        else:
            self._compute(op)
        for at in self.storage.stores.get(result, ()):
            self._store(result, at)

    def _compute(self, op: Op) -> None:
        names = {v: self._read(v) for v in op.values}
        name = self._declare(op.result, self.lines)
        if op.kind in ("einsum", "arrange", "largest") or is_reduction(op.kind):
            given = " * ".join(names[v] for v in op.values)
            summed = {a for v in op.values for a in self._axes(v)} - {*self._axes(op.result)}
            if summed:
                self.lines += self._reduce(op, name, given)
                return
        else:
            given = expression(op, names, "0")
        statement = f"{self._element(op.result)} = {given};"
        self.lines += self._for_features(statement) if "i" in self._axes(op.result) else [statement]

    def _reduce(self, op: Op, name: str, given: str) -> Iterator[str]:
        """Sums over the features of a group."""
        kind = {"einsum": "sum", "largest": "max"}.get(op.kind, op.kind)
        entry, own = FUNCTIONS[kind], op.result.type.dtype
        assert isinstance(entry, Reduction), op.kind
        combine = entry.c.format
        yield f"{name} = {literal(entry.identity, own)};"
        yield from self._for_features(f"if (lane + k * LANES < SIZE) {name} = "
                                      f"{combine(name, given)};")  # fmt: skip
        yield (
            f"{name} = warp_reduce<LANES>({name}, []({TYPES[own]} a, {TYPES[own]} b) "
            f"{{ return {combine('a', 'b')}; }});"
        )

    def _load(self, value: Value, at: Location, offset: int = 0) -> None:
        name = self._declare(value, self.loads)
        axes, index = self._axes(value), self._index(value, at, offset)
        if "i" in axes:
            self.loads += self._for_features(
                f"if (there && lane + k * LANES < SIZE) {name}[k] = c.{index};"
            )
        else:
            self.loads.append(f"if (there) {name} = c.{index};")

    def _store(self, value: Value, at: Location, offset: int = 0) -> None:
        element, axes = self._read(value), self._axes(value)
        conditions = ["there", *["g == 0"] * ("g" not in axes and self.groups.count > 1)]
        conditions.append("lane + k * LANES < SIZE" if "i" in axes else "lane == 0")
        index = self._index(value, at, offset)
        statement = f"if ({' && '.join(conditions)}) c.{index} = {element};"
        self.lines += self._for_features(statement) if "i" in axes else [statement]

    def _index(self, value: Value, at: Location, offset: int) -> str:
        """The element of a buffer that has a feature of a value."""
        axes = self._axes(value)
        terms = [] if at.buffer.kind == "once" else [f"row * {at.buffer.type.size}"]
        terms += [str(offset)] * bool(offset)
        if "g" in axes:
            terms.append("g * SIZE" if "i" in axes else "g")
        terms += ["lane + k * LANES"] * ("i" in axes)
        return f"{at.buffer.name}[{' + '.join(terms) or '0'}]"

    def _axes(self, value: Value) -> str:
        axes = self.groups.axes_of(value)
        assert axes is not None
        return axes

    def _read(self, value: Value) -> str:
        """The expression of a value, which is loaded if it is not there yet."""
        if value not in self.names:
            self._load(value, self.storage.homes[value])
        return self._element(value)

    def _element(self, value: Value) -> str:
        return self.names[value] + "[k]" * ("i" in self._axes(value))

    def _declare(self, value: Value, lines: list[str]) -> str:
        name = self.names[value] = f"v{len(self.names)}"
        many = "[EACH]" * ("i" in self._axes(value))
        lines.append(f"{TYPES[value.type.dtype]} {name}{many} = {{}};")
        return name

    @staticmethod
    def _for_features(statement: str) -> Sequence[str]:
        return ["#pragma unroll", f"for (int k = 0; k < EACH; ++k) {statement}"]
