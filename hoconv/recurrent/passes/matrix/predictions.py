"""Moves what scales predictions out of the steps. The delta rule compares a value with what the
state has for its key, a prediction; what a step writes is affine in it::

    S = S + einsum("k,v->kv", k, beta * (v - einsum("kv,k->v", S, k)))

is the same as, of rows that are computed before the loop ::

    S = S + einsum("k,v->kv", k, beta * v + einsum("kv,k->v", S, -beta * k))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hoconv.recurrent.ir.axes import Layout
from hoconv.recurrent.ir.kinds import BY_AXES
from hoconv.recurrent.ir.program import Op, Operand, Program, State, Type, Value, flat
from hoconv.recurrent.passes.matrix.axes import Axes
from hoconv.recurrent.passes.matrix.columns import Columns, find_columns, find_stateless
from hoconv.recurrent.passes.matrix.separate import separate


def move_predictions(program: Program) -> Program:
    """Returns an equal program without groups, whose states stay as they are where they are of
    another form."""
    program = separate(program)
    columns = find_columns(program)
    if isinstance(columns, str):
        return program
    for state in program.states:
        try:
            program = _Predictions(program, columns, state).run()
        except _Differs:
            continue
    return program


class _Differs(Exception):
    """A step is of another form."""


class _Predictions:
    """A state, and what a step writes to it.

    Attributes:
        made: the op of each value of a step.
        axes: of these values, and of new ones.
        base: the state that the outer product is added to.
        written: the operand of the outer product that waits for the state.
        ops: what computes the new rows.
    """

    def __init__(self, program: Program, columns: Columns, state: State) -> None:
        self.program = program
        self.columns = columns
        self.made = {op.result: op for op in flat(program.step)}
        self.axes = dict(columns.of)
        self.stateless = find_stateless(program)
        self.base, self.written = self._find_written(state)
        self.ops: list[Op] = []

    def run(self) -> Program:
        constant, key = self._split(self.written)
        if constant is None or key is None:
            return self.program
        prediction = self._make("einsum", (self.base, key), self.axes[self.written])
        self.ops.append(Op("add", (constant, prediction), self.written))
        step: list[Op] = []
        for op in flat(self.program.step):
            step += self.ops if op.result is self.written else [op]
        return replace(self.program, step=tuple(step))

    def _find_written(self, state: State) -> tuple[Value, Value]:
        total = self.made.get(state.next)
        if total is not None and total.kind == "add" and len(total.values) == 2:
            for product, base in (total.values, total.values[::-1]):
                op = self.made.get(product)
                if op is not None and op.kind == "einsum" and not self.columns.summed(op):
                    waits = [v for v in op.values if not self._is_row(v)]
                    if len(op.values) == 2 and len(waits) == 1:
                        return base, waits[0]
        raise _Differs

    def _is_row(self, value: Operand) -> bool:
        """Returns whether a value depends on no state."""
        return not isinstance(value, Value) or value.type.rate != "step" or value in self.stateless

    def _split(self, value: Operand) -> tuple[Value | None, Value | None]:
        """Returns what is added to a prediction, and the key of the prediction, whose sum a value
        is."""
        if isinstance(value, Value) and self._is_row(value):
            return value, None
        op = self.made.get(value) if isinstance(value, Value) else None
        if op is None:
            raise _Differs
        reads = op.kind == "einsum" and self.base in op.values and len(op.values) == 2
        if reads and self.columns.summed(op) == {self.columns.keys}:
            return None, op.values[1 - op.values.index(self.base)]
        if op.kind in ("add", "sub", "neg"):
            constants, keys = zip(*map(self._split, op.inputs), strict=True)
            return self._add(op.kind, constants), self._add(op.kind, keys)
        if op.kind in ("mul", "where"):
            rows = [i for i in op.inputs if self._is_row(i)]
            waiting = [i for i in op.inputs if not self._is_row(i)]
            if len(waiting) == 1:
                constant, key = self._split(waiting[0])
                return self._scale(op, rows, constant), self._scale(op, rows, key)
        raise _Differs

    def _add(self, kind: str, terms: Sequence[Value | None]) -> Value | None:
        """Returns the sum, difference or negative of those terms that there are."""
        there = [t for t in terms if t is not None]
        if kind == "sub" and there == [terms[1]]:
            kind = "neg"
        if not there or (len(there) == 1 and kind != "neg"):
            return there[0] if there else None
        axes = {self.axes.get(t) for t in there}
        if len(axes) > 1:
            raise _Differs
        return self._make(kind, there, self.axes.get(there[0], ()))

    def _scale(self, op: Op, rows: Sequence[Operand], of: Value | None) -> Value | None:
        """Returns a row times another, or a row where a condition holds, and zero elsewhere."""
        if of is None:
            return None
        if op.kind == "where":
            condition, _, otherwise = op.inputs
            if otherwise != 0.0 or rows[0] is not condition:
                raise _Differs
        by, axes = rows[0], self.axes.get(of, ())
        if isinstance(by, Value) and by.type.size > 1 and {*self.axes[by]} != {*axes}:
            repeat = self.made.get(by)
            if repeat is None or repeat.kind != "arrange":
                raise _Differs
            by = repeat.values[0]
            own = self.axes.get(by, ())
            if self.columns.columns in own:  # it scales columns, each otherwise
                raise _Differs
            axes = (*(axis for axis in own if axis not in axes), *axes)
            by, of = self._repeat(by, axes), self._repeat(of, axes)
        inputs = (by, of, 0.0) if op.kind == "where" else (by, of)
        return self._make(op.kind, inputs, axes)

    def _repeat(self, value: Value, axes: Axes) -> Value:
        if value.type.size == 1 or self.axes[value] == axes:
            return value
        return self._make("arrange", (value,), axes)

    def _make(self, kind: str, inputs: Sequence[Operand], axes: Axes) -> Value:
        """Adds an op, by axes or elementwise, whose result lies along some axes."""
        values = [i for i in inputs if isinstance(i, Value)]
        attrs: tuple[int, ...] = ()
        if kind in BY_AXES:
            of = [self.axes.get(v, ()) for v in values]
            every = [*dict.fromkeys(axis for each in (*of, axes) for axis in each)]
            places = [tuple(map(every.index, each)) for each in (*of, axes)]
            sizes = tuple(axis.size for axis in every)
            attrs = Layout(sizes, tuple(places[:-1]), places[-1]).attrs
        size = math.prod(axis.size for axis in axes)
        result = Value(Type("step", (size,), values[-1].type.dtype))
        self.axes[result] = axes
        self.ops.append(Op(kind, tuple(inputs), result, attrs))
        return result
