"""Random cells whose next states are affine in their states, feature by feature; near misses."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hoconv import recurrent as rnn
from hoconv.recurrent.frontend.cell import BoundCell

SIZE = 5

# Of values h and g that are affine in the states, and v and w that read none.
_AFFINE: tuple[Callable[..., Any], ...] = (
    lambda h, g, v, w: h * rnn.tanh(v),
    lambda h, g, v, w: rnn.sigmoid(v) * h,
    lambda h, g, v, w: h + v,
    lambda h, g, v, w: v - h,
    lambda h, g, v, w: -h,
    lambda h, g, v, w: h / (1 + rnn.abs(v)),
    lambda h, g, v, w: 0.5 * h + 0.25 * g,
    lambda h, g, v, w: h - g * w,
    lambda h, g, v, w: rnn.stop_gradient(h),
    lambda h, g, v, w: rnn.straight_through(h, rnn.tanh(h)) * 0.5,
)
_CONDITIONAL: tuple[Callable[..., Any], ...] = (
    lambda h, g, v, w: rnn.where(v > 0, h, w),
    lambda h, g, v, w: rnn.where(v > w, 0.0, h),
    lambda h, g, v, w: rnn.where(v > 0, h, 0.5 * g),
)
_FREE: tuple[Callable[..., Any], ...] = (
    lambda v, w: v,
    lambda v, w: rnn.tanh(v),
    lambda v, w: rnn.sigmoid(v) * w,
    lambda v, w: v * 0.5,
    lambda v, w: rnn.dropout(v, 0.3),
)
# None of these is affine.
NEAR_MISSES: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda h, v: h * h,
    "gate": lambda h, v: rnn.sigmoid(h) * v,
    "relu": lambda h, v: rnn.relu(h),
    "abs": lambda h, v: rnn.abs(h) * v,
    "maximum": lambda h, v: rnn.maximum(h, v),
    "condition": lambda h, v: rnn.where(h > 0, v, 0.5),
    "divisor": lambda h, v: v / (2 + h),
    "floor": lambda h, v: h + rnn.floor(h),
    "modulo": lambda h, v: h % 2.0,
    "its gradient stopped": lambda h, v: rnn.stop_gradient(h) * h,
    "hard": lambda h, v: rnn.straight_through(rnn.where(h > 0, 1.0, 0.0), h),
    "softmax": lambda h, v: rnn.softmax(h),
    "norm": lambda h, v: rnn.normalize(h) + v,
}


def affine_cell(seed: int, states: int = 1, miss: str = "") -> BoundCell:
    """Draws a cell of some states, each of SIZE features; with the name of a near miss, one."""
    names = [f"s{i}" for i in range(states)]
    makers = _AFFINE + (_CONDITIONAL if states == 1 else ())

    def function(x: Any, *given: Any) -> Any:
        draw = random.Random(seed)  # for every call, on symbols and on tensors, the same
        free = [rnn.linear("x", x, size=SIZE), rnn.parameter("p", SIZE), x[:, :1]]
        found = list(given)

        def draw_free() -> Any:
            return draw.choice(_FREE)(draw.choice(free[:2]), draw.choice(free))

        for _ in range(draw.randint(2, 6)):
            h, g = draw.choice(found), draw.choice(found)
            found.append(draw.choice(makers)(h, g, draw_free(), draw_free()))
        nexts = [rnn.sigmoid(draw_free()) * draw.choice(found[-2:]) + draw_free() for _ in names]
        if miss:
            nexts[-1] = nexts[-1] + NEAR_MISSES[miss](given[0] + 0.5 * given[-1], draw_free())
        output = rnn.tanh(nexts[0]) * given[-1] + draw.choice(free)
        return output, dict(zip(names, nexts, strict=True))

    arguments = ", ".join(("x", *names))
    scope: dict[str, Any] = {"function": function}
    exec(f"def affine_{seed}({arguments}):\n    return function({arguments})", scope)
    return rnn.cell(state=dict.fromkeys(names, SIZE))(scope[f"affine_{seed}"]).bind(3, SIZE, {})
