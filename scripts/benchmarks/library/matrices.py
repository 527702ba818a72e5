"""Cells whose state is a matrix for each head, from keys to values, without products: their rows
are parts of the input, so that the recurrence alone is timed. And the functions of the package fla
(flash-linear-attention) that compute the same.

x is the step's input: queries, keys and values (q, k, v) of all heads, one after the other, then
gates. S is the state.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoconv import recurrent as rnn

Row = Any
STATE = {"S": ("heads", "keys", "values")}


def _parts(x: Row, heads: int, *sizes: int) -> list[Row]:
    """Returns parts of the input, each (heads, size)."""
    parts, at = [], 0
    for size in sizes:
        parts.append(rnn.reshape(x[:, at : at + heads * size], heads, size))
        at += heads * size
    return parts


def _replace(S: Row, k: Row, v: Row, beta: Row) -> Row:
    """Replaces a part beta of the value that a key has."""
    return S + rnn.einsum("hk,hv->hkv", k, beta * (v - rnn.einsum("hkv,hk->hv", S, k)))


@rnn.cell(state=STATE)
def gla(x: Row, S: Row, *, heads: int, keys: int, values: int) -> Row:
    """Gated linear attention: every key has a decay, in every step another."""
    q, k, v, a = _parts(x, heads, keys, keys, values, keys)
    S = rnn.sigmoid(a)[..., None] * S + rnn.einsum("hk,hv->hkv", k, v)
    return rnn.einsum("hkv,hk->hv", S, q * keys**-0.5), dict(S=S)


@rnn.cell(state=STATE)
def retention(x: Row, S: Row, *, heads: int, keys: int, values: int) -> Row:
    """A fixed decay for each head."""
    q, k, v = _parts(x, heads, keys, keys, values)
    # In bfloat16, powers of two are exact, and 1 less one of the smaller ones would be 1.
    lost = 2.0 ** -(5 + torch.arange(heads, dtype=torch.float64))
    decay = 1 - rnn.parameter("lost", init=lost[:, None, None], learned=False)
    S = decay * S + rnn.einsum("hk,hv->hkv", k, v)
    return rnn.einsum("hkv,hk->hv", S, q * keys**-0.5), dict(S=S)


@rnn.cell(state=STATE)
def delta(x: Row, S: Row, *, heads: int, keys: int, values: int) -> Row:
    """The delta rule."""
    q, k, v, beta = _parts(x, heads, keys, keys, values, 1)
    S = _replace(S, rnn.normalize(k), v, rnn.sigmoid(beta))
    return rnn.einsum("hkv,hk->hv", S, rnn.normalize(q) * keys**-0.5), dict(S=S)


@rnn.cell(state=STATE)
def gated_delta(x: Row, S: Row, *, heads: int, keys: int, values: int) -> Row:
    """The delta rule on a state with a decay for each head, in every step another."""
    q, k, v, beta, g = _parts(x, heads, keys, keys, values, 1, 1)
    S = _replace(rnn.sigmoid(g)[..., None] * S, rnn.normalize(k), v, rnn.sigmoid(beta))
    return rnn.einsum("hkv,hk->hv", S, rnn.normalize(q) * keys**-0.5), dict(S=S)


@dataclass(frozen=True)
class Kind:
    """A cell, and what its input has; there are as many values as keys.

    Attributes:
        wide, scalars: parts that have a feature for each key, and one feature, of each head.
        fla: the name of fla's operator.
        call_fla: calls its function on the parts, (B, T, heads, keys) and (B, T, heads).
    """

    cell: rnn.Cell
    wide: int
    scalars: int
    fla: str
    call_fla: Callable[..., tuple[Tensor, Any]]

    def count_features(self, heads: int, keys: int) -> int:
        """Returns the input's size."""
        return heads * (self.wide * keys + self.scalars)

    def load_fla(self) -> Callable[..., Tensor]:
        """Returns fla's function of the parts; its output is (B, T, heads, keys)."""
        chunk = getattr(importlib.import_module(f"fla.ops.{self.fla}"), f"chunk_{self.fla}")
        return lambda *parts: self.call_fla(chunk, *parts)[0]


def _call_delta(chunk: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Any:
    return chunk(q, k, v, beta=torch.sigmoid(beta), use_qk_l2norm_in_kernel=True)


def _call_gated_delta(
    chunk: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor
) -> Any:  # fmt: skip
    gates = {"g": F.logsigmoid(g), "beta": torch.sigmoid(beta)}
    return chunk(q, k, v, **gates, use_qk_l2norm_in_kernel=True)


# All scale q by keys**-0.5 unless told otherwise.
KINDS = {
    "gla": Kind(gla, 4, 0, "gla", lambda chunk, q, k, v, a: chunk(q, k, v, F.logsigmoid(a))),
    "retention": Kind(retention, 3, 0, "retention", lambda chunk, q, k, v: chunk(q, k, v)),
    "delta": Kind(delta, 3, 1, "delta_rule", _call_delta),
    "gated_delta": Kind(gated_delta, 3, 2, "gated_delta_rule", _call_gated_delta),
}


def has_fla() -> bool:
    return importlib.util.find_spec("fla") is not None
