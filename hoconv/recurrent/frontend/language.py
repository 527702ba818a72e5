"""The functions of the language of cells that are not in the table of functions.

On tensors they compute, on symbols they append ops to a program. Values are rows of features,
(B, n). Operands have the same size, or size 1, which is repeated. A number is a constant.

B batch, n features.
"""

from __future__ import annotations

import math
from typing import Any

from hoconv.recurrent.frontend.frame import Row, apply, current_frame
from hoconv.recurrent.frontend.functions import exp, max, sigmoid, sqrt, sum, where
from hoconv.recurrent.frontend.symbol import Symbol, fail
from hoconv.recurrent.ir import evaluate


def _checked_name(function: str, name: Any) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        fail(f"{function}: expected a name as its first argument, of letters, digits and _; "
             f"got {name!r}")  # fmt: skip


# Learned maps and vectors


def linear(name: str, *operands: Row, size: int | None = None, bias: bool = True) -> Row:
    """A learned linear map of all operands: ``W [a, b, ...] + bias``.

    Args:
        name: the name of the map, unique in the cell; the layer's parameters are
            ``weight_<name>_l<layer>`` (size, sum of the operands' sizes) and
            ``bias_<name>_l<layer>`` (size).
        operands: any number of values (B, n), of any sizes.
        size: of the result; by default the layer's hidden size.
        bias: whether a bias is added.

    Returns:
        (B, size).
    """
    _checked_name("linear", name)
    if not operands:
        fail(f"linear({name!r}): expected at least one operand")
    return current_frame("linear").linear(name, operands, size, bias)


def parameter(name: str, like: Row | int | None = None, *, init: float | None = None) -> Row:
    """A learned vector, the same at every step.

    Args:
        name: the layer's parameter is ``<name>_l<layer>``.
        like: its size, or a value whose size it takes; by default the layer's hidden size. Size 1
            is a scalar.
        init: the initial value of all elements; by default random, as weights are.
    """
    _checked_name("parameter", name)
    size = like if like is None or isinstance(like, int) else like.shape[-1]
    if size is not None and size < 1:
        fail(f"parameter({name!r}): like: expected a size of at least 1, got {size}")
    return current_frame("parameter").parameter(name, size, init)


# Elementwise, composed of functions of the table


def gelu(x: Row) -> Row:
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016, the exact form)."""
    return 0.5 * x * (1 + apply("erf", x * math.sqrt(0.5)))


def silu(x: Row) -> Row:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def clamp(x: Row, low: float, high: float) -> Row:
    """x, but at least low and at most high; high, where low is greater, as of ``torch.clamp``. The
    gradient passes from low to high inclusive."""
    if low > high:
        low = high
    return where(x < low, low, where(x > high, high, x))


# Over the features of a row


def mean(x: Row) -> Row:
    """The mean of a row's features, (B, 1)."""
    return sum(x) * (1 / x.shape[-1])


def softmax(x: Row) -> Row:
    """exp(x) over its sum, of the features of a row."""
    e = exp(x - max(x))
    return e / sum(e)


def layer_norm(name: str, x: Row, eps: float = 1e-5) -> Row:
    """Layer normalisation (Ba, Kiros and Hinton 2016) with a learned gain and shift.

    The layer's parameters are ``<name>_gain_l<layer>``, at first 1, and ``<name>_shift_l<layer>``,
    at first 0, of the size of x.
    """
    centred = x - mean(x)
    normalized = centred / sqrt(mean(centred * centred) + eps)
    return normalized * parameter(f"{name}_gain", x, init=1.0) + parameter(
        f"{name}_shift", x, init=0.0
    )


def cat(*values: Row) -> Row:
    """The features of all values beside each other; value[:, start:stop] takes some out."""
    if not values:
        fail("cat: expected at least one value")
    symbol = next((v for v in values if isinstance(v, Symbol)), None)
    return evaluate.cat(values) if symbol is None else symbol.builder.apply("cat", *values)


def chunk(value: Row, chunks: int) -> tuple[Row, ...]:
    """The features of a value cut into parts of one size."""
    size = value.shape[-1]
    if chunks < 1 or size % chunks:
        fail(f"chunk: expected a divisor of the {size} features, got {chunks}")
    part = size // chunks
    return tuple(value[:, i * part : (i + 1) * part] for i in range(chunks))


# Noise, in training


def dropout(x: Row, p: float) -> Row:
    """In training zero with probability p, else x / (1 - p); x in evaluation.

    Drawn anew for every element and every step (Semeniuta et al. 2016), by a counter, so that every
    implementation draws the same.
    """
    _check_probability("dropout", p)
    frame = current_frame("dropout")
    if not frame.training or p == 0:
        return x
    if p == 1:
        return x * 0.0
    return where(frame.keep(1 - p, x.shape[-1]), x * (1 / (1 - p)), 0.0)


def zoneout(new: Row, old: Row, p: float) -> Row:
    """Keeps the old value with probability p; in evaluation the mean, p old + (1 - p) new.

    From Krueger et al., Zoneout: Regularizing RNNs by Randomly Preserving Hidden Activations, ICLR
    2017.
    """
    _check_probability("zoneout", p)
    frame = current_frame("zoneout")
    if p == 0:
        return new
    if not frame.training:
        return p * old + (1 - p) * new
    return where(frame.keep(p, new.shape[-1]), old, new)


def _check_probability(function: str, p: float) -> None:
    if not 0 <= p <= 1:
        fail(f"{function}: expected a probability from 0 to 1, got {p!r}")
