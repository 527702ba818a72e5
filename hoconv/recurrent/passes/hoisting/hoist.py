"""Hoists ops that do not depend on a state out of the time loop: one product for all steps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hoconv.recurrent.ir.kinds import BY_AXES, LAYOUT, PRODUCTS, SOURCES, is_elementwise
from hoconv.recurrent.ir.program import (
    Op,
    Program,
    Value,
    find_operands,
    find_rate,
    flat,
)
from hoconv.recurrent.passes.rewrite import replace_outputs, substitute


def hoist(program: Program) -> Program:
    """Moves ops that read no state from the step to before it, on whole sequences.

    Random masks stay: drawing them again is cheaper than storing them. So does what has more
    features than its operands together, as outer products have: so many would be stored for all
    steps. Where the rest of the step is elementwise, memory is all that it waits for: then products
    are moved alone, and what they read.
    """
    free = find_stateless(program)
    ops = list(flat(program.step))
    moved, rest = free, [op for op in ops if op.result not in free]
    if all(is_elementwise(op.kind) or op.kind in (*LAYOUT, *SOURCES) for op in rest):
        moved = find_operands(ops, {op.result for op in ops if op.kind in PRODUCTS})
    return move_before(program, moved)[0]


def move_before(program: Program, moved: Collection[Value]) -> tuple[Program, dict[Value, Value]]:
    """Moves ops that read no state from the step to before it, given their results; also returns
    the value that replaces each result: a constant of constants, else a sequence."""
    values: dict[Value, Value] = {}
    before, step = list(program.before), []
    for given in flat(program.step):
        op = substitute(given, values)
        if given.result not in moved:
            step.append(op)
            continue
        whole = Value(replace(op.result.type, rate=find_rate(op.values)), op.result.hint)
        values[op.result] = whole
        before.append(Op(op.kind, op.inputs, whole, op.attrs))
    program = replace(program, before=tuple(before), step=tuple(step))
    return replace_outputs(program, values), values


def find_stateless(program: Program) -> set[Value]:
    """Finds the results of the step that may be computed before the loop."""
    found: set[Value] = set()
    for op in flat(program.step):
        grows = op.kind in BY_AXES and op.result.type.size > sum(v.type.size for v in op.values)
        waits = any(v.type.rate == "step" and v not in found for v in op.values)
        if not (op.kind in SOURCES or grows or waits):
            found.add(op.result)
    return found
