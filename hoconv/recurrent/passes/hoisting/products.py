"""Moves products out of the time loop that no state waits for: one product for all steps.

Such are the output ``C h`` of a state space, and in its gradient ``C^T d_output``. Without them a
step may have no product at all, so that the loop is one kernel, or a scan.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hoconv.recurrent.ir.kinds import PRODUCTS
from hoconv.recurrent.ir.program import Op, Program, Value, Yield, find_operands, flat
from hoconv.recurrent.passes.hoisting.hoist import find_stateless, move_before
from hoconv.recurrent.passes.rewrite import replace_outputs, substitute


def move_products(program: Program) -> Program:
    """Moves products that read no state before the loop, with what they read, and those that no
    next state is computed of after it, with what is computed of them. What a step wrote of those is
    the sequence itself."""
    ops, free = list(flat(program.step)), find_stateless(program)
    early = {op.result for op in ops if op.kind in PRODUCTS and op.result in free}
    program, values = move_before(program, free & find_operands(ops, early))
    return _move_after(program, values.values())


def _move_after(program: Program, early: Collection[Value]) -> Program:
    ops = list(flat(program.step))
    awaited = {s.next for s in program.states} | {r.next for r in program.replays}
    awaited = find_operands(ops, awaited)
    late: set[Value] = set()
    for op in ops:
        if (op.kind in PRODUCTS and op.result not in awaited) or any(v in late for v in op.values):
            late.add(op.result)
    yields = [y for y in program.yields if y.source not in late and y.source not in early]
    whole = {y.source: y.sequence for y in yields if not y.sparse}
    after = []
    for op in (op for op in ops if op.result in late):
        for value in op.values:
            if value.type.rate == "step" and value not in whole:
                whole[value] = Value(replace(value.type, rate="sequence"))
                yields.append(Yield(f"late_{len(yields)}", value, whole[value]))
        result = Value(replace(op.result.type, rate="sequence"), op.result.hint)
        after.append(Op(op.kind, substitute(op, whole).inputs, result, op.attrs))
        whole[op.result] = result
    found = {y.sequence: whole.get(y.source, y.source) for y in program.yields if y not in yields}
    after += [substitute(op, found) for op in flat(program.after)]
    step = tuple(op for op in ops if op.result not in late)
    program = replace(program, yields=tuple(yields), step=step, after=tuple(after))
    return replace_outputs(program, found)
