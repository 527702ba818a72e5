"""Moves out of the steps what a matrix state does not need in them, and into them what is repeated.

Where a thread computes few columns, many threads compute the same values along keys: those that
depend on no state are computed before the loop. A parameter that is repeated for a whole matrix is
repeated in the step instead, which costs nothing.
"""

from __future__ import annotations

from dataclasses import replace

from hoconv.recurrent.ir.program import Op, Program, Value, find_rate, flat
from hoconv.recurrent.passes.matrix.columns import Columns, find_columns, find_stateless
from hoconv.recurrent.passes.matrix.separate import separate
from hoconv.recurrent.passes.rewrite import replace_outputs, substitute
from hoconv.recurrent.passes.simplify import simplify


def prepare(program: Program, rows: bool = False) -> Program | str:
    """The program, without groups, whose states are matrices of independent columns; in words why
    there are none.

    Args:
        rows: whether its steps load all rows that depend on no state.
    """
    program = separate(repeat_in_step(program))
    columns = find_columns(program)
    if isinstance(columns, str):
        return columns
    return separate(simplify(_hoist(program, columns, rows)))


def repeat_in_step(program: Program) -> Program:
    """Returns the program, whose steps repeat parameters for all features of a state."""
    most = max((s.value.type.size for s in program.states), default=0)
    before, step = [], []
    values: dict[Value, Value] = {}
    elsewhere = {v for op in flat((*program.before, *program.after)) for v in op.values}
    elsewhere |= program.returned
    for op in flat(program.before):
        grows = op.kind == "arrange" and op.result.type.size == most
        if not grows or op.values[0].type.size == most or op.result in elsewhere:
            before.append(op)
            continue
        values[op.result] = Value(replace(op.result.type, rate="step"), op.result.hint)
        step.append(replace(op, result=values[op.result]))
    if not values:
        return program
    step += [substitute(op, values) for op in flat(program.step)]
    return replace_outputs(replace(program, before=tuple(before), step=tuple(step)), values)


def _hoist(program: Program, columns: Columns, rows: bool) -> Program:
    """Moves values that depend on no state before the loop: those along keys, or all rows."""
    free, wanted = find_stateless(program), set()
    for op in reversed(list(flat(program.step))):
        of_keys = columns.keys in columns.axes(op.result)
        own = (rows or of_keys) and not columns.is_matrix(op.result) and bool(op.values)
        if op.result in free and (op.result in wanted or (own and not _is_load(op))):
            wanted |= {op.result, *op.values}
    values: dict[Value, Value] = {}
    before, step = list(flat(program.before)), []
    for given in flat(program.step):
        if given.result in wanted:
            moved = substitute(given, values)
            whole = Value(
                replace(given.result.type, rate=find_rate(moved.values)), given.result.hint
            )
            values[given.result] = whole
            before.append(Op(moved.kind, moved.inputs, whole, moved.attrs))
            if not _is_load(given):
                continue
        step.append(given)
    loads = {op.result for op in step}
    values = {v: whole for v, whole in values.items() if v not in loads}
    step = [substitute(op, values) for op in step]
    return replace_outputs(replace(program, before=tuple(before), step=tuple(step)), values)


def _is_load(op: Op) -> bool:
    """Returns whether an op costs no more than to load its operand."""
    return op.kind in ("slice", "cast")
