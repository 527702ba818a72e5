"""What passes share: replacing values by others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hoconv.recurrent.ir.program import Op, Operand, Program, Value, Yield


def mapped(operand: Operand, values: Mapping[Value, Value]) -> Operand:
    """The value that takes the place of an operand, or itself."""
    return values.get(operand, operand) if isinstance(operand, Value) else operand


def substituted(op: Op, values: Mapping[Value, Value]) -> Op:
    """An op with other inputs; the result stays."""
    if not any(v in values for v in op.values):
        return op
    return Op(op.kind, tuple(mapped(i, values) for i in op.inputs), op.result, op.attrs)


def with_outputs(program: Program, values: Mapping[Value, Value]) -> Program:
    """A program whose next states, yields and results are other values."""
    return replace(
        program,
        states=tuple(replace(s, next=values.get(s.next, s.next)) for s in program.states),
        yields=tuple(
            Yield(y.name, values.get(y.source, y.source), y.sequence) for y in program.yields
        ),
        results=tuple((name, values.get(v, v)) for name, v in program.results),
    )
