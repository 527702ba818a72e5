"""Eliminates common subexpressions, trivial ops and dead code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hoconv.recurrent.ir.program import Op, Operand, Program, Value, Yield, flat, step_outputs
from hoconv.recurrent.passes.rewrite import replace_outputs, substitute


def simplify(program: Program) -> Program:
    """An equal program without common subexpressions, trivial ops and dead code."""
    return _eliminate_dead(_eliminate_common(program))


def _eliminate_common(program: Program) -> Program:
    values: dict[Value, Value] = {}
    seen: dict[tuple, Value] = {}
    made_by: dict[Value, Op] = {}

    def region(items: tuple) -> tuple[Op, ...]:
        ops = []
        for given in flat(items):
            op = substitute(given, values)
            # -0.0 equals 0.0, but is another constant.
            inputs = tuple(repr(i) if isinstance(i, float) else i for i in op.inputs)
            key = (op.kind, inputs, repr(op.attrs), op.result.type)
            same = seen.get(key) or find_equal(op, made_by)
            if same is not None:
                values[op.result] = same
                continue
            seen[key] = op.result
            made_by[op.result] = op
            ops.append(op)
        return tuple(ops)

    before, step = region(program.before), region(program.step)
    yields: dict[tuple[Value, bool], Yield] = {}
    for each in program.yields:
        key = values.get(each.source, each.source), each.sparse
        values[each.sequence] = yields.setdefault(key, each).sequence
    after = region(program.after)
    program = replace(program, yields=tuple(yields.values()))
    return replace_outputs(replace(program, before=before, step=step, after=after), values)


def find_equal(op: Op, made_by: Mapping[Value, Op]) -> Value | None:
    """An operand, or an operand's operand, that equals the op's result; None if there is none."""

    def same(operand: Operand | None) -> Value | None:
        if isinstance(operand, Value) and operand.type == op.result.type:
            return operand
        return None

    a, b, *_ = (*op.inputs, None, None)
    source = made_by.get(a) if isinstance(a, Value) else None
    if op.kind == "mul" and 1.0 in (a, b):
        return same(b if a == 1.0 else a)
    if op.kind == "cat" and len(op.inputs) == 1:
        return same(a)
    if op.kind == "slice" and source is not None and source.kind == "cat":
        start = 0
        for part in source.values:
            if op.attrs == (start, start + part.type.size):
                return same(part)
            start += part.type.size
    if op.kind == "slice":
        return same(a)
    if op.kind == "cast" and source is not None and source.kind == "cast":
        return same(source.values[0])  # a wider dtype and back
    return None


def _eliminate_dead(program: Program) -> Program:
    wanted = {*program.returned, *(s.next for s in program.states)}

    def region(items: tuple) -> tuple[Op, ...]:
        kept = []
        for op in reversed(list(flat(items))):
            if op.result in wanted:
                wanted.update(op.values)
                kept.append(op)
        return tuple(reversed(kept))

    after = region(program.after)
    yields = tuple(y for y in program.yields if y.sequence in wanted)
    program = replace(program, yields=yields, after=after)
    wanted.update(step_outputs(program))
    step = region(program.step)
    return replace(program, step=step, before=region(program.before))
