"""Makes programs of the groups that work on whole sequences, so that each becomes one kernel.

Such a program has one step. Its rows are the rows of all time steps, none of which depends on
another.
"""

from __future__ import annotations

from dataclasses import replace

from hoconv.recurrent.ir.program import Group, Op, Program, Value, Yield, flat, step_outputs


def make_row_programs(program: Program) -> dict[Group, Program]:
    """The program of each group before and after the loop.

    It reads and writes the values of the group themselves, as sequences (1, T * B, n).
    """
    groups = [item for item in (*program.before, *program.after) if isinstance(item, Group)]
    sums = _read_sums(program)
    return {
        group: _program(program, group)
        for group in groups
        # Sums over all steps have one step: not the rows of other sequences.
        if len({op.result in sums for op in group.ops if op.inputs}) == 1
    }


def _read_sums(program: Program) -> set[Value]:
    """The values that are computed from running sums."""
    found = {s.total for s in program.states if s.total is not None}
    for op in flat(program.after):
        if any(v in found for v in op.values):
            found.add(op.result)
    return found


def _program(program: Program, group: Group) -> Program:
    own = {op.result: Value(replace(op.result.type, rate="step")) for op in group.ops}
    read = dict.fromkeys(v for op in group.ops for v in op.values if v not in own)
    ops = tuple(
        Op(
            op.kind,
            tuple(own.get(i, i) if isinstance(i, Value) else i for i in op.inputs),
            own[op.result],
            op.attrs,
        )
        for op in group.ops
    )
    used = find_outputs(program, group)
    return Program(
        name=f"{program.name}, whole sequences",
        params=(),
        sequences=tuple((f"in_{i}", value) for i, value in enumerate(read)),
        states=(),
        step=(Group(ops),),
        results=(),
        yields=tuple(
            Yield(f"out_{i}", own[op.result], op.result)
            for i, op in enumerate(group.ops)
            if op.result in used
        ),
    )


def find_outputs(program: Program, group: Group) -> set[Value]:
    """Finds the results of a group that anything else reads, or that the caller gets."""
    own = {op.result for op in group.ops}
    everywhere = flat((*program.before, *program.step, *program.after))
    used = {v for op in everywhere if op.result not in own for v in op.values}
    used |= {*step_outputs(program), *program.returned}
    return used & own
