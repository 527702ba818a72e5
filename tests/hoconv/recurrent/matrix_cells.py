"""Cells with matrix states that the library does not have."""

from __future__ import annotations

from typing import Any

from hoconv import recurrent as rnn

H, K, V = 2, 5, 4


def _vectors(x: Any) -> list[Any]:
    sizes = {"q": (H, K), "k": (H, K), "v": (H, V)}
    return [rnn.linear(name, x, size=size) for name, size in sizes.items()]


@rnn.cell(state={"S": (H, V, K)})
def turned(x: Any, S: Any) -> Any:
    """Keys are the last axis."""
    q, k, v = _vectors(x)
    S = 0.9 * S + rnn.einsum("hv,hk->hvk", v - rnn.einsum("hvk,hk->hv", S, k), k)
    return rnn.einsum("hvk,hk->hv", S, q), dict(S=S)


@rnn.cell(state={"S": (K, V)})
def one_head(x: Any, S: Any) -> Any:
    k, v = rnn.linear("k", x, size=K), rnn.linear("v", x, size=V)
    S = rnn.tanh(S + rnn.einsum("k,v->kv", k, v))
    return rnn.einsum("kv,k->v", S, k), dict(S=S)


@rnn.cell(state={"S": (H, K, V), "M": (H, K, V), "s": (H, V)})
def momentum(x: Any, S: Any, M: Any, s: Any) -> Any:
    """States that are next states of each other, and a parameter as large as a state."""
    q, k, v = _vectors(x)
    s = 0.5 * s + v
    error = rnn.einsum("hkv,hk->hv", S, k) - s
    following = 0.8 * M - rnn.einsum("hk,hv->hkv", k, error) * rnn.parameter("rate", S)
    return rnn.einsum("hkv,hk->hv", S, q) + s, dict(S=S + following, M=S, s=s)


@rnn.cell(state={"S": (H, K, V)})
def noisy(x: Any, S: Any) -> Any:
    q, k, v = _vectors(x)
    new = S + rnn.einsum("hk,hv->hkv", rnn.dropout(k, 0.3), rnn.dropout(v, 0.4))
    S = rnn.zoneout(new, S, 0.2)
    return rnn.einsum("hkv,hk->hv", S, rnn.dropout(q, 0.1)), dict(S=S)


@rnn.cell(state={"S": (H, K, V)})
def both_ways(x: Any, S: Any) -> Any:
    """It reads sums over columns and over heads, too, but no state needs them."""
    q, k, v = _vectors(x)
    S = rnn.sigmoid(rnn.parameter("decay", k))[..., None] * S + rnn.einsum("hk,hv->hkv", k, v)
    keys = rnn.einsum("hkv,hv->hk", S, v) + rnn.sum(S, axis=-1)[..., 0]
    heads = rnn.tanh(rnn.einsum("hkv,hv->k", S, v))
    values = rnn.einsum("hkv,hk->hv", S, q)
    return dict(keys=keys, heads=heads, values=values), dict(S=S)


@rnn.cell(state={"S": (H, K, V), "gate": (H, 1)})
def normalised(x: Any, S: Any, gate: Any) -> Any:
    """A state needs sums over columns: within a head alone features are independent."""
    q, k, v = _vectors(x)
    read = rnn.normalize(rnn.einsum("hkv,hk->hv", S, k) + v)
    keys = rnn.einsum("hkv,hv->hk", S, read)
    gate = rnn.sigmoid(gate + rnn.sum(read * v))
    S = gate[..., None] * S + rnn.einsum("hk,hv->hkv", k - rnn.stop_gradient(keys), read)
    return rnn.einsum("hkv,hk->hv", S, q), dict(S=S, gate=gate)


@rnn.cell(state={"S": (H, K, V)})
def picky(x: Any, S: Any) -> Any:
    """Conditions of a row, of keys and of columns."""
    q, k, v = _vectors(x)
    add = rnn.where((k > 0)[..., None], rnn.einsum("hk,hv->hkv", k, v), 0.5 * S)
    S = rnn.where((v < 1)[:, :, None], add, -S)
    S = rnn.where(rnn.max(x)[..., None, None] > 1, S, 0.9 * S + 0.1)
    return rnn.einsum("hkv,hk->hv", S, q), dict(S=S)


CELLS = [turned, one_head, momentum, noisy, both_ways, normalised, picky]
