"""Finds the axes along which the features of a step's values lie.

A row of a program is flat; what reads it by axes says how its features lie. Elementwise ops have
the axes of their operands. So axes that ops share are one axis::

    einsum("hk,hv->hkv", k, v) + S      S has the axes h, k, v; those of k are the first two
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hoconv.recurrent.ir.axes import layout
from hoconv.recurrent.ir.kinds import BY_AXES, PRODUCTS, SOURCES, is_elementwise
from hoconv.recurrent.ir.program import Op, Program, Value, flat


@dataclass(frozen=True, eq=False)
class Axis:
    """An axis of values; they are compared by identity."""

    size: int


Axes = tuple[Axis, ...]


class NoAxes(Exception):
    """The features of a value do not lie along the same axes for all ops; says which op differs."""


def find_axes(program: Program) -> dict[Value, Axes]:
    """The axes of the values that a step reads and computes, the last one fastest. A value of one
    feature has none. A value is missing that no op reads or computes by axes.

    Raises:
        NoAxes: an op works on a whole row, takes the same features to lie along other axes, or two
            axes of a value are one.
    """
    found = _Axes()
    ops = list(flat(program.step))
    for op in ops:
        found.join(op)
    for state in program.states:
        found.same((state.value, state.next))
    for replay in program.replays:
        found.same((replay.value, replay.next))
    for op in ops:
        if op.kind in BY_AXES:
            found.read(op)
    return found.collect()


class _Axes:
    def __init__(self) -> None:
        # Of values that have the same axes, one stands for all; likewise of axes.
        self.alike: dict[Value, Value] = {}
        self.one: dict[Axis, Axis] = {}
        self.lists: dict[Value, Axes] = {}

    def join(self, op: Op) -> None:
        """Notes which values have the same axes."""
        if op.kind in BY_AXES or op.kind in ("slice", "cat", *SOURCES, *PRODUCTS):
            self.same((op.result,))
        elif is_elementwise(op.kind):
            self.same((*op.values, op.result))
        elif op.kind == "sum":
            self.same(op.values)
        elif any(v.type.size > 1 for v in op.values):
            raise NoAxes(f"{op.kind} of a whole row")

    def same(self, values: Iterable[Value]) -> None:
        wide = [v for v in values if v.type.size > 1]
        for value in wide:
            self.alike[self.find(value)] = self.find(wide[0])

    def find(self, value: Value) -> Value:
        while (above := self.alike.setdefault(value, value)) is not value:
            value = above
        return value

    def find_axis(self, axis: Axis) -> Axis:
        while (above := self.one.setdefault(axis, axis)) is not axis:
            axis = above
        return axis

    def read(self, op: Op) -> None:
        axes = layout(op)
        own = [Axis(size) for size in axes.sizes]
        lists = (*axes.operands, axes.result)
        for value, of in zip((*op.values, op.result), lists, strict=True):
            if value.type.size > 1:
                self.bind(op, self.find(value), [own[axis] for axis in of])

    def bind(self, op: Op, value: Value, axes: Sequence[Axis]) -> None:
        known = self.lists.setdefault(value, tuple(axes))
        if [a.size for a in known] != [a.size for a in axes]:
            shapes = " and ".join(str(tuple(a.size for a in each)) for each in (known, axes))
            raise NoAxes(f"{op.kind} of a value that lies along the axes {shapes}")
        for a, b in zip(known, axes, strict=True):
            self.one[self.find_axis(b)] = self.find_axis(a)

    def collect(self) -> dict[Value, Axes]:
        found: dict[Value, Axes] = {}
        for value in self.alike:
            axes = self.lists.get(self.find(value))
            if axes is not None:
                found[value] = tuple(map(self.find_axis, axes))
                if len({*found[value]}) < len(axes):
                    raise NoAxes("a value that has an axis twice")
        return found
