"""Cells drawn at random from the whole language, the same ones for a seed every time."""

from __future__ import annotations

import random
from typing import Any

from hoconv import recurrent as rnn
from hoconv.recurrent.cell import BoundCell, Cell


def random_cell(seed: int) -> BoundCell:
    """A cell of one to three states of several sizes, whose values stay moderate."""
    draw = random.Random(seed)
    sizes = {f"s{i}": draw.choice((2, 3, 4, 6)) for i in range(draw.choice((1, 2, 2, 3)))}
    arguments = ", ".join(("x", *sizes))
    count = draw.randint(4, 14)

    def function(*rows: Any) -> Any:
        return _run(random.Random(seed + 1000), rows, sizes, count)

    # A cell has named arguments, as many as states.
    scope: dict[str, Any] = {"function": function}
    exec(f"def random_{seed}({arguments}):\n    return function({arguments})", scope)
    made: Cell = rnn.cell(state=sizes)(scope[f"random_{seed}"])
    return made.bind(3, 4, {})


def _run(draw: random.Random, rows: Any, sizes: dict[str, int], count: int) -> Any:
    values = list(rows)
    names = iter(range(10_000))

    def some() -> Any:
        return draw.choice(values)

    def size(row: Any) -> int:
        return row.shape[-1]

    def partner(row: Any) -> Any:
        """Something that fits beside a row."""
        fitting = [v for v in values if size(v) in (1, size(row))]
        kind = draw.random()
        if kind < 0.15:
            return draw.choice((0.5, 2.0, -1.0))
        if kind < 0.3:
            return rnn.parameter(f"p{next(names)}", draw.choice((1, row)))
        return draw.choice(fitting)

    def linear(n: int) -> Any:
        operands = [some() for _ in range(draw.choice((1, 2, 2, 3)))]
        return rnn.linear(f"w{next(names)}", *operands, size=n, bias=draw.random() < 0.6)

    def step() -> Any:
        a = some()
        b = partner(a)
        return draw.choice(
            (
                lambda: linear(draw.choice((1, 2, 3, 4, 6))),
                lambda: linear(size(a)),
                lambda: rnn.tanh(a * b),
                lambda: a + b,
                lambda: b - a,
                lambda: -a,
                lambda: a / (1 + rnn.abs(a)),
                lambda: rnn.sigmoid(a),
                lambda: rnn.relu(a),
                lambda: rnn.gelu(a),
                lambda: rnn.silu(a),
                lambda: rnn.softplus(a),
                lambda: rnn.exp(-rnn.softplus(a)),
                lambda: rnn.log(1 + a * a),
                lambda: rnn.sqrt(1 + rnn.abs(a)),
                lambda: rnn.minimum(a, b),
                lambda: rnn.maximum(a, 0.25),
                lambda: rnn.where((a > 0.1) | ~(a <= b), a, 0.5),
                lambda: rnn.clamp(a, -0.5, 0.7),
                lambda: rnn.mean(a * a),
                lambda: a - rnn.max(a),
                lambda: rnn.softmax(a),
                lambda: rnn.layer_norm(f"n{next(names)}", a, eps=0.1),
                lambda: rnn.cat(a, some()),
                lambda: a[:, size(a) // 2 :],
                lambda: rnn.dropout(a, 0.3),
                lambda: rnn.zoneout(rnn.tanh(a), a, 0.3),
            )
        )()

    for _ in range(count):
        values.append(step())
    states = {name: rnn.tanh(linear(n)) for name, n in sizes.items()}
    output = draw.choice([v for v in values[1 + len(sizes) :] if size(v) > 0])
    return output + rnn.sum(next(iter(states.values()))), states
