"""The functions of the language that know a value's axes.

A value has one to three axes beside the batch: a row of features (B, n), heads (B, H, n), a matrix
for each head (B, H, K, V). Operands of an operator have as many axes; an axis of size 1 is
repeated. Axes are numbered as a tensor's: 0 is the batch, -1 the last one.

B batch, H heads, n features.
"""

from __future__ import annotations

import math
from typing import Any

from hoconv.recurrent.frontend.frame import Row, apply
from hoconv.recurrent.frontend.functions import exp, log, maximum, sqrt, stop_gradient, where
from hoconv.recurrent.frontend.symbol import MOST_AXES, Symbol, describe_learned, fail
from hoconv.recurrent.ir import axes as by_axes
from hoconv.recurrent.ir import evaluate
from hoconv.recurrent.ir.axes import Layout


def einsum(equation: str, *operands: Row) -> Row:
    """Sums of products by axes, as ``torch.einsum``; the batch, which leads, is not written.

    ``einsum("hkv,hk->hv", S, q)`` multiplies a matrix for each head by a vector for each head,
    ``einsum("hk,hv->hkv", k, v)`` is their outer product, ``einsum("hkv->hvk", S)`` a transpose.

    Args:
        equation: a letter for each axis of each operand, "->", and the letters of the result.
        operands: one or two values.
    """
    if not isinstance(equation, str):
        fail(f'einsum: expected an equation first, as in einsum("hk->kh", a); got {equation!r}')
    parts, arrow, result = equation.replace(" ", "").partition("->")
    letters = parts.split(",")
    where = f"einsum({equation!r})"
    if not arrow or not result or not all(of.isalpha() for of in (*letters, result)):
        fail(f'{where}: expected letters alone, as in "hkv,hk->hv"; the batch is not written, and '
             "a result has an axis at least")  # fmt: skip
    if len(letters) != len(operands) or len(operands) > 2:
        fail(f"{where}: expected one or two operands, as many as it has, got {len(operands)}; "
             "multiply more of them two by two")  # fmt: skip
    for of in (*letters, result):
        if len(set(of)) < len(of):
            fail(f"{where}: {of!r} has a letter twice: an axis is read once")
        if len(of) > MOST_AXES:
            fail(f"{where}: {of!r}: expected at most {MOST_AXES} axes")
    sizes: dict[str, int] = {}
    for of, operand in zip(letters, operands, strict=True):
        shape = _shape(where, operand)
        if any(isinstance(o, Symbol) for o in operands) and not isinstance(operand, Symbol):
            fail(f"{where}: expected values of the step, got {type(operand).__name__}"
                 + describe_learned(operand))  # fmt: skip
        if len(of) != len(shape):
            fail(f"{where}: {of!r} has {len(of)} axes, its operand {_show(shape)} has {len(shape)} "
                 "beside the batch, which is not written")  # fmt: skip
        for letter, size in zip(of, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                fail(f"{where}: {letter!r} has the sizes {sizes[letter]} and {size}")
    if unknown := [letter for letter in result if letter not in sizes]:
        fail(f"{where}: no operand has the axis {unknown[0]!r} of the result")
    at = {letter: i for i, letter in enumerate(sizes)}
    listed = tuple(tuple(at[letter] for letter in of) for of in letters)
    axes = Layout(tuple(sizes.values()), listed, tuple(at[letter] for letter in result))
    return _compute("einsum", axes, *operands)


def sum(x: Row, axis: int = -1) -> Row:
    """The sum along an axis, which then has size 1."""
    return _reduce("sum", "einsum", x, axis)


def max(x: Row, axis: int = -1) -> Row:
    """The largest along an axis, which then has size 1; equal ones share the gradient."""
    return _reduce("max", "largest", x, axis)


def mean(x: Row, axis: int = -1) -> Row:
    """The mean along an axis, which then has size 1."""
    _axis("mean", x, axis)
    return sum(x, axis) * (1 / x.shape[_axis("mean", x, axis) + 1])


def softmax(x: Row, axis: int = -1) -> Row:
    """exp(x) over its sum along an axis."""
    _axis("softmax", x, axis)
    e = exp(x - max(x, axis))
    return e / sum(e, axis)


def logsumexp(x: Row, axis: int = -1) -> Row:
    """The logarithm of the sum of exp(x) along an axis, which then has size 1."""
    _axis("logsumexp", x, axis)
    largest = stop_gradient(max(x, axis))
    largest = where(abs(largest) < math.inf, largest, 0.0)
    return log(sum(exp(x - largest), axis)) + largest


def normalize(x: Row, axis: int = -1, eps: float = 1e-12) -> Row:
    """x over its Euclidean norm along an axis, which is taken as eps at least."""
    _axis("normalize", x, axis)
    return x / sqrt(maximum(sum(x * x, axis), eps * eps))


def reshape(x: Row, *shape: int) -> Row:
    """Returns the same features along other axes, (B, *shape), the last axis fastest."""
    given = _shape("reshape", x)
    for size in shape:
        _check_int("reshape", "size", size, 1)
    if not 1 <= len(shape) <= MOST_AXES or math.prod(shape) != math.prod(given):
        fail(f"reshape: {_show(given)} does not fit {_show(shape)}")
    if isinstance(x, Symbol):
        return Symbol(x.builder, x.value, shape)
    return x.reshape(-1, *shape)


def cat(*values: Row, axis: int = -1) -> Row:
    """All values beside each other along an axis; value[..., start:stop] takes some out."""
    if not values or isinstance(values[0], list | tuple):
        fail("cat: expected values, as in cat(a, b)")
    symbol = next((v for v in values if isinstance(v, Symbol)), None)
    if symbol is None:
        return evaluate.cat(values, axis)
    for value in values:
        if not isinstance(value, Symbol):
            fail(f"cat: expected values of the step, got {value!r}")
    at = _axis("cat", symbol, axis)
    shapes = [value.along for value in values]
    others = {tuple(n for i, n in enumerate(shape) if i != at) for shape in shapes}
    if len({*map(len, shapes)}) > 1 or len(others) > 1:
        fail(f"cat: {' and '.join(map(_show, shapes))}: expected the same axes but one")
    front = [value.move(at, 0) for value in values]
    whole = symbol.builder.apply("cat", *front)
    rest = front[0].along[1:]
    size = whole.value.type.size // math.prod(rest)
    return Symbol(symbol.builder, whole.value, (size, *rest)).move(0, at)


def pad(x: Row, before: int, after: int = 0, axis: int = -1) -> Row:
    """x with zeros before and after it along an axis."""
    _check_int("pad", "before", before, 0)
    _check_int("pad", "after", after, 0)
    at = _axis("pad", x, axis) + 1
    parts = [_zeros(x, at, n) for n in (before, after)]
    found = [part for part in (parts[0], x, parts[1]) if part is not None]
    return cat(*found, axis=at) if len(found) > 1 else x


def roll(x: Row, shift: int, axis: int = -1) -> Row:
    """x moved on by so many places along an axis; what leaves it comes in at the other end."""
    _check_int("roll", "shift", shift)
    at = _axis("roll", x, axis) + 1
    shift %= x.shape[at]
    before = (slice(None),) * at
    return cat(x[*before, -shift:], x[*before, :-shift], axis=at) if shift else x


def cumsum(x: Row, axis: int = -1) -> Row:
    """The sums of x along an axis up to each place."""
    at = _axis("cumsum", x, axis) + 1
    size, before, step = x.shape[at], (slice(None),) * at, 1
    while step < size:  # each round adds sums of twice as many places
        x = x + pad(x[*before, : size - step], step, axis=at)
        step *= 2
    return x


def _zeros(like: Row, at: int, count: int) -> Row | None:
    """A value whose axis `at` has `count` zeros, and whose other axes are those of another value;
    None without any."""
    shape = tuple(count if i == at else n for i, n in enumerate(like.shape))[1:]
    if count == 0:
        return None
    if not isinstance(like, Symbol):
        return like.new_zeros(1, *shape)
    zeros = like.builder.apply("fill", attrs=(0.0, math.prod(shape)))
    return Symbol(like.builder, zeros.value, shape)


def chunk(value: Row, chunks: int, axis: int = -1) -> tuple[Row, ...]:
    """A value cut along an axis into parts of one size."""
    _check_int("chunk", "chunks", chunks, 1)
    at = _axis("chunk", value, axis) + 1
    size = value.shape[at]
    if size % chunks:
        fail(f"chunk: expected a divisor of the {size} features, got {chunks}")
    part, before = size // chunks, (slice(None),) * at
    return tuple(value[*before, i * part : (i + 1) * part] for i in range(chunks))


def _reduce(name: str, kind: str, x: Row, axis: int) -> Row:
    shape = _shape(name, x)
    at = _axis(name, x, axis)
    if len(shape) == 1:
        return apply(name, x)
    every = tuple(range(len(shape)))
    axes = Layout(shape, (every,), tuple(a for a in every if a != at))
    return reshape(_compute(kind, axes, x), *(1 if a == at else n for a, n in enumerate(shape)))


def _compute(kind: str, axes: Layout, *operands: Row) -> Row:
    symbol = next((o for o in operands if isinstance(o, Symbol)), None)
    if symbol is not None:
        return symbol.builder.einsum(axes, *operands, kind=kind)
    flat = [operand.flatten(1) for operand in operands]
    return by_axes.evaluate(kind, axes, flat).unflatten(1, axes.shape(axes.result))


def _shape(function: str, x: Any) -> tuple[int, ...]:
    """The sizes of a value along its axes, without the batch."""
    if not hasattr(x, "shape"):
        fail(f"{function}: expected a value of the step, got {x!r}")
    return tuple(x.shape[1:])


def _check_int(function: str, name: str, given: Any, least: int | None = None) -> None:
    whole = isinstance(given, int) and not isinstance(given, bool)
    if not whole or (least is not None and given < least):
        above = "" if least is None else f" of at least {least}"
        fail(f"{function}: {name}: expected an int{above}, got {given!r}")


def _axis(function: str, x: Row, axis: int) -> int:
    """The number of an axis among those beside the batch."""
    count = len(_shape(function, x))
    if isinstance(axis, bool) or not isinstance(axis, int):
        fail(f"{function}: axis: expected an int, got {axis!r}")
    at = axis + count if axis < 0 else axis - 1
    if not 0 <= at < count:
        fail(f"{function}: axis: expected 1 to {count}, or -{count} to -1, got {axis}; 0 is the "
             "batch, which a step does not mix")  # fmt: skip
    return at


def _show(shape: tuple[int, ...]) -> str:
    return f"(B, {', '.join(map(str, shape))})"
