"""Gives every op that reads a repeated value a repetition of its own.

Values of one size may lie along different axes: h numbers repeated for k keys, and the same for v
columns, are one op where k equals v. In registers they are not one value.
"""

from __future__ import annotations

from dataclasses import replace

from hoconv.recurrent.ir.axes import layout
from hoconv.recurrent.ir.program import Op, Program, Value, flat
from hoconv.recurrent.passes.rewrite import substitute


def separate(program: Program) -> Program:
    """The program, in whose steps one op at most reads each value that repeats another."""
    repeats: dict[Value, Op] = {}
    seen: set[Value] = set()
    step: list[Op] = []
    for op in flat(program.step):
        if op.kind == "fill" or (op.kind == "arrange" and _repeats(op)):
            repeats[op.result] = op
        own: dict[Value, Value] = {}
        for value in dict.fromkeys(op.values):
            if value in seen:
                own[value] = Value(value.type, value.hint)
                step.append(replace(repeats[value], result=own[value]))
            elif value in repeats:
                seen.add(value)
        step.append(substitute(op, own))
    return replace(program, step=tuple(step))


def _repeats(op: Op) -> bool:
    axes = layout(op)
    return axes.count(axes.result) > axes.count(axes.operands[0])
