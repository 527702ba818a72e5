"""The functions of the language of cells that are not in the table of functions, and know no axes.

On tensors they compute, on symbols they append ops to a program. A number is a constant.

B batch, n features.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from hoconv.recurrent.frontend.axes import mean, reshape
from hoconv.recurrent.frontend.frame import Init, Row, apply, check_name, current_frame
from hoconv.recurrent.frontend.functions import (
    exp,
    log1p,
    maximum,
    rsqrt,
    sigmoid,
    softplus,
    sqrt,
    where,
)
from hoconv.recurrent.frontend.symbol import MOST_AXES, Symbol, fail

# Learned maps and vectors


def linear(
    name: str, *operands: Row, size: int | tuple[int, ...] | None = None, bias: bool = True
) -> Row:
    """A learned linear map of all operands: ``W [a, b, ...] + bias``.

    Args:
        name: the name of the map, unique in the cell; the layer's parameters are
            ``weight_<name>_l<layer>`` (size, sum of the operands' sizes) and
            ``bias_<name>_l<layer>`` (size).
        operands: any number of values, of any sizes; one of several axes is read as a row, the last
            axis fastest.
        size: of the result, an int or several, of its axes; by default the layer's hidden size.
        bias: whether a bias is added.

    Returns:
        (B, size).
    """
    return Linear(name, size=size, bias=bias)(*operands)


class Linear:
    """A learned linear map that a step uses any number of times, with the same weights::

        W = rnn.Linear("h")
        for _ in range(depth):
            h = h + rnn.tanh(W(h))

    Args:
        name, size, bias: as of :func:`linear`, which is one that is used once.
    """

    def __init__(
        self, name: str, *, size: int | tuple[int, ...] | None = None, bias: bool = True
    ) -> None:
        check_name("linear", name)
        if not isinstance(bias, bool):
            fail(f"linear({name!r}): bias: expected True or False, got {bias!r}")
        self.name = name
        self.bias = bias
        self.shape = None if size is None else _checked_shape(f"linear({name!r}): size", size)

    def __call__(self, *operands: Row) -> Row:
        """The map of values; the sizes of all together are the same at every use."""
        if not operands:
            fail(f"linear({self.name!r}): expected at least one operand")
        return current_frame("rnn.linear").linear(self, operands)


def parameter(
    name: str, like: Row | int | tuple[int, ...] | None = None, *, init: Init = None,
    learned: bool = True,
) -> Row:  # fmt: skip
    """Learned numbers, the same at every step.

    Args:
        name: the layer's parameter is ``<name>_l<layer>``.
        like: their size, the sizes of their axes, or a value whose sizes they take; by default the
            layer's hidden size. Size 1 is a scalar.
        init: the initial value of all elements, a tensor of them, or a function that writes them
            into the tensor that it is given, as those of torch.nn.init do; by default random, as
            weights are.
        learned: whether it is a parameter of the layer; else it is a buffer, which has no gradient.
    """
    check_name("parameter", name)
    frame = current_frame("rnn.parameter")
    if not isinstance(learned, bool):
        fail(f"parameter({name!r}): learned: expected True or False, got {learned!r}")
    number = isinstance(init, int | float) and not isinstance(init, bool)
    if init is not None and not number and not isinstance(init, Tensor) and (
        isinstance(init, Symbol) or not callable(init)
    ):  # fmt: skip
        fail(f"parameter({name!r}): init: expected a number, a tensor, or a function that fills "
             f"one, got {init!r}")  # fmt: skip
    if like is None and isinstance(init, Tensor):
        like = tuple(init.shape)
    if hasattr(like, "shape"):
        shape = tuple(like.shape[1:])  # pyright: ignore
    else:
        given = frame.hidden_size if like is None else like
        shape = _checked_shape(f"parameter({name!r}): like", given)
    if isinstance(init, Tensor) and tuple(init.shape) != shape:
        fail(f"parameter({name!r}): init: expected a tensor of shape {shape}, got "
             f"{tuple(init.shape)}")  # fmt: skip
    return frame.parameter(frame.prefix + name, shape, init, learned)


def _checked_shape(what: str, given: Any) -> tuple[int, ...]:
    shape = tuple(given) if isinstance(given, tuple | list) else (given,)
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            fail(f"{what}: expected an int of at least 1, or several in a tuple, got {given!r}")
    if not 1 <= len(shape) <= MOST_AXES:
        fail(f"{what}: expected 1 to {MOST_AXES} axes, got {given!r}")
    return shape


# Elementwise, composed of functions of the table


def gelu(x: Row) -> Row:
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016, the exact form)."""
    return 0.5 * x * (1 + apply("erf", x * math.sqrt(0.5)))


def silu(x: Row) -> Row:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def logsigmoid(x: Row) -> Row:
    """log(sigmoid(x))."""
    return -softplus(-x)


def logaddexp(a: Row, b: Row) -> Row:
    """log(exp(a) + exp(b)), of finite values."""
    return maximum(a, b) + log1p(exp(-abs(a - b)))


def clamp(x: Row, low: float, high: float) -> Row:
    """x, but at least low and at most high; high, where low is greater, as of ``torch.clamp``. The
    gradient passes from low to high inclusive."""
    for bound in (low, high):
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            fail(f"clamp: expected numbers low and high, got {bound!r}; write rnn.maximum(x, low) "
                 "or rnn.minimum(x, high)")  # fmt: skip
    if low > high:
        low = high
    return where(x < low, low, where(x > high, high, x))


def layer_norm(name: str, x: Row, eps: float = 1e-5) -> Row:
    """Layer normalisation (Ba, Kiros and Hinton 2016) along the last axis, with a learned gain and
    shift.

    The layer's parameters are ``<name>_gain_l<layer>``, at first 1, and ``<name>_shift_l<layer>``,
    at first 0, of the sizes of x.
    """
    check_name("layer_norm", name)
    centred = x - mean(x)
    normalized = centred / sqrt(mean(centred * centred) + eps)
    return normalized * parameter(f"{name}_gain", x, init=1.0) + parameter(
        f"{name}_shift", x, init=0.0
    )


def rms_norm(name: str, x: Row, eps: float = 1e-6) -> Row:
    """Normalisation by the root mean square along the last axis (Zhang and Sennrich 2019), with a
    learned gain: ``<name>_gain_l<layer>``, at first 1, of the sizes of x."""
    check_name("rms_norm", name)
    return x * rsqrt(mean(x * x) + eps) * parameter(f"{name}_gain", x, init=1.0)


def group_norm(name: str, x: Row, groups: int, eps: float = 1e-5) -> Row:
    """Normalisation of groups of neighbouring features of a row (Wu and He 2018), with a learned
    gain and shift as of :func:`layer_norm`."""
    check_name("group_norm", name)
    whole = isinstance(groups, int) and groups >= 1
    if len(x.shape) != 2 or not whole or x.shape[1] % groups:
        fail(f"group_norm({name!r}): expected a row, and a divisor of its features, got shape "
             f"{x.shape} and {groups} groups")  # fmt: skip
    apart = reshape(x, groups, x.shape[1] // groups)
    centred = apart - mean(apart)
    normalized = reshape(centred / sqrt(mean(centred * centred) + eps), x.shape[1])
    return normalized * parameter(f"{name}_gain", x, init=1.0) + parameter(
        f"{name}_shift", x, init=0.0
    )


# Noise, in training


def dropout(x: Row, p: float) -> Row:
    """In training zero with probability p, else x / (1 - p); x in evaluation.

    Drawn anew for every element and every step (Semeniuta et al. 2016), by a counter, so that every
    implementation draws the same.
    """
    _check_probability("dropout", p)
    frame = current_frame("rnn.dropout")
    if not frame.training or p == 0:
        return x
    if p == 1:
        return x * 0.0
    return where(frame.keep(1 - p, tuple(x.shape[1:])), x * (1 / (1 - p)), 0.0)


def zoneout(new: Row, old: Row, p: float) -> Row:
    """Keeps the old value with probability p; in evaluation the mean, p old + (1 - p) new.

    From Krueger et al., Zoneout: Regularizing RNNs by Randomly Preserving Hidden Activations, ICLR
    2017.
    """
    _check_probability("zoneout", p)
    frame = current_frame("rnn.zoneout")
    if p == 0:
        return new
    if not frame.training:
        return p * old + (1 - p) * new
    return where(frame.keep(p, tuple(new.shape[1:])), old, new)


def _check_probability(function: str, p: float) -> None:
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1:
        fail(f"{function}: expected a probability from 0 to 1, got {p!r}")
