"""The kinds of op that there are: which operands each takes, and the shape of its result.

n features of an operand, m features of a result.
"""

from __future__ import annotations

from collections.abc import Sequence

from hoconv.recurrent.ir.axes import read_layout
from hoconv.recurrent.ir.functions import FUNCTIONS, Reduction
from hoconv.recurrent.ir.program import Operand, Value

# Ops that are no functions of the table, because they need attributes, weights or whole sequences.
# slice: attrs (start, stop), some features; cat: the features of several rows beside each other.
LAYOUT = ("slice", "cat")
# By axes, which attrs list: ir/axes.py. arrange: permutes the axes of its operand, and repeats it
# along others. einsum: sums of an operand, or of the products of two. largest: maxima.
BY_AXES = ("arrange", "einsum", "largest")
# fill: attrs (value, n), n times the same number. keep: attrs (probability, site, n), true with
# that probability, drawn by a counter: ir/random.py.
SOURCES = ("fill", "keep")
# linear(x, W, b or nothing) = x W^T + b; linear_t(g, W) = g W.
PRODUCTS = ("linear", "linear_t")
# On whole sequences, summed over time and batch: outer(g, x) = g^T x; total(g), the sum of rows.
# sum_steps(g), summed over time, is constant.
SUMS = ("outer", "total", "sum_steps")
# On whole sequences: delay(next values, initial state, valid or nothing), the state before each
# step.
DELAY = "delay"


def is_known(kind: str) -> bool:
    """Returns whether there are ops of this kind."""
    return kind in FUNCTIONS or kind in (*LAYOUT, *BY_AXES, *SOURCES, *PRODUCTS, *SUMS, DELAY)


def is_reduction(kind: str) -> bool:
    """Returns whether the op makes one feature of all features of a row."""
    return isinstance(FUNCTIONS.get(kind), Reduction)


def is_elementwise(kind: str) -> bool:
    """Returns whether a feature of the result depends on the same feature of each operand."""
    return kind in FUNCTIONS and not is_reduction(kind)


def is_rowwise(kind: str) -> bool:
    """Returns whether a row of the result depends on the same row of each operand, and on no
    weight."""
    return kind in FUNCTIONS or kind in (*LAYOUT, *BY_AXES, *SOURCES)


def is_cheap(kind: str) -> bool:
    """Returns whether the op costs less to compute again than to write and read its result."""
    return FUNCTIONS[kind].cheap if kind in FUNCTIONS else kind in (*LAYOUT, "arrange", *SOURCES)


class OperandError(ValueError):
    """Operands that do not fit an op, or each other."""


def check_operands(kind: str, inputs: Sequence[Operand]) -> None:
    """Checks that conditions stand where conditions belong, and numbers where numbers do.

    The one rule of types: a function takes the sorts of its entry in the table; slices, ``cat``
    and ``arrange`` take either sort; everything else takes numbers. Nothing is converted.

    Raises:
        OperandError: one in the other's place, or constants alone; says what to write.
    """
    if kind not in SOURCES and not any(isinstance(i, Value) for i in inputs):
        listed = ", ".join(f"{i:g}" for i in inputs if not isinstance(i, Value))
        raise OperandError(
            f"{kind}: expected a value of the step, got numbers alone ({listed}); compute with "
            "numbers in Python"
        )
    found = [isinstance(i, Value) and i.type.dtype == "bool" for i in inputs]
    if kind in ("slice", "arrange"):
        return
    if kind == "cat":
        if numbers := [i for i in inputs if not isinstance(i, Value)]:
            raise OperandError(f"cat: expected values of the step, got the number {numbers[0]:g}")
        wanted = [all(found)] * len(found)
    elif kind == DELAY:
        wanted = [False, False, True][: len(found)]
    elif kind in FUNCTIONS:
        wanted = [sort == "condition" for sort in FUNCTIONS[kind].operands.values()]
    else:
        wanted = [False] * len(found)
    for operand, is_condition, condition_wanted in zip(inputs, found, wanted):
        if condition_wanted and not is_condition:
            got = "a value" if isinstance(operand, Value) else f"the number {operand:g}"
            raise OperandError(
                f"{kind}: expected a condition, made by a comparison or by & | ~, got {got}"
            )
        if is_condition and not condition_wanted:
            raise OperandError(
                f"{kind}: expected numbers, got a condition, which is true or false; write "
                "rnn.where(condition, 1.0, 0.0)"
            )


def result_shape(
    kind: str, inputs: Sequence[Operand], attrs: Sequence[int | float]
) -> tuple[int, ...]:
    """The shape of an op's result.

    Raises:
        OperandError: the operands' shapes do not fit; says which they are.
    """
    shapes = [i.type.shape for i in inputs if isinstance(i, Value)]
    if is_elementwise(kind):
        if len(shapes[0]) > 1 and len({*shapes}) == 1:  # the gradients of a weight, to be added
            return shapes[0]
        for shape in shapes:
            if len(shape) != 1:
                raise OperandError(f"{kind}: expected vectors of features, got a weight {shape}")
        sizes = {shape[0] for shape in shapes}
        if len(sizes - {1}) > 1:
            listed = " and ".join(str(shape[0]) for shape in shapes)
            raise OperandError(f"{kind}: expected operands of one size, or of size 1; got {listed}")
        return (max(sizes),)
    if is_reduction(kind):
        return (1,)
    if kind in SOURCES:
        return (int(attrs[-1]),)
    if kind == "slice":
        start, stop = attrs
        if not 0 <= start < stop <= shapes[0][0]:
            raise OperandError(f"slice: expected part of 0:{shapes[0][0]}, got {start}:{stop}")
        return (int(stop - start),)
    if kind == "cat":
        return (sum(shape[0] for shape in shapes),)
    if kind in BY_AXES:
        axes = read_layout(tuple(attrs))
        if shapes != [(axes.count(own),) for own in axes.operands]:
            raise OperandError(f"{kind}: {shapes} do not fit {axes}")
        return (axes.count(axes.result),)
    if kind == "outer":
        return (shapes[0][0], shapes[1][0])
    if kind in ("total", "sum_steps"):
        return shapes[0]
    if kind == DELAY:
        if shapes[0] != shapes[1]:
            raise OperandError(f"delay: a state {shapes[1]} does not fit next values {shapes[0]}")
        return shapes[0]
    x, weight, *bias = shapes
    inner, outer = (weight[1], weight[0]) if kind == "linear" else weight
    if x != (inner,) or any(b != (outer,) for b in bias):
        raise OperandError(f"{kind}: a weight {weight} does not fit an operand of size {x[0]}")
    return (outer,)


def is_boolean(kind: str, inputs: Sequence[Operand]) -> bool:
    """Returns whether the result is a condition: true or false."""
    if kind in (*LAYOUT, "arrange"):
        return any(isinstance(i, Value) and i.type.dtype == "bool" for i in inputs)
    return kind == "keep" or (kind in FUNCTIONS and FUNCTIONS[kind].result == "condition")
