"""Published recurrent cells, written in the language of :mod:`hoconv.recurrent`."""

from __future__ import annotations

from typing import Any

from hoconv import recurrent as rnn
from hoconv.recurrent.cells import indrnn

Row = Any


@rnn.cell(state=("c",))
def sru(x: Row, c: Row) -> Row:
    """Lei et al., Simple Recurrent Units for Highly Parallelizable Recurrence, EMNLP 2018."""
    f = rnn.sigmoid(rnn.linear("f", x) + rnn.parameter("v_f") * c)
    r = rnn.sigmoid(rnn.linear("r", x) + rnn.parameter("v_r") * c)
    c = f * c + (1 - f) * rnn.linear("w", x)
    return r * c + (1 - r) * x, dict(c=c)


@rnn.cell(state=("h", "c"))
def multiplicative_lstm(x: Row, h: Row, c: Row) -> Row:
    """Krause et al., Multiplicative LSTM for sequence modelling, 2016."""
    m = rnn.linear("mx", x) * rnn.linear("mh", h)
    i, f, o = (rnn.sigmoid(rnn.linear(gate, x, m)) for gate in ("i", "f", "o"))
    c = f * c + i * rnn.tanh(rnn.linear("g", x, m))
    h = o * rnn.tanh(c)
    return h, dict(h=h, c=c)


@rnn.cell(state=("h", "c", "n", "m"))
def slstm(x: Row, h: Row, c: Row, n: Row, m: Row) -> Row:
    """Beck et al., xLSTM, NeurIPS 2024: scalar memory, exponential gates, four heads."""

    def gate(name: str) -> Row:
        heads = rnn.chunk(h, 4)
        size = heads[0].shape[-1]
        recurrent = [
            rnn.linear(f"{name}{k}", head, size=size, bias=False) for k, head in enumerate(heads)
        ]
        return rnn.linear(name, x) + rnn.cat(*recurrent)

    z, i, f, o = (gate(name) for name in ("z", "i", "f", "o"))
    log_f = -rnn.softplus(-f)
    new_m = rnn.maximum(log_f + m, i)
    kept, added = rnn.exp(log_f + m - new_m), rnn.exp(i - new_m)
    c = kept * c + added * rnn.tanh(z)
    n = kept * n + added
    h = rnn.sigmoid(o) * c / rnn.maximum(n, 1e-6)
    return h, dict(h=h, c=c, n=n, m=new_m)


@rnn.cell(state=("s",))
def recurrent_highway(x: Row, s: Row) -> Row:
    """Zilly et al., Recurrent Highway Networks, ICML 2017, of depth 3 with coupled gates."""
    for depth in range(3):
        read = (x, s) if depth == 0 else (s,)
        h = rnn.tanh(rnn.linear(f"h{depth}", *read))
        t = rnn.sigmoid(rnn.linear(f"t{depth}", *read))
        s = h * t + s * (1 - t)
    return s, dict(s=s)


@rnn.cell(state=("h",))
def layernorm_gru(x: Row, h: Row) -> Row:
    """A GRU whose gates and candidate are normalised; Ba, Kiros and Hinton 2016."""
    r = rnn.sigmoid(rnn.layer_norm("r_norm", rnn.linear("r", x, h)))
    z = rnn.sigmoid(rnn.layer_norm("z_norm", rnn.linear("z", x, h)))
    n = rnn.tanh(rnn.layer_norm("n_norm", rnn.linear("nx", x) + r * rnn.linear("nh", h)))
    h = (1 - z) * n + z * h
    return h, dict(h=h)


@rnn.cell(state=("h", "c", "inner"))
def nested_lstm(x: Row, h: Row, c: Row, inner: Row) -> Row:
    """Moniz and Krueger, Nested LSTMs, ACML 2017: the memory of an LSTM is an LSTM."""

    def gates(name: str, x: Row, h: Row) -> tuple[Row, ...]:
        i, f, o = (rnn.sigmoid(rnn.linear(f"{name}_{gate}", x, h)) for gate in ("i", "f", "o"))
        return i, f, o, rnn.tanh(rnn.linear(f"{name}_g", x, h))

    i, f, o, g = gates("outer", x, h)
    own_i, own_f, own_o, own_g = gates("inner", i * g, f * c)
    inner = own_f * inner + own_i * own_g
    c = own_o * rnn.tanh(inner)
    h = o * rnn.tanh(c)
    return h, dict(h=h, c=c, inner=inner)


CELLS = (
    indrnn, sru, multiplicative_lstm, slstm, recurrent_highway, layernorm_gru, nested_lstm,
)  # fmt: skip
