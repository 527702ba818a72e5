"""Runs of ops between products become groups: one kernel each."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hoconv.recurrent.ir.kinds import is_rowwise
from hoconv.recurrent.ir.program import Group, Op, Program, Value, flat


def fuse(program: Program) -> Program:
    """Puts all ops that work row by row into as few groups as the products between them allow."""
    return replace(
        program,
        before=_region(program.before),
        step=_region(program.step),
        after=_region(program.after),
    )


def _region(items: tuple) -> tuple[Op | Group, ...]:
    """Alternating levels: products at odd ones, groups at even ones.

    An op's level is the lowest at which its inputs are there. One that is first needed later moves
    there: its inputs are read where its result would be.
    """
    ops = list(flat(items))
    level: dict[Value, int] = {}
    for op in ops:
        lowest = max((level.get(v, 0) for v in op.values), default=0)
        rowwise = _in_group(op)
        level[op.result] = lowest + (lowest % 2 == (1 if rowwise else 0))
    needed: dict[Value, int] = {}  # the level at which a result is read first
    for op in reversed(ops):
        if _in_group(op):
            level[op.result] = max(level[op.result], needed.get(op.result, 0))
        at = level[op.result] - (not _in_group(op))
        for value in op.values:
            needed[value] = min(at, needed.get(value, at))
    levels: dict[int, list[Op]] = defaultdict(list)
    for op in ops:
        levels[level[op.result]].append(op)
    result: list[Op | Group] = []
    for at, here in sorted(levels.items()):
        result += here if at % 2 else [Group(tuple(here))]
    return tuple(result)


def _in_group(op: Op) -> bool:
    """Parameters alone are no rows: what is made of them is computed by itself."""
    return is_rowwise(op.kind) and op.result.type.rate != "once"
