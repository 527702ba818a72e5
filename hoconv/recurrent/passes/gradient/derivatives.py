"""The derivative of every op that works row by row, written in the language of cells.

A rule gets the gradient g of the result y, the result and the operands, and returns the gradient of
each operand, None where there is none. Where the result says enough, the operands are not used:
they need not be kept. Of NaN and of ties a rule makes what autograd makes of PyTorch's function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hoconv.recurrent.frontend.language import exp, sigmoid, sum, where

Rule = Callable[..., tuple[Any, ...]]


def _smaller(g: Any, a: Any, b: Any) -> Any:
    """The gradient of the smaller one of a and b, half of it where they are equal."""
    return where(a > b, 0.0, where(a == b, 0.5 * g, g))


def _max(g: Any, y: Any, x: Any) -> tuple[Any, ...]:
    largest = where(x == y, 1.0, 0.0)
    return (g * largest / sum(largest),)


RULES: dict[str, Rule] = {
    "neg": lambda g, y, x: (-g,),
    "abs": lambda g, y, x: (g * where(x > 0, 1.0, where(x < 0, -1.0, 0.0)),),
    "exp": lambda g, y, x: (g * y,),
    "log": lambda g, y, x: (g / x,),
    "sqrt": lambda g, y, x: (0.5 * g / y,),
    "sigmoid": lambda g, y, x: (g * (y * (1 - y)),),
    "tanh": lambda g, y, x: (g * (1 - y * y),),
    "relu": lambda g, y, x: (where(y <= 0, 0.0, g),),
    "softplus": lambda g, y, x: (where(x > 20, g, g * sigmoid(x)),),
    "erf": lambda g, y, x: (g * (2 / math.sqrt(math.pi) * exp(-(x * x))),),
    "add": lambda g, y, a, b: (g, g),
    "sub": lambda g, y, a, b: (g, -g),
    "mul": lambda g, y, a, b: (g * b, g * a),
    "div": lambda g, y, a, b: (g / b, -(g * y / b)),
    "minimum": lambda g, y, a, b: (_smaller(g, a, b), _smaller(g, b, a)),
    "maximum": lambda g, y, a, b: (_smaller(g, b, a), _smaller(g, a, b)),
    "where": lambda g, y, c, a, b: (None, where(c, g, 0.0), where(c, 0.0, g)),
    "cast": lambda g, y, x: (g,),
    "sum": lambda g, y, x: (g,),
    "max": _max,
}
