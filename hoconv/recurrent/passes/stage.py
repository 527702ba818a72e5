"""Stages operands of products: copies rows of sequences to a fixed address at every step.

A product that a CUDA graph records reads the same addresses at every step.
"""

from __future__ import annotations

from dataclasses import replace

from hoconv.recurrent.ir.kinds import PRODUCTS
from hoconv.recurrent.ir.program import Group, Op, Program, Value
from hoconv.recurrent.passes.rewrite import substitute


def stage(program: Program) -> Program:
    """Makes every product of the step read values of the step. A cast to the same dtype copies."""
    copies: dict[Value, Value] = {}
    for op in products(program):
        x = op.values[0]
        if x.type.rate == "sequence":
            copies.setdefault(x, Value(replace(x.type, rate="step"), x.hint))
    if not copies:
        return program
    first = Group(tuple(Op("cast", (x,), copy) for x, copy in copies.items()))
    step = (
        substitute(item, copies) if isinstance(item, Op) and item.kind in PRODUCTS else item
        for item in program.step
    )
    return replace(program, step=(first, *step))


def products(program: Program) -> list[Op]:
    """The products of a step."""
    return [op for op in program.step if isinstance(op, Op) and op.kind in PRODUCTS]
