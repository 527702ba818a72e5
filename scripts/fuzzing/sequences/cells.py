"""Recurrent cells of one's own, with options and with state sizes of every sort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hoconv import recurrent as rnn


@rnn.cell(state=("h",))
def leaky(x, h, *, p=0.1):
    rate = rnn.sigmoid(rnn.parameter("rate"))
    new = (1 - rate) * h + rate * rnn.tanh(rnn.linear("h", x, h))
    h = rnn.zoneout(new, h, p)
    return h, dict(h=h)


@rnn.cell(state={"h": "hidden_size", "memory": "slots"})
def writer(x, h, memory, *, slots=2):
    where = rnn.softmax(rnn.linear("where", x, h, size=slots))
    what = rnn.linear("what", x, h, size=1)
    memory = memory + where * (what - memory)
    h = rnn.tanh(rnn.linear("h", x, h, memory))
    return h, dict(h=h, memory=memory)


@rnn.cell(state={"h": "hidden_size", "seen": "input_size"})
def seeing(x, h, seen):
    seen = 0.5 * seen + 0.5 * x
    h = rnn.tanh(rnn.linear("h", seen, h))
    return h, dict(h=h, seen=seen)


@rnn.cell(state=("h",))
def scaled(x, h, *, factors=(0.5,)):
    h = rnn.tanh(rnn.linear("h", x, h))
    for factor in factors:
        h = h * factor
    return h, dict(h=h)


@rnn.cell(state=("h",))
def without_products(x, h):
    gain = rnn.parameter("gain", h)
    h = rnn.tanh(gain * h + rnn.sum(x))
    return h, dict(h=h)


@rnn.cell(state=("h",))
def without_parameters(x, h):
    h = 0.5 * h + rnn.mean(x)
    return h, dict(h=h)


# A cell, and a function that makes the value of each of its options.
CELLS: tuple[tuple[rnn.Cell, dict[str, Callable[[], Any]]], ...] = (
    (leaky, {"p": lambda: 0.3}),
    (leaky, {}),
    (writer, {"slots": lambda: 3}),
    (seeing, {}),
    (scaled, {"factors": lambda: [0.5, 1.5]}),
    (without_products, {}),
    (without_parameters, {}),
)
