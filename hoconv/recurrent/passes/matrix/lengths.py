"""Moves the ends of sequences from matrix states to the rows of their steps. A step past the end of
its sequence keeps its state; so does one whose decay is 1 and whose key is 0::

    S = where(valid, d * S + einsum("k,v->kv", k, v), S)

is the same as, of rows that are computed before the loop ::

    S = where(valid, d, 1) * S + einsum("k,v->kv", where(valid, k, 0), where(valid, v, 0))

Padding may hold anything: no row of it is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hoconv.recurrent.ir.program import Op, Program, State, Value, flat, step_outputs
from hoconv.recurrent.passes.rewrite import replace_outputs, substitute


def move_lengths(program: Program) -> Program:
    """Returns an equal program without groups, whose states stay masked where they are of another
    form."""
    for state in program.states:
        program = _Masked(program, state).run()
    return program


class _Masked:
    """A state, and how the steps compute its next value.

    Attributes:
        made: the op of each value, before the loop or in a step.
        outputs: the values that leave a step.
    """

    def __init__(self, program: Program, state: State) -> None:
        self.program = program
        self.state = state
        self.made = {op.result: op for op in flat((*program.before, *program.step))}
        self.outputs = step_outputs(program)

    def run(self) -> Program:
        state = self.state
        mask = self.made.get(state.next)
        if mask is None or mask.kind != "where" or mask.inputs[2] is not state.value:
            return self.program
        valid, total = mask.inputs[0], self._find(mask.inputs[1], "add")
        if not isinstance(valid, Value) or valid.type.size > 1:  # a row of it masks no other row
            return self.program
        if total is None or len(total.values) != 2:
            return self.program
        products = [op for v in total.values if (op := self._find(v, "einsum"))]
        reads = [op for op in self._users(total.result) if op is not mask]
        if len(products) != 1 or not all(self._is_sum(op, valid) for op in reads):
            return self.program
        (product,) = products
        scaled = total.values[1 - total.values.index(product.result)]
        decay = None if scaled is state.value else self._find_decay(scaled)
        if scaled is not state.value and decay is None:
            return self.program
        if total.result in self.outputs:
            return self.program
        changed: dict[Op, list[Op]] = {product: _with_rows(product, valid, product.values, 0.0)}
        for read in reads:
            rows = [v for v in read.values if v is not total.result]
            changed[read] = _with_rows(read, valid, rows, 0.0)
        if decay is not None:
            changed[self.made[scaled]] = self._with_decay(self.made[scaled], decay, valid)
        values = {mask.result: total.result}
        step: list[Op] = []
        for op in flat(self.program.step):
            if op is not mask:
                step += [substitute(each, values) for each in changed.get(op, [op])]
        return replace_outputs(replace(self.program, step=tuple(step)), values)

    def _find(self, value: object, kind: str) -> Op | None:
        op = self.made.get(value) if isinstance(value, Value) else None
        return op if op is not None and op.kind == kind else None

    def _find_decay(self, scaled: Value) -> Value | None:
        """Finds what the state is multiplied by, if that is a row."""
        op = self._find(scaled, "mul")
        if op is None or len(op.values) != 2 or self.state.value not in op.values:
            return None
        decay = op.values[1 - op.values.index(self.state.value)]
        return decay if decay.type.size == 1 or self._find(decay, "arrange") else None

    def _with_decay(self, scaled: Op, decay: Value, valid: Value) -> list[Op]:
        """Returns the op that scales the state, after those that make its decay 1 past the end."""
        repeat = self._find(decay, "arrange")
        if repeat is None:
            return _with_rows(scaled, valid, [decay], 1.0)
        row = repeat.values[0]
        (mask, again) = _with_rows(
            replace(repeat, result=Value(replace(decay.type, rate="step"))), valid, [row], 1.0
        )
        return [mask, again, substitute(scaled, {decay: again.result})]

    def _users(self, value: Value) -> list[Op]:
        return [op for op in flat(self.program.step) if value in op.values]

    def _is_sum(self, read: Op, valid: Value) -> bool:
        """Returns whether an op sums the state with a row, for valid steps alone."""
        return read.kind == "einsum" and len(read.values) == 2 and self._is_masked(read, valid)

    def _is_masked(self, op: Op, valid: Value) -> bool:
        """Returns whether the result of an op is read of valid steps alone."""
        return op.result not in self.outputs and all(
            (user.kind == "where" and user.inputs[:2] == (valid, op.result))
            or self._is_masked(user, valid)
            for user in self._users(op.result)
        )


def _with_rows(op: Op, valid: Value, rows: Iterable[Value], otherwise: float) -> list[Op]:
    """Returns an op, after those that mask some rows that it reads."""
    masked = {
        row: Op("where", (valid, row, otherwise), Value(replace(row.type, rate="step")))
        for row in dict.fromkeys(rows)
    }
    return [*masked.values(), substitute(op, {row: mask.result for row, mask in masked.items()})]
