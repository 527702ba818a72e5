"""Brings the steps of a matrix state to one form, of many ways to write them::

    S = d * S + outer(k, c + S^T p)

d, k, c and p depend on no state, so they are computed before the loop. Without p this is a state
that decays and takes outer products; with it, a delta rule, which compares a value with what the
state has for its key::

    S = S + outer(k, beta * (v - S^T k))         c = beta * v    p = -beta * k
    S = d * S; S = S + outer(k, v - S^T k)       c = v           p = -d * k
    S = where(valid, S + outer(k, v), S)         k = where(valid, k, 0), likewise v

The last one may be a step past the end of its sequence. Padding may hold anything: no row of it is
read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hoconv.recurrent.ir.axes import Layout
from hoconv.recurrent.ir.kinds import BY_AXES
from hoconv.recurrent.ir.program import Op, Operand, Program, State, Type, Value, flat, step_outputs
from hoconv.recurrent.passes.matrix.axes import Axes, Axis
from hoconv.recurrent.passes.matrix.columns import Columns, find_columns, find_stateless
from hoconv.recurrent.passes.matrix.prepare import repeat_in_step
from hoconv.recurrent.passes.matrix.separate import separate
from hoconv.recurrent.passes.rewrite import replace_outputs, substitute


def normalize(program: Program) -> Program:
    """Returns an equal program without groups, whose states stay as they are where they are of
    another form."""
    program = separate(repeat_in_step(program))
    columns = find_columns(program)
    if isinstance(columns, str):
        return program
    for state in program.states:
        try:
            program = _Normal(program, columns, state).run()
        except _Differs:
            continue
    return program


class _Differs(Exception):
    """A step is of another form."""


@dataclass(frozen=True)
class _Vector:
    """A value along columns, ``constant + S^T key``; either may be missing, and is zero then."""

    constant: Value | None = None
    key: Value | None = None


@dataclass(frozen=True)
class _Matrix:
    """A matrix, ``decay * S`` and outer products of keys and vectors. The decay is a number, or a
    row along heads and keys."""

    decay: Operand
    written: tuple[tuple[Operand, _Vector], ...] = ()


class _Normal:
    """A state, and the forms of the values that a step computes of it.

    Attributes:
        made: the op of each value of a step.
        axes: of these values, and of new ones.
        ops: the new ones; known: their results, by kind, operands and axes.
        before: those of them that precede the loop.
    """

    def __init__(self, program: Program, columns: Columns, state: State) -> None:
        self.program = program
        self.columns = columns
        self.state = state
        self.made = {op.result: op for op in flat(program.step)}
        self.axes = dict(columns.of)
        self.stateless = find_stateless(program)
        self.outputs = step_outputs(program)
        self.ops: list[Op] = []
        self.known: dict[tuple[Any, ...], Value] = {}
        self.before: list[Op] = []
        self.find_matrix = functools.cache(self._find_matrix)
        self.made.update((op.result, self._contract(op)) for op in flat(program.step))

    def run(self) -> Program:
        S, following = self.state.value, self.state.next
        form = self.find_matrix(following)
        vectors: dict[Operand, list[_Vector]] = {}
        for key, vector in form.written:
            vectors.setdefault(key, []).append(vector)
        if len(vectors) != 1:
            raise _Differs
        ((key, several),) = vectors.items()
        vector = functools.reduce(functools.partial(self._add_vectors, "add"), several)
        written = vector.constant
        if written is None or not isinstance(key, Value):
            raise _Differs
        if vector.key is not None:
            over = tuple(axis for axis in self.axes[S] if axis is not self.columns.keys)
            if {*self.axes.get(written, ())} == {*over}:
                over = self.axes[written]
            prediction = self._add_op("einsum", (S, vector.key), over)
            written = self._make_wide("add", (written, prediction))
        product = self._add_op("einsum", (key, written), self.axes[S])
        total = self._add_op("add", (self._decay(form.decay), product), self.axes[S])
        values = {following: total}
        step = [self._read(op, total) or substitute(op, values) for op in self.made.values()]
        before = (*flat(self.program.before), *self.before)
        program = replace(self.program, before=before, step=_sort((*step, *self.ops)))
        return replace_outputs(program, values)

    def _contract(self, op: Op) -> Op:
        """Returns a sum along keys of a matrix, times a row that is repeated, as one op."""
        product = self.made.get(op.values[0]) if op.kind == "einsum" else None
        if product is None or product.kind != "mul" or len(op.values) != 1:
            return op
        if self.columns.summed(op) == {self.columns.keys}:
            for row, matrix in (product.values, product.values[::-1]):
                source = self._find_source(row)
                if self._is_along(source, self.columns.keys, self.columns.columns):
                    return self._make("einsum", (matrix, source), op.result)
        return op

    def _find_source(self, value: Value) -> Value:
        """Returns what an op repeats, or the value itself."""
        op = self.made.get(value)
        return op.values[0] if op is not None and op.kind == "arrange" else value

    def _is_along(self, value: Value, axis: Axis, not_along: Axis) -> bool:
        axes = self.axes.get(value, ())
        return axis in axes and not_along not in axes

    def _decay(self, decay: Operand) -> Value:
        """Returns the state, scaled."""
        S = self.state.value
        if decay == 1.0:
            return S
        if not isinstance(decay, Value):
            number = Value(Type("once", (1,), S.type.dtype))
            self.before.append(Op("fill", (), number, (decay, 1)))
            decay = number
        return self._add_op("mul", (self._repeat(decay, self.axes[S]), S), self.axes[S])

    def _read(self, op: Op, total: Value) -> Op | None:
        """Returns a read of the next state, or of the state, in place of one that valid steps alone
        see, before others are masked; None if an op is none."""
        mask, S = self.made[self.state.next], self.state.value
        if mask.kind != "where" or mask.inputs[2] is not S:
            return None
        valid, grown, _ = mask.inputs
        state = next((v for v in op.values if v in (grown, S)), None)
        if op.kind != "einsum" or state is None or len(op.values) != 2:
            return None
        if not isinstance(valid, Value) or not self._is_masked(op, valid):
            return None
        row = op.values[1 - op.values.index(state)]
        following = S if state is S else total
        return substitute(op, {state: following, row: self._mask(valid, row)})

    def _is_masked(self, op: Op, valid: Value) -> bool:
        """Returns whether the result of an op is read of valid steps alone."""
        users = [user for user in self.made.values() if op.result in user.values]
        return op.result not in self.outputs and all(
            (user.kind == "where" and user.inputs[:2] == (valid, op.result))
            or self._is_masked(user, valid)
            for user in users
        )

    def _is_row(self, value: Operand) -> bool:
        """Returns whether a value depends on no state."""
        return not isinstance(value, Value) or value.type.rate != "step" or value in self.stateless

    def _divide(self, op: Op) -> tuple[Operand, Value]:
        """Returns the factor, or condition, of an op, and what it scales."""
        waiting = [i for i in op.inputs if isinstance(i, Value) and not self._is_row(i)]
        rows = [i for i in op.inputs if self._is_row(i)]
        if len(waiting) != 1 or len(rows) != len(op.inputs) - 1:
            raise _Differs
        if op.kind == "where" and (op.inputs[1] is not waiting[0] or op.inputs[2] != 0.0):
            raise _Differs
        return rows[0], waiting[0]

    def _find_matrix(self, value: Operand) -> _Matrix:
        if value is self.state.value:
            return _Matrix(1.0)
        op = self.made.get(value) if isinstance(value, Value) else None
        if op is None:
            raise _Differs
        if op.kind in ("add", "sub", "neg"):
            forms = [*map(self.find_matrix, op.inputs)]
            decays = [None if form.decay == 0.0 else form.decay for form in forms]
            decay = self._add(op.kind, decays)
            last = [(k, self._negate(v)) for k, v in forms[-1].written]
            written = [*forms[0].written, *last] if op.kind == "sub" else last
            if op.kind == "add":
                written = [each for form in forms for each in form.written]
            return _Matrix(0.0 if decay is None else decay, tuple(written))
        if op.kind == "arrange" and self.columns.keys not in self.axes.get(op.values[0], ()):
            return _Matrix(0.0, ((1.0, self._find_vector(op.values[0])),))
        if op.kind == "mul":
            for factor, scaled in (op.inputs, op.inputs[::-1]):
                if (by := self._find_row(factor)) is not None:
                    return self._scale_matrix(self.find_matrix(scaled), by)
        if op.kind == "where" and not self._is_row(op.inputs[1]):
            condition = self._find_row(op.inputs[0])
            form = self.find_matrix(op.inputs[1])
            if op.inputs[2] is not self.state.value or not isinstance(condition, Value):
                raise _Differs
            written = [(self._mask(condition, k), self._mask_vector(condition, v))
                       for k, v in form.written]  # fmt: skip
            if form.decay == 1.0:
                return _Matrix(1.0, tuple(written))
            decay = self._make_wide("where", (condition, form.decay, 1.0))
            return _Matrix(decay, tuple(written))
        if op.kind == "einsum" and len(op.values) == 2 and not self.columns.summed(op):
            keys, columns = self.columns.keys, self.columns.columns
            for row, other in (op.values, op.values[::-1]):
                if not self._is_row(row) or columns in self.axes.get(row, ()):
                    continue
                if self.columns.is_matrix(other):
                    return self._scale_matrix(self.find_matrix(other), row)
                if self._is_along(row, keys, columns):
                    return _Matrix(0.0, ((row, self._find_vector(other)),))
        raise _Differs

    def _find_vector(self, value: Value) -> _Vector:
        if self._is_row(value):
            return _Vector(value)
        op = self.made.get(value)
        if op is None:
            raise _Differs
        if op.kind in ("add", "sub"):
            first, second = (
                self._find_vector(i) if isinstance(i, Value) else _Vector() for i in op.inputs
            )
            if len(op.values) != 2:
                raise _Differs
            return self._add_vectors(op.kind, first, second)
        if op.kind == "neg":
            return self._negate(self._find_vector(op.values[0]))
        if op.kind in ("mul", "where"):
            by, scaled = self._divide(op)
            factor, vector = self._find_row(by), self._find_vector(scaled)
            if factor is not None and op.kind == "mul":
                return self._scale_vector(vector, factor)
            if isinstance(factor, Value):
                return self._mask_vector(factor, vector)
        if op.kind == "einsum" and self.columns.summed(op) == {self.columns.keys}:
            matrix = next((v for v in op.values if self.columns.is_matrix(v)), None)
            if matrix is not None and len(op.values) == 2:
                form = self.find_matrix(matrix)
                key = op.values[1 - op.values.index(matrix)]
                if not form.written and self._is_row(key):
                    return _Vector(None, self._value(key, form.decay))
        raise _Differs

    def _find_row(self, value: Operand) -> Operand | None:
        """Returns a number, or the row that an op repeats along columns; None for what is neither,
        or depends on a state."""
        if not isinstance(value, Value) or not self._is_row(value) or value.type.size == 1:
            return value if self._is_row(value) else None
        source = self._find_source(value)
        repeats = source is not value and self.columns.columns not in self.axes.get(source, ())
        return source if repeats else None

    def _add_vectors(self, kind: str, first: _Vector, second: _Vector) -> _Vector:
        return _Vector(
            self._add_rows(kind, first.constant, second.constant),
            self._add_rows(kind, first.key, second.key),
        )

    def _add_rows(self, kind: str, first: Value | None, second: Value | None) -> Value | None:
        total = self._add(kind, (first, second))
        assert total is None or isinstance(total, Value)
        return total

    def _negate(self, vector: _Vector) -> _Vector:
        return self._add_vectors("sub", _Vector(), vector)

    def _add(self, kind: str, terms: Sequence[Operand | None]) -> Operand | None:
        """Returns the sum, difference or negative of those terms that there are."""
        there = [t for t in terms if t is not None]
        if not there:
            return None
        if kind == "neg" or (kind == "sub" and terms[0] is None):
            return self._scale(there[0], -1.0)
        if len(there) == 1:
            return there[0]
        first, second = there
        if not isinstance(first, Value) and not isinstance(second, Value):
            return first + second if kind == "add" else first - second
        return self._make_wide(kind, there)

    def _scale(self, row: Operand, by: Operand) -> Operand:
        numbers = [x for x in (row, by) if not isinstance(x, Value)]
        if len(numbers) == 2:
            return numbers[0] * numbers[1]
        if 0.0 in numbers:
            return 0.0
        if 1.0 in numbers:
            return row if by == 1.0 else by
        if numbers == [-1.0]:
            value = row if isinstance(row, Value) else by
            assert isinstance(value, Value)
            return self._add_op("neg", (value,), self.axes.get(value, ()))
        return self._make_wide("mul", (by, row))

    def _scale_matrix(self, form: _Matrix, by: Operand) -> _Matrix:
        written = tuple(self._scale_written(*each, by) for each in form.written)
        return _Matrix(self._scale(form.decay, by), written)

    def _scale_written(self, key: Operand, vector: _Vector, by: Operand) -> tuple[Operand, _Vector]:
        """Scales an outer product: its key, by what differs from key to key."""
        if isinstance(by, Value) and self.columns.keys in self.axes.get(by, ()):
            return self._scale(key, by), vector
        return key, self._scale_vector(vector, by)

    def _scale_vector(self, vector: _Vector, by: Operand) -> _Vector:
        constant = vector.constant and self._value(vector.constant, by)
        return _Vector(constant, vector.key and self._value(vector.key, by))

    def _value(self, row: Value, by: Operand) -> Value:
        scaled = self._scale(row, by)
        if not isinstance(scaled, Value):
            raise _Differs
        return scaled

    def _mask(self, condition: Value, row: Operand) -> Value:
        if not isinstance(row, Value):  # a key of ones
            raise _Differs
        return self._make_wide("where", (condition, row, 0.0))

    def _mask_vector(self, condition: Value, vector: _Vector) -> _Vector:
        """Masks it, too: of a step that changes nothing it may be NaN."""
        if self.columns.keys in self.axes.get(condition, ()):
            raise _Differs
        constant = vector.constant and self._mask(condition, vector.constant)
        return _Vector(constant, vector.key and self._mask(condition, vector.key))

    def _make_wide(self, kind: str, inputs: Sequence[Operand]) -> Value:
        """Adds an elementwise op of rows, which are repeated along the axes that others have."""
        every = [self.axes.get(i, ()) for i in inputs if isinstance(i, Value)]
        axes = max(every, key=len)
        for each in every:
            axes = (*(axis for axis in each if axis not in axes), *axes)
        return self._add_op(
            kind, [self._repeat(i, axes) if isinstance(i, Value) else i for i in inputs], axes
        )

    def _repeat(self, value: Value, axes: Axes) -> Value:
        if value.type.size == 1 or self.axes[value] == axes:
            return value
        return self._add_op("arrange", (value,), axes)

    def _add_op(self, kind: str, inputs: Sequence[Operand], axes: Axes) -> Value:
        """Returns the result, which lies along some axes, of a new op or one that is there."""
        if (found := self.known.get((kind, *inputs, axes))) is not None:
            return found
        dtype = self.state.value.type.dtype
        if kind == "arrange" and isinstance(inputs[0], Value):
            dtype = inputs[0].type.dtype
        result = Value(Type("step", (math.prod(axis.size for axis in axes),), dtype))
        self.axes[result] = axes
        self.known[(kind, *inputs, axes)] = result
        self.ops.append(self._make(kind, inputs, result))
        return result

    def _make(self, kind: str, inputs: Sequence[Operand], result: Value) -> Op:
        """Returns an op, by axes or elementwise."""
        if kind not in BY_AXES:
            return Op(kind, tuple(inputs), result)
        values = [*(i for i in inputs if isinstance(i, Value)), result]
        of = [self.axes.get(v, ()) for v in values]
        every = [*dict.fromkeys(axis for each in of for axis in each)]
        *operands, own = (tuple(map(every.index, each)) for each in of)
        layout = Layout(tuple(axis.size for axis in every), tuple(operands), own)
        return Op(kind, tuple(inputs), result, layout.attrs)


def _sort(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Puts ops after those that compute what they read."""
    made = {op.result: op for op in ops}
    ordered: dict[Op, None] = {}

    def add(op: Op) -> None:
        if op in ordered:
            return
        for value in op.values:
            if value in made:
                add(made[value])
        ordered[op] = None

    for op in made.values():
        add(op)
    return tuple(ordered)
