"""Finds the axes of a matrix state along which its columns do not depend on each other.

The steps of such a program sum over keys, within a column, as much as they like. What they sum over
columns or heads is only written, so that it can be summed in parts: no column waits for another.
If there are no such axes, heads at least may be independent: then one block of threads has all
columns of a head.
Which axis is which follows from the ops. Of a gradient that may be other axes than forward.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from hoconv.recurrent.ir.kinds import BY_AXES, PRODUCTS
from hoconv.recurrent.ir.program import Op, Program, Value, find_operands, flat
from hoconv.recurrent.passes.matrix.axes import Axes, Axis, NoAxes, find_axes
from hoconv.recurrent.passes.matrix.tiling import MOST_KEYS


@dataclass(frozen=True, eq=False)
class Columns:
    """The axes of a program's states.

    Attributes:
        heads: an axis along which nothing is summed in a step; None where there is none.
        keys: the axis along which a step sums.
        columns: the axis along which the states are independent.
        of: the axes of the values of a step; a value of one feature has none.
        shared: the sums over columns of which a state is computed, so that one block of threads has
            to have all columns of a head.
        late: the results of other sums over columns or heads, and what is computed from them.
    """

    heads: Axis | None
    keys: Axis
    columns: Axis
    of: Mapping[Value, Axes]
    shared: frozenset[Value] = field(default=frozenset())
    late: frozenset[Value] = field(default=frozenset())

    def axes(self, value: Value) -> Axes:
        """The axes of a value; none of one feature."""
        return self.of.get(value, ())

    def is_matrix(self, value: Value) -> bool:
        """Returns whether a value lies along keys and columns."""
        return {self.keys, self.columns} <= {*self.axes(value)}

    def summed(self, op: Op) -> set[Axis]:
        """The axes along which an op sums."""
        if op.kind not in (*BY_AXES, "sum"):
            return set()
        return {axis for v in op.values for axis in self.axes(v)} - {*self.axes(op.result)}

    def sums_columns(self, op: Op) -> bool:
        """Returns whether an op sums over columns or heads."""
        return not self.summed(op) <= {self.keys}


def find_columns(program: Program) -> Columns | str:
    """Finds the columns of a program's states, or says in words why there are none."""
    try:
        of = find_axes(program)
    except NoAxes as error:
        return str(error)
    states = [s for s in program.states if len(of.get(s.value, ())) > 1]
    if not states:
        return "no state is a matrix"
    matrix = of[max(states, key=lambda s: s.value.type.size).value]
    ops = list(flat(program.step))
    if any(op.kind == "largest" for op in ops):
        return "it takes the largest along an axis"
    found = _choose(program, ops, matrix, of, shares=False)
    if isinstance(found, str):
        found = _choose(program, ops, matrix, of, shares=True)
    return found


def _choose(
    program: Program, ops: list[Op], matrix: Axes, of: Mapping[Value, Axes], shares: bool
) -> Columns | str:
    """Chooses the axes for which the fewest sums are over columns, then those by which the fewest
    values are matrices, then the shorter keys.

    Args:
        shares: whether the states may be computed from sums over columns.
    """
    candidates: list[tuple[int, int, int, Columns]] = []
    reason = ""
    needed = [*(s.next for s in program.states), *(r.next for r in program.replays)]
    before = find_operands(ops, needed)
    for columns, keys in itertools.permutations(reversed(matrix), 2):
        heads = next((axis for axis in matrix if axis not in (columns, keys)), None)
        made = Columns(heads, keys, columns, of)
        over = [op for op in ops if made.sums_columns(op)]
        shared = frozenset(
            op.result
            for op in over
            if shares and op.result in before and heads not in made.summed(op)
        )
        late = _find_late(ops, made, shared)
        if any(v in late for v in needed):
            reason = reason or _explain(program, late)
        elif not (program.replays or any(keys in made.summed(op) for op in ops)):
            reason = reason or "no step sums along an axis of a state"
        elif keys.size > MOST_KEYS:
            reason = reason or f"{keys.size} keys are more than {MOST_KEYS}"
        else:
            both = sum(keys in axes and columns in axes for axes in of.values())
            made = Columns(heads, keys, columns, of, shared, frozenset(late))
            candidates.append((len(over), both, keys.size, made))
    return min(candidates, key=lambda each: each[:3])[3] if candidates else reason


def _find_late(ops: list[Op], columns: Columns, shared: Container[Value]) -> set[Value]:
    """Finds what is summed over columns or heads and not shared, what lies along other axes, and
    what is computed from such."""
    allowed = {columns.heads, columns.keys, columns.columns}
    late: set[Value] = set()
    for op in ops:
        known = _is_known(op, columns, allowed)
        late_sum = columns.sums_columns(op) and op.result not in shared
        if late_sum or not known or any(v in late for v in op.values):
            late.add(op.result)
    return late


def _is_known(op: Op, columns: Columns, allowed: set[Axis | None]) -> bool:
    """Returns whether an op computes along the axes of the states, from values that do."""
    if op.kind in ("cat", *PRODUCTS) or (
        op.kind == "slice" and op.values[0].type.rate != "sequence"
    ):
        return False
    loads = op.values[0].type.rate == "sequence" if op.kind in ("slice", "cast") else False
    read = (op.result,) if loads else (*op.values, op.result)
    lists = [columns.of.get(v) for v in read if v.type.size > 1]
    return all(axes is not None and allowed.issuperset(axes) for axes in lists)


def find_sums(ops: Iterable[Op], columns: Columns) -> dict[Value, frozenset[Axis]]:
    """The values of a step that blocks of threads compute in parts, to be added, and the axes along
    which they sum: sums over columns or heads, and what adds such sums."""
    found: dict[Value, frozenset[Axis]] = {}
    for op in ops:
        summed = [found.get(v) for v in op.values]
        late = op.result in columns.late and not any(v in columns.late for v in op.values)
        if late and columns.sums_columns(op):
            found[op.result] = frozenset(columns.summed(op))
        elif _adds(op) and len({*summed}) == 1 and summed[0] is not None:
            found[op.result] = summed[0]
    return found


def _adds(op: Op) -> bool:
    """Returns whether an op adds values, and no number."""
    return op.kind in ("add", "sub", "neg") and len(op.values) == len(op.inputs)


def _explain(program: Program, late: set[Value]) -> str:
    names = ", ".join(s.name for s in program.states if s.next in late)
    return f"features of {names or 'a state'} depend on others along every axis"


def find_stateless(program: Program) -> set[Value]:
    """The values of a step that depend on no state, and draw nothing."""
    stateful = {s.value for s in program.states} | {r.value for r in program.replays}
    found: set[Value] = set()
    for op in flat(program.step):
        waits = any(v in stateful or (v.type.rate == "step" and v not in found) for v in op.values)
        if not waits and op.kind != "keep":
            found.add(op.result)
    return found
