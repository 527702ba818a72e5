"""Replaces sequences that are only summed over time by running sums.

The gradient of a vector of parameters, or of a constant, is such a sum. Its running sum, (B, n),
stays in the cache; the sequence, (T, B, n), would go to memory.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hoconv.recurrent.ir.program import Op, Program, State, Value, Yield, flat
from hoconv.recurrent.passes.rewrite import substitute


def accumulate(program: Program, apart: Collection[Value] = ()) -> Program:
    """Replaces every yield of which nothing but sums are read by a state that adds up.

    Args:
        apart: the sources of yields that stay.
    """
    wide = program.wide
    step, states = list(flat(program.step)), list(program.states)
    yields: list[Yield] = []
    totals: dict[Value, Value] = {}
    for each in program.yields:
        users = [op for op in flat(program.after) if each.sequence in op.values]
        stays = each.sequence in program.returned or each.source in apart
        if stays or any(op.kind not in ("total", "sum_steps") for op in users):
            yields.append(each)
            continue
        source, type_ = each.source, replace(each.source.type, rate="step", dtype=wide)
        if source.type.dtype != wide:
            step.append(Op("cast", (source,), Value(type_)))
            source = step[-1].result
        before = Value(type_)
        step.append(Op("add", (before, source), Value(type_)))
        total = Value(replace(type_, rate="sequence"))
        states.append(State(f"sum_{len(totals)}", before, step[-1].result, total))
        totals[each.sequence] = total
    return replace(
        program,
        step=tuple(step),
        states=tuple(states),
        yields=tuple(yields),
        after=tuple(substitute(op, totals) for op in flat(program.after)),
    )
