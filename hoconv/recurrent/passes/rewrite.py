"""Replaces values by other values: what passes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hoconv.recurrent.ir.program import Op, Operand, Program, Value, Yield


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
        yields=tuple(
            Yield(y.name, values.get(y.source, y.source), y.sequence) for y in program.yields
        ),
        results=tuple((name, values.get(v, v)) for name, v in program.results),
    )
