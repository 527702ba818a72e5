"""Sinks slices and casts of whole sequences back into the step, where a load does them for free."""

from __future__ import annotations

from dataclasses import replace

from hoconv.recurrent.ir.program import Op, Program, Value, flat
from hoconv.recurrent.passes.rewrite import replace_outputs, substitute


def sink(program: Program) -> Program:
    """Moves slices and casts that only the step reads from before the loop into the step."""
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
        op = substitute(given, values)
        if op.result.type.rate == "sequence":
            values[op.result] = Value(replace(op.result.type, rate="step"), op.result.hint)
            op = replace(op, result=values[op.result])
        step.append(op)
    return replace_outputs(replace(program, before=tuple(before), step=tuple(step)), values)
