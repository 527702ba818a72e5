"""Streams products of whole sequences through the step, so that their results stay in the cache.

Before the loop such a product writes, and the steps read, memory for all steps, which may be new
to the process: then the system clears every page of it first. It is what :mod:`.hoisting.hoist`
undone gives where a step has rows enough for a product of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from hoconv.recurrent.ir.kinds import PRODUCTS
from hoconv.recurrent.ir.program import Group, Op, Program, Value, Yield, flat
from hoconv.recurrent.passes.rewrite import replace_outputs, substitute


def stream(program: Program) -> Program:
    """Moves into the step the products before the loop that only the steps read, and the products
    after it of what the steps write. Without any, returns the program itself."""
    return _stream_after(_stream_before(program))


def _stream_before(program: Program) -> Program:
    elsewhere = {v for op in flat(program.after) for v in op.values}
    elsewhere |= program.returned
    values: dict[Value, Value] = {}
    kept: list[Op | Group] = []
    moved: list[Op] = []
    for item in reversed(program.before):
        if (
            _is_product(item)
            and item.result.type.rate == "sequence"
            and item.result not in elsewhere
        ):
            values[item.result] = _at_step(item.result)
            moved.append(item)
            continue
        kept.append(item)
        elsewhere |= {v for op in flat((item,)) for v in op.values}
    if not moved:
        return program
    first = tuple(
        replace(substitute(op, values), result=values[op.result]) for op in reversed(moved)
    )
    step = (
        Group(tuple(substitute(op, values) for op in item.ops))
        if isinstance(item, Group)
        else substitute(item, values)
        for item in program.step
    )
    return replace_outputs(
        replace(program, before=tuple(reversed(kept)), step=(*first, *step)), values
    )


def _stream_after(program: Program) -> Program:
    written = {y.sequence: y.source for y in program.yields}
    params = {p.value for p in program.params}
    after: list[Op | Group] = []
    step, yields = list(program.step), list(program.yields)
    for item in program.after:
        if _is_product(item) and item.values[0] in written and params.issuperset(item.values[1:]):
            result = _at_step(item.result)
            step.append(replace(substitute(item, written), result=result))
            yields.append(Yield(f"streamed_{len(yields)}", result, item.result))
            continue
        after.append(item)
    if len(after) == len(program.after):
        return program
    return replace(program, step=tuple(step), yields=tuple(yields), after=tuple(after))


def _is_product(item: Op | Group) -> TypeGuard[Op]:
    """Returns whether the step computes it as fast as what computes whole sequences. In half
    precision that is PyTorch, which has faster instructions."""
    return (
        isinstance(item, Op) and item.kind in PRODUCTS and item.result.type.dtype in ("f32", "f64")
    )


def _at_step(value: Value) -> Value:
    return Value(replace(value.type, rate="step"), value.hint)
