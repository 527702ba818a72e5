"""Makes programs of the groups and products that work on whole sequences, so that each is compiled.

Such a program has one step. Its rows are the rows of all time steps, none of which depends on
another.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hoconv.recurrent.ir.kinds import PRODUCTS
from hoconv.recurrent.ir.program import Group, Op, Program, Value, Yield, flat, step_outputs


def make_row_programs(
    program: Program, products: Collection[str] = ()
) -> dict[Group | Op, Program]:
    """The program of each group before and after the loop.

    It reads and writes the values of the group themselves, as sequences (1, T * B, n).

    Args:
        products: the dtypes of products that have a program, too.
    """
    sums = _read_sums(program)
    return {
        item: _program(program, item)
        for item in (*program.before, *program.after)
        if (_is_product(item, products) if isinstance(item, Op) else _has_rows(item, sums))
    }


def _has_rows(group: Group, sums: set[Value]) -> bool:
    """Whether all ops of a group have the same rows: sums over all steps have one step."""
    return len({op.result in sums for op in group.ops if op.inputs}) == 1


def _is_product(op: Op, dtypes: Collection[str]) -> bool:
    """Whether an op multiplies rows by a matrix, in one of some dtypes."""
    x = op.values[0].type if op.kind in PRODUCTS else None
    return x is not None and x.rate == "sequence" and x.dtype in dtypes


def _read_sums(program: Program) -> set[Value]:
    """The values that are computed from running sums."""
    found = {s.total for s in program.states if s.total is not None}
    for op in flat(program.after):
        if any(v in found for v in op.values):
            found.add(op.result)
    return found


def _program(program: Program, item: Group | Op) -> Program:
    original = item.ops if isinstance(item, Group) else (item,)
    own = {op.result: Value(replace(op.result.type, rate="step")) for op in original}
    read = dict.fromkeys(v for op in original for v in op.values if v not in own)
    ops = tuple(
        Op(
            op.kind,
            tuple(own.get(i, i) if isinstance(i, Value) else i for i in op.inputs),
            own[op.result],
            op.attrs,
        )
        for op in original
    )
    everywhere = flat((*program.before, *program.step, *program.after))
    used = {v for op in everywhere if op.result not in own for v in op.values}
    used |= {*step_outputs(program), *(v for _, v in program.results)}
    return Program(
        name=f"{program.name}, whole sequences",
        params=(),
        sequences=tuple((f"in_{i}", value) for i, value in enumerate(read)),
        states=(),
        step=(Group(ops),) if isinstance(item, Group) else ops,
        results=(),
        yields=tuple(
            Yield(f"out_{i}", own[op.result], op.result)
            for i, op in enumerate(original)
            if op.result in used
        ),
    )
