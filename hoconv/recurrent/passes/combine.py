"""Combines products of the same operand into one product, by concatenating their weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from hoconv.recurrent.ir.program import Op, Param, Program, Type, Value, flat
from hoconv.recurrent.passes.gradient.paths import find_differentiated


def combine(program: Program) -> Program:
    """Combines the ``linear`` ops that read one value: those with a bias, and those without.

    Weights by which a step multiplies more than once stay as they are. Products that have no
    gradient are not combined with those that have: it is zero, whatever the operand is.
    """
    differentiated = find_differentiated(program)
    params = {p.value: p for p in program.params}
    read = Counter(v for op in flat((*program.before, *program.step)) for v in op.values[1:])
    once = {value for value in params if read[value] == 1}
    before, params = _region(program.before, params, once, differentiated)
    step, params = _region(program.step, params, once, differentiated)
    return replace(program, before=before, step=step, params=tuple(params.values()))


def _region(
    items: tuple, params: dict[Value, Param], once: set[Value], differentiated: set[Value]
) -> tuple[tuple[Op, ...], dict[Value, Param]]:
    ops = list(flat(items))
    together: dict[tuple, list[Op]] = defaultdict(list)
    for op in ops:
        if op.kind == "linear" and once.issuperset(op.values[1:]):
            has_gradient = op.result in differentiated
            together[op.values[0], len(op.inputs), has_gradient].append(op)
    first = {same[0]: same for same in together.values() if len(same) > 1}
    gone = {op for same in first.values() for op in same}
    params = dict(params)
    result = []
    for op in ops:
        if op in first:
            result += _combine_products(first[op], params)
        elif op not in gone:
            result.append(op)
    return tuple(result), params


def _combine_products(same: list[Op], params: dict[Value, Param]) -> list[Op]:
    """Concatenates the parameters; returns the product and the slices that replace the ops."""
    inputs = [same[0].values[0]]
    for column in range(1, len(same[0].inputs)):
        packed = [params.pop(op.values[column]) for op in same]
        rows = sum(p.value.type.shape[0] for p in packed)
        type_ = replace(packed[0].value.type, shape=(rows, *packed[0].value.type.shape[1:]))
        hint = "+".join(p.value.hint for p in packed)
        pieces = tuple(piece for p in packed for piece in p.pieces)
        inputs.append(Value(type_, hint))
        params[inputs[-1]] = Param(inputs[-1], pieces)
    result = same[0].result.type
    product = Value(Type(result.rate, (inputs[1].type.shape[0],), result.dtype))
    ops, start = [Op("linear", tuple(inputs), product)], 0
    for op in same:
        stop = start + op.result.type.size
        ops.append(Op("slice", (product,), op.result, (start, stop)))
        start = stop
    return ops
