"""Cells whose state is a matrix for each head, from keys to values.

x is the step's input, S the state, q, k and v queries, keys and values.
"""

from __future__ import annotations

import torch

from hoconv.recurrent.frontend.axes import einsum, normalize, sum
from hoconv.recurrent.frontend.cell import cell
from hoconv.recurrent.frontend.frame import Row
from hoconv.recurrent.frontend.functions import exp, maximum, sigmoid, softplus
from hoconv.recurrent.frontend.language import linear, logsigmoid, parameter

Step = tuple[Row, dict[str, Row]]
STATE = {"S": ("heads", "keys", "values")}


def _project(names: str, x: Row, *size: int) -> list[Row]:
    return [linear(name, x, size=size, bias=False) for name in names]


@cell(state=STATE)
def gla(x: Row, S: Row, *, heads: int, keys: int, values: int, root: float = 16.0) -> Step:
    """Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, 2023."""
    q, k = _project("qk", x, heads, keys)
    (v,) = _project("v", x, heads, values)
    a = exp(logsigmoid(linear("a", x, size=(heads, keys))) * (1 / root))
    S = a[..., None] * S + einsum("hk,hv->hkv", k, v)
    return einsum("hkv,hk->hv", S, q * keys**-0.5), dict(S=S)


@cell(state=STATE)
def retnet(x: Row, S: Row, *, heads: int, keys: int, values: int) -> Step:
    """Sun et al., Retentive Network, 2023, without its rotation of keys: heads decay at fixed
    rates."""
    q, k = _project("qk", x, heads, keys)
    (v,) = _project("v", x, heads, values)
    # In half precision, powers of two are exact, and 1 less one of the smaller ones would be 1.
    lost = 2.0 ** -(5 + torch.arange(heads, dtype=torch.float64))
    S = (1 - parameter("lost", init=lost[:, None, None], learned=False)) * S
    S = S + einsum("hk,hv->hkv", k * keys**-0.5, v)
    return einsum("hkv,hk->hv", S, q), dict(S=S)


@cell(state=STATE)
def hgrn2(x: Row, S: Row, *, heads: int, keys: int, values: int) -> Step:
    """Qin et al., HGRN2: Gated Linear RNNs with State Expansion, 2024: what is forgotten is the
    key."""
    (q,), (v,) = _project("q", x, heads, keys), _project("v", x, heads, values)
    f = sigmoid(linear("f", x, size=(heads, keys)))
    S = f[..., None] * S + einsum("hk,hv->hkv", 1 - f, v)
    return einsum("hkv,hk->hv", S, q), dict(S=S)


@cell(state=STATE)
def mamba2(x: Row, S: Row, *, heads: int, keys: int, values: int) -> Step:
    """The scalar state space of Mamba-2, of one group: Dao and Gu, Transformers are SSMs, 2024."""
    b, c = _project("BC", x, keys)
    (v,) = _project("v", x, heads, values)
    dt = softplus(linear("dt", x, size=(heads, 1)))
    a = exp(-dt * exp(parameter("A_log", (heads, 1))))
    S = a[..., None] * S + einsum("k,hv->hkv", b, dt * v)
    return einsum("hkv,k->hv", S, c) + parameter("D", (heads, 1), init=1.0) * v, dict(S=S)


@cell(state={**STATE, "n": ("heads", "keys"), "m": ("heads", 1)})
def mlstm(x: Row, S: Row, n: Row, m: Row, *, heads: int, keys: int, values: int) -> Step:
    """The matrix LSTM of Beck et al., xLSTM, 2024; m is the logarithm that keeps gates finite."""
    q, k = _project("qk", x, heads, keys)
    (v,) = _project("v", x, heads, values)
    k = k * keys**-0.5
    i, f = linear("i", x, size=(heads, 1)), logsigmoid(linear("f", x, size=(heads, 1)))
    before, m = m, maximum(f + m, i)
    f, i = exp(f + before - m), exp(i - m)
    S = f[..., None] * S + einsum("hk,hv->hkv", k, i * v)
    n = f * n + i * k
    read = einsum("hkv,hk->hv", S, q) / maximum(abs(sum(n * q)), exp(-m))
    return sigmoid(linear("o", x, size=(heads, values))) * read, dict(S=S, n=n, m=m)


@cell(state=STATE)
def delta_net(x: Row, S: Row, *, heads: int, keys: int, values: int) -> Step:
    """Schlag, Irie and Schmidhuber, Linear Transformers Are Secretly Fast Weight Programmers, 2021:
    a value replaces what its key had."""
    q, k = (normalize(of) for of in _project("qk", x, heads, keys))
    (v,) = _project("v", x, heads, values)
    beta = sigmoid(linear("beta", x, size=(heads, 1)))
    S = S + einsum("hk,hv->hkv", k, beta * (v - einsum("hkv,hk->hv", S, k)))
    return einsum("hkv,hk->hv", S, q), dict(S=S)


@cell(state=STATE)
def gated_delta_net(x: Row, S: Row, *, heads: int, keys: int, values: int) -> Step:
    """Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024: the delta rule on a state that
    decays, as that of Mamba-2 does."""
    q, k = (normalize(of) for of in _project("qk", x, heads, keys))
    (v,) = _project("v", x, heads, values)
    beta = sigmoid(linear("beta", x, size=(heads, 1)))
    decay = exp(parameter("A_log", (heads, 1))) * softplus(linear("dt", x, size=(heads, 1)))
    S = exp(-decay)[..., None] * S
    S = S + einsum("hk,hv->hkv", k, beta * (v - einsum("hkv,hk->hv", S, k)))
    return einsum("hkv,hk->hv", S, q), dict(S=S)


@cell(state=STATE)
def rwkv7(x: Row, S: Row, *, heads: int, keys: int, values: int) -> Step:
    """The time mixing of RWKV-7, without its token shift: Peng et al., RWKV-7 "Goose", 2025."""
    r, k = _project("rk", x, heads, keys)
    (v,) = _project("v", x, heads, values)
    w, a = (sigmoid(linear(name, x, size=(heads, keys))) for name in "wa")
    w = exp(-0.6065306597126334 * w)  # e^-0.5: it decays to 0.545 at most
    removed = normalize(k * parameter("removal", (heads, keys)))
    k = k * (1 + (a - 1) * parameter("replacement", (heads, keys)))
    answer = einsum("hkv,hk->hv", S, removed)
    S = w[..., None] * S - einsum("hk,hv->hkv", a * removed, answer) + einsum("hk,hv->hkv", k, v)
    bonus = sum(r * k * parameter("bonus", (heads, keys))) * v
    return einsum("hkv,hk->hv", S, r) + bonus, dict(S=S)
