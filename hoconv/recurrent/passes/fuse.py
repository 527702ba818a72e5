"""Fuses the ops between products into groups; a group becomes one kernel."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hoconv.recurrent.ir.kinds import is_rowwise
from hoconv.recurrent.ir.program import Group, Op, Program, Value, flat


def fuse(program: Program) -> Program:
    """Fuses all ops that work row by row into as few groups as the products between them allow."""
    return replace(
        program,
        before=_region(program.before),
        step=_region(program.step),
        after=_region(program.after),
    )


def _region(items: tuple) -> tuple[Op | Group, ...]:
    """Schedules the ops of a region on levels: groups on even levels, products on odd ones.

    An op is first scheduled as soon as possible: on the lowest level after its inputs. Then an op
    of a group moves as late as possible, to the group that reads its result first, so that the
    result need not leave a kernel.
    """
    ops = list(flat(items))
    level: dict[Value, int] = {}
    for op in ops:
        lowest = max((level.get(v, 0) for v in op.values), default=0)
        rowwise = _in_group(op)
        level[op.result] = lowest + (lowest % 2 == (1 if rowwise else 0))
    needed: dict[Value, int] = {}  # the first level that reads a result
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
    """Returns whether an op belongs to a group. One that reads parameters alone has no rows, and
    constants have other rows than sequences."""
    if not is_rowwise(op.kind) or op.result.type.rate in ("once", "constant"):
        return False
    return op.result.type.rate == "step" or all(v.type.rate != "constant" for v in op.values)
