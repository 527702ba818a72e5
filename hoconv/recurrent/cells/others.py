"""Cells of other kinds: exponential gates, blocks, oscillators, spikes.

x is the step's input.
"""

from __future__ import annotations

from hoconv.recurrent.frontend.axes import chunk, einsum, reshape, softmax
from hoconv.recurrent.frontend.cell import cell
from hoconv.recurrent.frontend.frame import Row
from hoconv.recurrent.frontend.functions import (
    exp,
    maximum,
    sigmoid,
    straight_through,
    tanh,
    where,
)
from hoconv.recurrent.frontend.language import Linear, linear, logsigmoid, parameter, rms_norm, silu

Step = tuple[Row, dict[str, Row]]


@cell(state=("c", "n", "h", "m"))
def slstm(x: Row, c: Row, n: Row, h: Row, m: Row) -> Step:
    """The scalar LSTM of Beck et al., xLSTM, 2024; m is the logarithm that keeps gates finite."""
    i, f = linear("i", x, h), logsigmoid(linear("f", x, h))
    before, m = m, maximum(f + m, i)
    f, i = exp(f + before - m), exp(i - m)
    c = f * c + i * tanh(linear("z", x, h))
    n = f * n + i
    h = sigmoid(linear("o", x, h)) * c / n
    return h, dict(c=c, n=n, h=h, m=m)


@cell(constants={"memory": ("slots", "width")}, state=("h",))
def attention(x: Row, memory: Row, h: Row, *, slots: int, width: int) -> Step:
    """A GRU that reads a memory before each step, as the decoder of Bahdanau, Cho and Bengio 2015;
    it compares its state with the slots by the product of Luong et al. 2015."""
    scores = einsum("sw,w->s", memory, linear("query", h, size=width))
    read = einsum("sw,s->w", memory, softmax(scores, axis=-1))
    r, z = sigmoid(linear("r", x, read, h)), sigmoid(linear("z", x, read, h))
    h = (1 - z) * tanh(linear("n", x, read, r * h)) + z * h
    return h, dict(h=h)


@cell(state=("h",))
def block_gru(x: Row, h: Row, *, hidden_size: int, blocks: int = 8) -> Step:
    """The recurrent model of DreamerV3 (Hafner et al. 2023): a GRU whose map of the state consists
    of blocks, each of which reads all of x."""
    part = hidden_size // blocks
    read = silu(rms_norm("norm_x", linear("x", x)))
    weight = parameter("weight_h", (blocks, part, 3 * part))
    mixed = einsum("bi,bij->bj", reshape(h, blocks, part), weight)
    mixed = mixed + linear("read", read, size=(blocks, 3 * part))
    r, c, u = (reshape(of, hidden_size) for of in chunk(mixed, 3))
    u = sigmoid(u - 1)
    h = u * tanh(sigmoid(r) * c) + (1 - u) * h
    return h, dict(h=h)


@cell(state=("h",))
def tied_rhn(x: Row, h: Row, *, depth: int = 5) -> Step:
    """Recurrent Highway Networks: Zilly et al. 2017, with the same weights at every depth, and
    gates that sum to one."""
    H, T = Linear("h"), Linear("t")
    for d in range(depth):
        new, gate = H(h), T(h)
        if d == 0:
            new, gate = new + linear("x_h", x, bias=False), gate + linear("x_t", x, bias=False)
        gate = sigmoid(gate)
        h = gate * tanh(new) + (1 - gate) * h
    return h, dict(h=h)


@cell(state=("y", "z"))
def cornn(
    x: Row, y: Row, z: Row, *, dt: float = 0.05, gamma: float = 2.7, eps: float = 4.7
) -> Step:
    """Rusch and Mishra, Coupled Oscillatory Recurrent Neural Network, 2021: places and speeds."""
    z = z + dt * (tanh(linear("z", x, y, z)) - gamma * y - eps * z)
    y = y + dt * z
    return y, dict(y=y, z=z)


@cell(state=("v", "s"))
def lif(x: Row, v: Row, s: Row, *, beta: float = 0.9, slope: float = 5.0) -> Step:
    """Leaky integrate-and-fire neurons, whose spikes reset them and have the gradient of a fast
    sigmoid: Neftci, Mostafa and Zenke, Surrogate Gradient Learning, 2019."""
    v = beta * v * (1 - s) + linear("v", x, s)
    u = slope * (v - 1)
    s = straight_through(where(u >= 0, 1.0, 0.0), u / (1 + abs(u)))
    return s, dict(v=v, s=s)
