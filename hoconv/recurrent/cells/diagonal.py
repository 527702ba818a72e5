"""Cells whose state is a row that each step scales feature by feature.

x is the step's input, h the state.
"""

from __future__ import annotations

from hoconv.recurrent.frontend.axes import cat, einsum, reshape
from hoconv.recurrent.frontend.cell import cell
from hoconv.recurrent.frontend.frame import Row
from hoconv.recurrent.frontend.functions import cos, exp, expm1, relu, sigmoid, sin, softplus, sqrt
from hoconv.recurrent.frontend.language import linear, parameter

Step = tuple[Row, dict[str, Row]]


@cell(state=("h",))
def min_gru(x: Row, h: Row) -> Step:
    """minGRU: Feng et al., Were RNNs All We Needed?, 2024."""
    z = sigmoid(linear("z", x))
    h = (1 - z) * h + z * linear("h", x)
    return h, dict(h=h)


@cell(state=("h",))
def min_lstm(x: Row, h: Row) -> Step:
    """minLSTM, whose gates sum to one: Feng et al., Were RNNs All We Needed?, 2024."""
    f, i = sigmoid(linear("f", x)), sigmoid(linear("i", x))
    h = f / (f + i) * h + i / (f + i) * linear("h", x)
    return h, dict(h=h)


@cell(state=("c",))
def sru(x: Row, c: Row) -> Step:
    """Lei et al., Simple Recurrent Units for Highly Parallelizable Recurrence, 2018. The highway's
    input is a map of x, so that its size may differ."""
    f = sigmoid(linear("f", x) + parameter("v_f", c) * c)
    r = sigmoid(linear("r", x) + parameter("v_r", c) * c)
    c = f * c + (1 - f) * linear("c", x, bias=False)
    return r * c + (1 - r) * linear("skip", x, bias=False), dict(c=c)


@cell(state=("h",))
def indrnn(x: Row, h: Row) -> Step:
    """Li et al., Independently Recurrent Neural Network, 2018."""
    h = relu(linear("h", x) + parameter("u", h) * h)
    return h, dict(h=h)


@cell(state={"h": "input_size"})
def rg_lru(x: Row, h: Row, *, input_size: int, c: float = 8.0) -> Step:
    """The Real-Gated Linear Recurrent Unit: De et al., Griffin, 2024."""
    r, i = sigmoid(linear("r", x, size=input_size)), sigmoid(linear("i", x, size=input_size))
    log_a = -c * r * softplus(parameter("decay", h))
    h = exp(log_a) * h + sqrt(-expm1(2 * log_a)) * (i * x)
    return h, dict(h=h)


@cell(state={"re": "states", "im": "states"})
def lru(x: Row, re: Row, im: Row, *, input_size: int, states: int) -> Step:
    """The Linear Recurrent Unit: Orvieto et al., Resurrecting Recurrent Neural Networks for Long
    Sequences, 2023. The states are complex numbers, real and imaginary parts."""
    size, phase = exp(-exp(parameter("nu", states))), exp(parameter("theta", states))
    a, b = size * cos(phase), size * sin(phase)
    taken = linear("B", x, size=(2, states), bias=False)
    taken = sqrt(1 - size * size)[:, None] * taken
    next_re = a * re - b * im + reshape(taken[:, :1], states)
    next_im = b * re + a * im + reshape(taken[:, 1:], states)
    # The real part of a complex product.
    y = linear("C", cat(next_re, next_im), size=input_size, bias=False)
    return y + parameter("D", x) * x, dict(re=next_re, im=next_im)


@cell(state={"h": ("input_size", "states")})
def mamba(x: Row, h: Row, *, input_size: int, states: int = 16) -> Step:
    """The selective state space of Mamba: Gu and Dao, 2023."""
    dt = softplus(linear("dt", x, size=input_size))
    b, c = (linear(name, x, size=states, bias=False) for name in "BC")
    a = -exp(parameter("A_log", h))
    h = exp(dt[..., None] * a) * h + einsum("d,n->dn", dt * x, b)
    return einsum("dn,n->d", h, c) + parameter("D", x, init=1.0) * x, dict(h=h)
