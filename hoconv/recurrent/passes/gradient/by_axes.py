"""The gradients of the ops that read their operands by axes."""

from __future__ import annotations

from hoconv.recurrent.frontend.functions import where
from hoconv.recurrent.frontend.symbol import Builder, Symbol
from hoconv.recurrent.ir.axes import Layout, layout
from hoconv.recurrent.ir.program import Op


def differentiate(builder: Builder, op: Op, g: Symbol) -> list[Symbol]:
    """The gradient of each operand, given that of the result, as rows."""
    axes = layout(op)
    if op.kind == "largest":
        return [_of_largest(builder, op, axes, g)]
    found = []
    for i, own in enumerate(axes.operands):
        others = [j for j in range(len(axes.operands)) if j != i]
        lists = (axes.result, *(axes.operands[j] for j in others))
        product = Layout(axes.sizes, lists, own)
        values = (op.values[j] for j in others)
        found.append(_as_row(builder.einsum(product, g, *values, dtype=builder.dtype)))
    return found


def _of_largest(builder: Builder, op: Op, axes: Layout, g: Symbol) -> Symbol:
    """Equal ones share the gradient."""
    (own,) = axes.operands
    away = Layout(axes.sizes, (own,), axes.result)
    back = Layout(axes.sizes, (axes.result,), own)
    x = Symbol(builder, op.values[0])
    # The largest again, see the derivative of ``max`` in the table of functions.
    y = builder.einsum(away, x, kind="largest", dtype=builder.dtype)
    largest = where(x == _as_row(builder.einsum(back, y)), 1.0, 0.0)
    count = _as_row(builder.einsum(away, largest))
    return largest * _as_row(builder.einsum(back, g / count))


def _as_row(symbol: Symbol) -> Symbol:
    return Symbol(symbol.builder, symbol.value)
