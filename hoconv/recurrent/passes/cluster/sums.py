"""Rewrites the sums of rows whose summands wait for other sums, for targets where a sum is slow.

A sum is linear: that of a v + b w, where a and b have one feature, is a times the sum of v plus b
times that of w, and neither waits for a and b. The sum of the squared deviations from the mean,
which the variance is made of, becomes an op of its own, ``spread``: it is computed of the vector
itself, together with the vector's sum.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hoconv.recurrent.frontend import functions
from hoconv.recurrent.frontend.symbol import Builder, Symbol
from hoconv.recurrent.ir.kinds import PRODUCTS, is_elementwise, is_reduction
from hoconv.recurrent.ir.program import Op, Operand, Program, Value, flat, step_outputs

# spread(x, sum(x)): the sum of the squares of what the features of x deviate from their mean.
SPREAD = "spread"

_LINEAR: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "neg": operator.neg,
}  # fmt: skip


def shorten_sums(program: Program) -> Program:
    """A program whose steps give the same results after fewer sums and products in a row."""
    rewriting = _Rewriting(program)
    for op in flat(program.step):
        rewriting.add(op)
    wanted = set(step_outputs(program))
    step: list[Op] = []
    for op in reversed(rewriting.ops):
        if op.result in wanted:
            wanted.update(op.values)
            step.append(op)
    return replace(program, step=tuple(reversed(step)))


class _Rewriting:
    """A step, op by op.

    Attributes:
        ops: the rewritten step.
        depths: how many sums and products a value waits for.
        made: the op of each value.
        sums: the sum of each vector, where it is known.
    """

    def __init__(self, program: Program) -> None:
        self.ops: list[Op] = []
        self.depths: dict[Value, int] = defaultdict(int)
        self.made: dict[Value, Op] = {}
        self.sums: dict[Value, Value] = {}

    def add(self, op: Op) -> None:
        """Appends an op, or what computes its result sooner."""
        if op.kind == "sum" and op.values[0].type.size > 1:
            x = op.values[0]
            if total := self._find_total(x):
                deviating = self.made[total].values[0]
                self._append(Op(SPREAD, (deviating, total), op.result))
                return
            if self._sum_parts(op):
                return
            self.sums.setdefault(x, op.result)
        self._append(op)

    def _append(self, op: Op) -> None:
        self.ops.append(op)
        self.made[op.result] = op
        # A spread does not wait for the vector's sum: both are known at once.
        operands = op.values[:1] if op.kind == SPREAD else op.values
        reduces = is_reduction(op.kind) and op.values[0].type.size > 1
        waits = op.kind in (SPREAD, *PRODUCTS) or reduces
        self.depths[op.result] = max((self.depths[v] for v in operands), default=0) + waits

    def _find_total(self, x: Value) -> Value | None:
        """The sum of v, if x is the square of v less its mean."""
        square = self.made.get(x)
        if square is None or square.kind != "mul" or square.inputs[0] is not square.inputs[1]:
            return None
        deviation = self.made.get(square.values[0])
        if deviation is None or deviation.kind != "sub" or len(deviation.values) != 2:
            return None
        v, mean = deviation.values
        of_mean = self.made.get(mean)
        if of_mean is None or of_mean.kind != "mul" or 1 / v.type.size not in of_mean.inputs:
            return None
        (total,) = of_mean.values
        made = self.made.get(total)
        return total if made and made.kind == "sum" and made.values[0] is v else None

    def _sum_parts(self, op: Op) -> bool:
        """Computes a sum from the sums of other vectors if they are known sooner."""
        x = op.values[0]
        builder = Builder("step", op.result.type.dtype)
        parts: dict[Value, Symbol] = {}
        total = self._sum(x, builder, parts)
        latest = max((self.depths[part] for part in parts), default=0)
        if builder.before or not builder.ops or latest >= self.depths[x]:
            return False
        *others, last = builder.ops
        if not isinstance(total, Symbol) or total.value is not last.result:
            return False
        for made in (*others, Op(last.kind, last.inputs, op.result, last.attrs)):
            self._append(made)
            if made.kind == "sum":
                self.sums[made.values[0]] = made.result
        return True

    def _sum(self, x: Value, builder: Builder, parts: dict[Value, Symbol]) -> Any:
        """The sum of a vector: a symbol, or a number. Adds the vectors to sum to `parts`."""
        uniform = self._find_uniform(x, builder)
        if uniform is not None:
            return uniform * float(x.type.size)
        match self.made.get(x):
            case Op(kind="neg", inputs=(Value() as v,)):
                return -self._sum(v, builder, parts)
            case Op(kind="add" | "sub" as kind, inputs=(a, b)):
                total_a, total_b = (self._sum_operand(i, x, builder, parts) for i in (a, b))
                return _LINEAR[kind](total_a, total_b)
            case Op(kind="mul" | "div", inputs=(Value() as v, by)) if (
                scale := self._find_uniform(by, builder)
            ) is not None:
                return _LINEAR[self.made[x].kind](self._sum(v, builder, parts), scale)
            case Op(kind="mul", inputs=(by, Value() as v)) if (
                scale := self._find_uniform(by, builder)
            ) is not None:
                return self._sum(v, builder, parts) * scale
        if x not in parts:
            known = self.sums.get(x)
            parts[x] = Symbol(builder, known) if known else functions.sum(Symbol(builder, x))
        return parts[x]

    def _sum_operand(
        self, operand: Operand, like: Value, builder: Builder, parts: dict[Value, Symbol]
    ) -> Any:
        """The sum of an operand, repeated for as many features as another vector has."""
        uniform = self._find_uniform(operand, builder)
        if uniform is not None:
            return uniform * float(like.type.size)
        assert isinstance(operand, Value)
        return self._sum(operand, builder, parts)

    def _find_uniform(self, value: Operand, builder: Builder) -> Any:
        """Returns what all features of a value are: a symbol of one feature or a number; else
        None."""
        if not isinstance(value, Value):
            return value
        if value.type.size == 1:
            return Symbol(builder, value)
        op = self.made.get(value)
        if op and op.kind == "fill":
            return float(op.attrs[0])
        if op is None or op.kind not in _LINEAR or not is_elementwise(op.kind):
            return None
        each = [self._find_uniform(i, builder) for i in op.inputs]
        return None if any(u is None for u in each) else _LINEAR[op.kind](*each)
