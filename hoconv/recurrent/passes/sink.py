"""Slices and casts of whole sequences go back to where they are read, which costs nothing there."""

from __future__ import annotations

from dataclasses import replace

from hoconv.recurrent.ir.program import Op, Program, Value, flat
from hoconv.recurrent.passes.rewrite import substituted, with_outputs


def sink(program: Program) -> Program:
    """Moves slices and casts from before the loop into the step, where only steps read them."""
    before = list(flat(program.before))
    sunk: list[Op] = []
    for op in reversed(list(before)):
        read = any(op.result in other.values for other in before)
        if op.kind in ("slice", "cast") and op.result.type.rate == "sequence" and not read:
            before.remove(op)
            sunk.append(op)
    values: dict[Value, Value] = {}
    step = []
    for given in (*reversed(sunk), *flat(program.step)):
        op = substituted(given, values)
        if op.result.type.rate == "sequence":
            values[op.result] = Value(replace(op.result.type, rate="step"), op.result.hint)
            op = replace(op, result=values[op.result])
        step.append(op)
    return with_outputs(replace(program, before=tuple(before), step=tuple(step)), values)
