"""Replaces values by other values: what passes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hoconv.recurrent.ir.program import Op, Operand, Program, Replay, Value


def map_operand(operand: Operand, values: Mapping[Value, Value]) -> Operand:
    """The replacement of an operand, or the operand itself."""
    return values.get(operand, operand) if isinstance(operand, Value) else operand


def substitute(op: Op, values: Mapping[Value, Value]) -> Op:
    """An op with replaced inputs and the same result."""
    if not any(v in values for v in op.values):
        return op
    return Op(op.kind, tuple(map_operand(i, values) for i in op.inputs), op.result, op.attrs)


def replace_outputs(program: Program, values: Mapping[Value, Value]) -> Program:
    """A program with replaced next states, sources of yields, and results."""
    return replace(
        program,
        states=tuple(replace(s, next=values.get(s.next, s.next)) for s in program.states),
        delays=tuple(replace(d, value=values.get(d.value, d.value)) for d in program.delays),
        yields=tuple(replace(y, source=values.get(y.source, y.source)) for y in program.yields),
        replays=tuple(
            Replay(values.get(r.value, r.value), values.get(r.next, r.next))
            for r in program.replays
        ),
        results=tuple((name, values.get(v, v)) for name, v in program.results),
    )
