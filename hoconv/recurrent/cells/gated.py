"""Gated cells of rows, with products of the state in every step.

x is the step's input, h the hidden and c the cell state.
"""

from __future__ import annotations

from hoconv.recurrent.frontend.cell import cell
from hoconv.recurrent.frontend.frame import Row
from hoconv.recurrent.frontend.functions import exp, relu, sigmoid, tanh
from hoconv.recurrent.frontend.language import layer_norm, linear, parameter

Step = tuple[Row, dict[str, Row]]

# For each block of rows of torch.nn's weights, the names of the linear maps of x and of h.
LSTM_GATES = (("i", "i"), ("f", "f"), ("g", "g"), ("o", "o"))
GRU_GATES = (("r", "r"), ("z", "z"), ("n", "m"))


@cell(state=("h", "c"))
def lstm(x: Row, h: Row, c: Row, *, bias: bool = True) -> Step:
    """Hochreiter and Schmidhuber 1997 with the forget gate of Gers et al. 2000; as nn.LSTM."""
    i = sigmoid(linear("i", x, h, bias=bias))
    f = sigmoid(linear("f", x, h, bias=bias))
    g = tanh(linear("g", x, h, bias=bias))
    o = sigmoid(linear("o", x, h, bias=bias))
    c = f * c + i * g
    h = o * tanh(c)
    return h, dict(h=h, c=c)


@cell(state=("h",))
def gru(x: Row, h: Row, *, bias: bool = True) -> Step:
    """Cho et al. 2014 in the variant of nn.GRU: the reset gate is applied after the product."""
    r = sigmoid(linear("r", x, h, bias=bias))
    z = sigmoid(linear("z", x, h, bias=bias))
    n = tanh(linear("n", x, bias=bias) + r * linear("m", h, bias=bias))
    h = (1 - z) * n + z * h
    return h, dict(h=h)


@cell(state=("h",))
def elman(x: Row, h: Row) -> Step:
    """Elman, Finding Structure in Time, 1990, with tanh; as nn.RNN."""
    h = tanh(linear("h", x, h))
    return h, dict(h=h)


@cell(state=("h", "c"))
def peephole_lstm(x: Row, h: Row, c: Row) -> Step:
    """Gers, Schraudolph and Schmidhuber, Learning Precise Timing with LSTM, 2002."""
    i = sigmoid(linear("i", x, h) + parameter("peephole_i", c) * c)
    f = sigmoid(linear("f", x, h) + parameter("peephole_f", c) * c)
    c = f * c + i * tanh(linear("g", x, h))
    o = sigmoid(linear("o", x, h) + parameter("peephole_o", c) * c)
    h = o * tanh(c)
    return h, dict(h=h, c=c)


@cell(state=("h", "c"))
def layernorm_lstm(x: Row, h: Row, c: Row) -> Step:
    """Ba, Kiros and Hinton, Layer Normalization, 2016, normalising every gate and the cell."""
    i = sigmoid(layer_norm("norm_i", linear("i", x, h, bias=False)))
    f = sigmoid(layer_norm("norm_f", linear("f", x, h, bias=False)))
    g = tanh(layer_norm("norm_g", linear("g", x, h, bias=False)))
    o = sigmoid(layer_norm("norm_o", linear("o", x, h, bias=False)))
    c = f * c + i * g
    h = o * tanh(layer_norm("norm_c", c))
    return h, dict(h=h, c=c)


@cell(state=("h", "c"))
def coupled_lstm(x: Row, h: Row, c: Row) -> Step:
    """Coupled input and forget gates: Greff et al., LSTM: A Search Space Odyssey, 2017."""
    f = sigmoid(linear("f", x, h))
    c = f * c + (1 - f) * tanh(linear("g", x, h))
    h = sigmoid(linear("o", x, h)) * tanh(c)
    return h, dict(h=h, c=c)


@cell(state=("h",))
def minimal_gated(x: Row, h: Row) -> Step:
    """Zhou et al., Minimal Gated Unit for Recurrent Neural Networks, 2016."""
    f = sigmoid(linear("f", x, h))
    h = (1 - f) * h + f * tanh(linear("h", x, f * h))
    return h, dict(h=h)


@cell(state={"h": "proj_size", "c": "hidden_size"})
def projected_lstm(x: Row, h: Row, c: Row, *, proj_size: int, bias: bool = True) -> Step:
    """Sak, Senior and Beaufays, LSTM Architectures for Large Scale Acoustic Modeling, 2014."""
    i = sigmoid(linear("i", x, h, bias=bias))
    f = sigmoid(linear("f", x, h, bias=bias))
    g = tanh(linear("g", x, h, bias=bias))
    o = sigmoid(linear("o", x, h, bias=bias))
    c = f * c + i * g
    h = linear("projection", o * tanh(c), size=proj_size, bias=False)
    return h, dict(h=h, c=c)


@cell(
    inputs={"mask": "input_size", "gap": "input_size"},
    state={"h": "hidden_size", "last": "input_size"},
)
def gru_d(x: Row, mask: Row, gap: Row, h: Row, last: Row) -> Step:
    """GRU-D, for values that are missing: Che et al., Recurrent Neural Networks for Multivariate
    Time Series with Missing Values, 2018. Where `mask` is 1 there is a value, `gap` is the time
    since the one before; between values x and h decay."""
    fades = exp(-relu(parameter("decay_x", x) * gap + parameter("decay_x_bias", x)))
    mean = parameter("mean", x, init=0.0)
    last = mask * x + (1 - mask) * last
    x = mask * x + (1 - mask) * (fades * last + (1 - fades) * mean)
    h = exp(-relu(linear("decay_h", gap))) * h
    r, z = sigmoid(linear("r", x, h, mask)), sigmoid(linear("z", x, h, mask))
    h = (1 - z) * h + z * tanh(linear("h", x, r * h, mask))
    return h, dict(h=h, last=last)
