"""Moves after the loop what steps compute from sums over columns or heads, and only write; or all
that they compute from sums of matrices.

The parts of such a sum come from many blocks of threads. What the moved ops read of a step is
written; what depends on no state they compute again.
"""

from __future__ import annotations

from dataclasses import replace

from hoconv.recurrent.ir.program import Op, Program, Value, Yield, flat
from hoconv.recurrent.passes.matrix.columns import (
    Columns,
    find_columns,
    find_stateless,
    find_sums,
)
from hoconv.recurrent.passes.matrix.separate import separate
from hoconv.recurrent.passes.rewrite import replace_outputs, substitute
from hoconv.recurrent.passes.simplify import simplify


def move_epilogue(program: Program, rows: bool = False) -> Program | str:
    """The program, without groups, whose steps write sums over columns as they are; in words why
    its columns are not independent.

    Args:
        rows: whether its steps write all sums of matrices so, and compute nothing else of rows.
    """
    program = separate(program)
    columns = find_columns(program)
    if isinstance(columns, str):
        return columns
    return simplify((_Rows if rows else _Epilogue)(program, columns).run())


class _Epilogue:
    def __init__(self, program: Program, columns: Columns) -> None:
        self.program = program
        self.columns = columns
        self.made = {op.result: op for op in flat(program.step)}
        self.sums = find_sums(flat(program.step), columns)
        self.stateless = find_stateless(program)
        self.after: list[Op] = []
        self.yields: list[Yield] = []
        self.written: dict[Value, Value] = {}
        self.whole: dict[Value, Value] = {}

    def run(self) -> Program:
        moved = []
        for each in self.program.yields:
            if self._stays(each.source):
                self.yields.append(each)
                self.written[each.source] = each.sequence
            else:
                moved.append(each)
        values = {each.sequence: self._find(each.source) for each in moved}
        after = [substitute(op, values) for op in flat(self.program.after)]
        program = replace_outputs(self.program, values)
        return replace(program, yields=tuple(self.yields), after=(*self.after, *after))

    def _stays(self, value: Value) -> bool:
        """Returns whether the step computes a value that it writes."""
        return value not in self.columns.late or value in self.sums

    def _find(self, value: Value) -> Value:
        """The sequence of a value over all steps."""
        if value.type.rate != "step":
            return value
        if value in self.whole:
            return self.whole[value]
        op = self.made.get(value)
        again = value in self.stateless and value not in self.written
        if op is not None and (again or not self._stays(value)):
            inputs = tuple(self._find(i) if isinstance(i, Value) else i for i in op.inputs)
            found = Value(replace(value.type, rate="sequence"))
            self.after.append(Op(op.kind, inputs, found, op.attrs))
        elif value in self.written:
            found = self.written[value]
        else:
            found = Value(replace(value.type, rate="sequence"))
            self.written[value] = found
            self.yields.append(Yield(f"late_{len(self.yields)}", value, found))
        self.whole[value] = found
        return found


class _Rows(_Epilogue):
    """Leaves in the steps matrices, their operands and sums, and what casts the whole of such a
    sum."""

    def __init__(self, program: Program, columns: Columns) -> None:
        super().__init__(program, columns)
        matrices = [op for op in self.made.values() if columns.is_matrix(op.result)]
        self.operands = {v for op in matrices for v in op.values if v in self.made} - self.stateless

    def _stays(self, value: Value) -> bool:
        if self.columns.is_matrix(value) or value in self.operands:
            return True
        op = self.made.get(value)
        if op is not None and op.kind == "cast" and op.values[0] not in self.sums:
            op = self.made.get(op.values[0])
        return op is not None and any(map(self.columns.is_matrix, op.values))
