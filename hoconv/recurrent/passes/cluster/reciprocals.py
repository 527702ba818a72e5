"""Divides vectors by a value of one feature through its reciprocal, which a row computes once.

For targets whose division is many instructions. In float32 it is as exact as their division, two
units in the last place, but for divisors below 3e-39, whose reciprocal is infinite.
"""

from __future__ import annotations

from dataclasses import replace

from hoconv.recurrent.ir.program import Op, Program, Type, Value, flat


def take_reciprocals(program: Program) -> Program:
    """A program whose steps multiply by reciprocals; :func:`flat`."""
    step: list[Op] = []
    found: dict[Value, Value] = {}
    for op in flat(program.step):
        by = op.inputs[-1] if op.kind == "div" else None
        if op.result.type.size > 1 and isinstance(by, Value) and by.type.size == 1:
            if by not in found:
                found[by] = Value(Type("step", (1,), op.result.type.dtype))
                step.append(Op("div", (1.0, by), found[by]))
            op = Op("mul", (op.inputs[0], found[by]), op.result)
        step.append(op)
    return replace(program, step=tuple(step))
