"""Finds the values whose gradient a program's outputs and final states may give."""

from __future__ import annotations

import functools
from typing import Any

from hoconv.recurrent.frontend import functions
from hoconv.recurrent.frontend.symbol import Builder, Symbol
from hoconv.recurrent.ir.functions import FUNCTIONS
from hoconv.recurrent.ir.program import Op, Program, Type, Value, flat, step_outputs


def find_differentiated(program: Program) -> set[Value]:
    """The values from which a differentiable path leads to an output of a step or a result."""
    found = {*step_outputs(program), *program.returned}
    for op in reversed([*flat(program.before), *flat(program.step), *flat(program.after)]):
        if op.result in found:
            found.update(_pass_gradients(op))
    return found


def _pass_gradients(op: Op) -> list[Value]:
    """The operands that get a gradient from the result's."""
    passes = _operands_of(op.kind) if op.kind in FUNCTIONS else (True,) * len(op.inputs)
    return [
        value
        for value, has in zip(op.inputs, passes, strict=True)
        if has and isinstance(value, Value) and value.type.dtype != "bool"
    ]


@functools.cache
def _operands_of(kind: str) -> tuple[bool, ...]:
    """Returns, of each operand of a function, whether it has a gradient."""
    function, builder = FUNCTIONS[kind], Builder()
    if function.derivative is None:
        return (False,) * len(function.operands)

    def symbol(sort: str) -> Symbol:
        return Symbol(builder, Value(Type("step", (1,), "bool" if sort == "condition" else "real")))

    operands: list[Any] = [symbol(sort) for sort in function.operands.values()]
    if kind == "pow":  # of a constant base
        operands[0] = 2.0
    gradients = function.derivative(functions, symbol("number"), symbol("number"), *operands)
    return tuple(gradient is not None for gradient in gradients)
