"""Hoists ops that do not depend on a state out of the time loop: one product for all steps."""

from __future__ import annotations

from dataclasses import replace

from hoconv.recurrent.ir.kinds import BY_AXES, SOURCES
from hoconv.recurrent.ir.program import Op, Program, Type, Value, flat
from hoconv.recurrent.passes.rewrite import replace_outputs, substitute


def hoist(program: Program) -> Program:
    """Moves ops that read no state from the step to before it, on whole sequences.

    Random masks stay: drawing them again is cheaper than storing them. So does what has more
    features than its operands together, as outer products have: so many would be stored for all
    steps.
    """
    values: dict[Value, Value] = {}
    before, step = list(program.before), []
    for given in flat(program.step):
        op = substitute(given, values)
        grows = op.kind in BY_AXES and op.result.type.size > sum(v.type.size for v in op.values)
        if op.kind in SOURCES or grows or any(v.type.rate == "step" for v in op.values):
            step.append(op)
            continue
        whole = Value(Type("sequence", op.result.type.shape, op.result.type.dtype), op.result.hint)
        values[op.result] = whole
        before.append(Op(op.kind, op.inputs, whole, op.attrs))
    return replace_outputs(replace(program, before=tuple(before), step=tuple(step)), values)
