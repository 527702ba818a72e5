"""The kinds of op that there are, and the shape of the result of each.

n features of an operand, m features of a result.
"""

from __future__ import annotations

from collections.abc import Sequence

from hoconv.recurrent.ir import Operand, Value

UNARY = ("neg", "abs", "exp", "log", "sqrt", "sigmoid", "tanh", "relu", "softplus", "erf")
BINARY = ("add", "sub", "mul", "div", "minimum", "maximum")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
LOGIC = ("and", "or", "not")
ELEMENTWISE = (*UNARY, *BINARY, *COMPARISONS, *LOGIC, "where", "cast")
# Over the features of a row; the result has one feature.
REDUCTIONS = ("sum", "max")
# slice: attrs (start, stop). fill: attrs (value, n), n times the same number. keep: attrs
# (probability, site, n), true with that probability, drawn by a counter: hoconv.recurrent.random.
SOURCES = ("fill", "keep")
ROWWISE = (*ELEMENTWISE, *REDUCTIONS, *SOURCES, "slice", "cat")
# linear(x, W, b or nothing) = x W^T + b; linear_t(g, W) = g W.
PRODUCTS = ("linear", "linear_t")
# On whole sequences, summed over time and batch: outer(g, x) = g^T x; total(g), the sum of rows.
SUMS = ("outer", "total")
KINDS = (*ROWWISE, *PRODUCTS, *SUMS)


class ShapeError(ValueError):
    """Operands that do not fit together."""


def result_shape(
    kind: str, inputs: Sequence[Operand], attrs: Sequence[int | float]
) -> tuple[int, ...]:
    """The shape of what an op gives.

    Raises:
        ShapeError: the operands' shapes do not fit; says which they are.
    """
    shapes = [i.type.shape for i in inputs if isinstance(i, Value)]
    if kind in ELEMENTWISE:
        for shape in shapes:
            if len(shape) != 1:
                raise ShapeError(f"{kind}: expected vectors of features, got a weight {shape}")
        sizes = {shape[0] for shape in shapes}
        if len(sizes - {1}) > 1:
            listed = " and ".join(str(shape[0]) for shape in shapes)
            raise ShapeError(f"{kind}: expected operands of one size, or of size 1; got {listed}")
        return (max(sizes),)
    if kind in REDUCTIONS:
        return (1,)
    if kind in SOURCES:
        return (int(attrs[-1]),)
    if kind == "slice":
        start, stop = attrs
        if not 0 <= start < stop <= shapes[0][0]:
            raise ShapeError(f"slice: expected part of 0:{shapes[0][0]}, got {start}:{stop}")
        return (int(stop - start),)
    if kind == "cat":
        return (sum(shape[0] for shape in shapes),)
    if kind == "outer":
        return (shapes[0][0], shapes[1][0])
    if kind == "total":
        return shapes[0]
    x, weight, *bias = shapes
    inner, outer = (weight[1], weight[0]) if kind == "linear" else weight
    if x != (inner,) or any(b != (outer,) for b in bias):
        raise ShapeError(f"{kind}: a weight {weight} does not fit an operand of size {x[0]}")
    return (outer,)


def is_boolean(kind: str, inputs: Sequence[Operand]) -> bool:
    """Whether the result is true or false."""
    if kind in ("slice", "cat"):
        return any(isinstance(i, Value) and i.type.dtype == "bool" for i in inputs)
    return kind in (*COMPARISONS, *LOGIC, "keep")
