"""Makes programs of the groups that work on whole sequences, so that each becomes one kernel.

Such a program has one step. Its rows are the rows of all time steps, none of which depends on
another. For a GPU it repeats what it reads, rather than what it computes of that::

    arrange(sigmoid(slice(x)))      becomes     sigmoid(arrange(slice(x)))

Several threads compute the same then, and none of them waits for another.
"""

from __future__ import annotations

from dataclasses import replace

from hoconv.recurrent.ir.axes import layout
from hoconv.recurrent.ir.kinds import is_elementwise
from hoconv.recurrent.ir.program import (
    Group,
    Op,
    Program,
    Value,
    Yield,
    find_operands,
    flat,
    step_outputs,
)
from hoconv.recurrent.passes.rewrite import replace_outputs, substitute


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


def repeat_reads(program: Program) -> Program:
    """A program whose steps repeat features where they read them, if elementwise ops alone are
    between. Where something else needs the results of these, they are computed for that, too."""
    values: dict[Value, Value] = {}
    step = tuple(
        _Repeats(item, values).group if isinstance(item, Group) else item for item in program.step
    )
    program = replace_outputs(replace(program, step=step), values)

    def drop_dead(group: Group) -> Group:
        wanted = find_operands(group.ops, find_outputs(program, group))
        return Group(tuple(op for op in group.ops if op.result in wanted))

    step = tuple(drop_dead(item) if isinstance(item, Group) else item for item in step)
    return replace(program, step=step)


class _Repeats:
    """Repeats in a group what it reads.

    Attributes:
        values: by results of ops that repeat others, what is computed instead.
        made: the op of each value that elementwise ops compute of what the group reads.
        group: the ops then, also those that nothing needs any more.
    """

    def __init__(self, group: Group, values: dict[Value, Value]) -> None:
        self.values = values
        self.made: dict[Value, Op] = {}
        self.ops: list[Op] = []
        self.seen: dict[tuple, Value] = {}
        read = {v for op in group.ops for v in op.values} - {op.result for op in group.ops}
        for given in group.ops:
            op = substitute(given, values)
            if op.kind == "slice" and op.values[0] in read:
                read.add(op.result)
            elif is_elementwise(op.kind) and all(
                v in read or v in self.made for v in _find_rows(op)
            ):
                self.made[op.result] = op
            elif op.kind == "arrange" and op.values[0] in self.made and layout(op).repeat:
                values[op.result] = self._repeat(op.values[0], op)
                continue
            self.ops.append(op)
        self.group = Group(tuple(self.ops))

    def _repeat(self, value: Value, by: Op) -> Value:
        """Computes the features of a value as often as an op repeats them."""
        key = value, by.attrs
        if key not in self.seen:
            result = Value(replace(by.result.type, dtype=value.type.dtype))
            if value in self.made:
                op = self.made[value]
                own = {v: self._repeat(v, by) for v in _find_rows(op)}
                self.ops.append(replace(substitute(op, own), result=result))
            else:
                self.ops.append(Op("arrange", (value,), result, by.attrs))
            self.seen[key] = result
        return self.seen[key]


def _find_rows(op: Op) -> list[Value]:
    """The operands of an elementwise op that are not the same number for all features."""
    return [v for v in op.values if v.type.size == op.result.type.size]


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
