"""The table of functions: all that the compiler knows of the elementwise ops and the reductions.

A new function is one entry. The language (`rnn.tanh`), the checks of operands, the evaluation in
PyTorch, the gradient, the generated code, the choice of what is saved and the random cells of the
tests read it here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F

Sort = Literal["number", "condition"]
# derivative(rnn, g, y, *operands) -> the gradient of each operand, None where there is none. `rnn`
# has the functions of the table, g is the gradient of the result y.
Derivative = Callable[..., tuple[Any, ...]]

_X: Mapping[str, Sort] = {"x": "number"}
_A_B: Mapping[str, Sort] = {"a": "number", "b": "number"}


@dataclass(frozen=True, eq=False)
class Function:
    """An elementwise function.

    Attributes:
        name: in programs; in the language, too, where it has a `doc`.
        evaluate: computes it on tensors. Constants among the operands are Python numbers for an
            operator, tensors for a function of the language. None: a cast, which needs the dtype.
        c: its expression in C++ and CUDA, of the operands {0}, {1}, ... and of the result's {type}.
            It may call the functions of csrc/recurrent/math.h and those of C's math.h.
        derivative: written in the language of cells. Where the result says enough, it does not use
            the operands: they need not be saved. Of NaN and of ties it makes what autograd makes of
            PyTorch's function. None: a condition, which has no gradient.
        operands: their names and sorts.
        result: the sort of the result.
        cheap: whether it costs less to compute again than to write and read: a few instructions.
        doc: the docstring of the function in the language; empty for an operator, and for what the
            language does not have.
        domain: domain(rnn, x) maps any x to where the function and its gradient are moderate, for
            random cells; None: they are so everywhere.
    """

    name: str
    evaluate: Callable[..., Any] | None
    c: str
    derivative: Derivative | None
    operands: Mapping[str, Sort] = field(default_factory=lambda: _X)
    result: Sort = "number"
    cheap: bool = False
    doc: str = ""
    domain: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True, eq=False)
class Reduction(Function):
    """A function of all features of a row, whose result has one feature.

    `c` combines what was reduced so far, {0}, with one more feature, {1}; CUDA calls
    ``block_<name>`` of csrc/recurrent/block.cuh to combine those of all threads.

    Attributes:
        identity: the reduction of no features.
        openmp: the operator of OpenMP's reduction clause, its own or one of csrc/recurrent/loop.h.
    """

    identity: float = 0.0
    openmp: str = "+"


def _infix(name: str, function: Callable[..., Any], sign: str, derivative: Derivative) -> Function:
    return Function(name, function, f"{{0}} {sign} {{1}}", derivative, _A_B, cheap=True)


def _comparison(name: str, function: Callable[..., Any], sign: str) -> Function:
    return Function(name, function, f"{{0}} {sign} {{1}}", None, _A_B, "condition", cheap=True)


def _logic(name: str, function: Callable[..., Any], c: str, *operands: str) -> Function:
    conditions: Mapping[str, Sort] = dict.fromkeys(operands, "condition")
    return Function(name, function, c, None, conditions, "condition", cheap=True)


def _d_smaller(rnn: Any, g: Any, a: Any, b: Any) -> Any:
    """The gradient of the smaller one of a and b, half of it where they are equal."""
    return rnn.where(a > b, 0.0, rnn.where(a == b, 0.5 * g, g))


def _d_softplus(rnn: Any, g: Any, y: Any, x: Any) -> tuple[Any, ...]:
    z = rnn.exp(x)
    return (rnn.where(x > 20, g, g * z / (z + 1)),)


def _d_max(rnn: Any, g: Any, y: Any, x: Any) -> tuple[Any, ...]:
    # Not y: where x is computed again it may be rounded otherwise, and then nothing equals y.
    largest = rnn.where(x == rnn.max(x), 1.0, 0.0)
    return (g * largest / rnn.sum(largest),)


_TABLE = (
    # Operators of the language, which are those of Python.
    Function("neg", operator.neg, "-{0}", lambda rnn, g, y, x: (-g,), cheap=True),
    _infix("add", operator.add, "+", lambda rnn, g, y, a, b: (g, g)),
    _infix("sub", operator.sub, "-", lambda rnn, g, y, a, b: (g, -g)),
    _infix("mul", operator.mul, "*", lambda rnn, g, y, a, b: (g * b, g * a)),
    _infix("div", operator.truediv, "/", lambda rnn, g, y, a, b: (g / b, -(g * (y / b)))),
    Function(
        "reciprocal",
        torch.reciprocal,
        "{type}(1) / {0}",
        lambda rnn, g, y, x: (-(g * (y * y)),),
        cheap=True,
    ),
    # Of Python's sign: the result has that of b.
    Function(
        "mod",
        operator.mod,
        "modulo({0}, {1})",
        lambda rnn, g, y, a, b: (g, -(g * rnn.floor(a / b))),
        _A_B,
    ),
    # Of a constant base.
    Function(
        "pow",
        operator.pow,
        "pow({0}, {1})",
        lambda rnn, g, y, a, b: (None, g * (y * math.log(a))),
        _A_B,
    ),
    _comparison("lt", operator.lt, "<"),
    _comparison("le", operator.le, "<="),
    _comparison("gt", operator.gt, ">"),
    _comparison("ge", operator.ge, ">="),
    _comparison("eq", operator.eq, "=="),
    _comparison("ne", operator.ne, "!="),
    _logic("and", operator.and_, "{0} & {1}", "a", "b"),
    _logic("or", operator.or_, "{0} | {1}", "a", "b"),
    _logic("not", operator.invert, "!{0}", "x"),
    # Functions of one row.
    Function(
        "sigmoid",
        torch.sigmoid,
        "sigmoid({0})",
        lambda rnn, g, y, x: (g * (y * (1 - y)),),
        doc="1 / (1 + exp(-x)).",
    ),
    Function(
        "tanh",
        torch.tanh,
        "hyperbolic_tangent({0})",
        lambda rnn, g, y, x: (g * (1 - y * y),),
        doc="The hyperbolic tangent.",
    ),
    Function(
        "relu",
        torch.relu,
        "relu({0})",
        lambda rnn, g, y, x: (rnn.where(y <= 0, 0.0, g),),
        cheap=True,
        doc="max(x, 0).",
    ),
    Function(
        "softplus",
        F.softplus,
        "softplus({0})",
        _d_softplus,
        doc="log(1 + exp(x)); x itself past 20, as in PyTorch.",
    ),
    Function(
        "exp",
        torch.exp,
        "exponential({0})",
        lambda rnn, g, y, x: (g * y,),
        doc="The exponential.",
        domain=lambda rnn, x: -rnn.softplus(x),
    ),
    Function(
        "log",
        torch.log,
        "logarithm({0})",
        lambda rnn, g, y, x: (g / x,),
        doc="The natural logarithm.",
        domain=lambda rnn, x: 1 + x * x,
    ),
    Function(
        "sqrt",
        torch.sqrt,
        "square_root({0})",
        lambda rnn, g, y, x: (0.5 * g / y,),
        doc="The square root.",
        domain=lambda rnn, x: 1 + rnn.abs(x),
    ),
    Function(
        "rsqrt",
        torch.rsqrt,
        "{type}(1) / square_root({0})",
        lambda rnn, g, y, x: (-0.5 * g * (y * y * y),),
        doc="1 / sqrt(x).",
        domain=lambda rnn, x: 1 + rnn.abs(x),
    ),
    Function(
        "expm1",
        torch.expm1,
        "exponential_minus_one({0})",
        lambda rnn, g, y, x: (g * (y + 1),),
        doc="exp(x) - 1, exact for small x.",
        domain=lambda rnn, x: -rnn.softplus(x),
    ),
    Function(
        "log1p",
        torch.log1p,
        "logarithm_of_one_plus({0})",
        lambda rnn, g, y, x: (g / (1 + x),),
        doc="log(1 + x), exact for small x.",
        domain=lambda rnn, x: x * x,
    ),
    Function(
        "sin",
        torch.sin,
        "sine({0})",
        lambda rnn, g, y, x: (g * rnn.cos(x),),
        doc="The sine.",
    ),
    Function(
        "cos",
        torch.cos,
        "cosine({0})",
        lambda rnn, g, y, x: (-(g * rnn.sin(x)),),
        doc="The cosine.",
    ),
    Function(
        "floor",
        lambda x: x.detach().floor(),
        "round_down({0})",
        lambda rnn, g, y, x: (None,),
        cheap=True,
        doc="The largest whole number that is not above x; it has no gradient.",
    ),
    Function(
        "sign",
        lambda x: x.detach().sign(),
        "sign_of({0})",
        lambda rnn, g, y, x: (None,),
        cheap=True,
        doc="-1, 0 or 1; it has no gradient.",
    ),
    Function(
        "stop_gradient",
        torch.Tensor.detach,
        "{0}",
        lambda rnn, g, y, x: (None,),
        cheap=True,
        doc="x, through which no gradient passes.",
    ),
    Function(
        "erf",
        torch.erf,
        "error_function({0})",
        lambda rnn, g, y, x: (g * (2 / math.sqrt(math.pi) * rnn.exp(-(x * x))),),
    ),
    Function(
        "abs",
        torch.abs,
        "absolute({0})",
        lambda rnn, g, y, x: (g * rnn.where(x > 0, 1.0, rnn.where(x < 0, -1.0, 0.0)),),
        cheap=True,
        doc="The absolute value; its derivative at 0 is 0.",
    ),
    Function("cast", None, "static_cast<{type}>({0})", lambda rnn, g, y, x: (g,), cheap=True),
    # Functions of several rows.
    Function(
        "minimum",
        torch.minimum,
        "minimum({0}, {1})",
        lambda rnn, g, y, a, b: (_d_smaller(rnn, g, a, b), _d_smaller(rnn, g, b, a)),
        _A_B,
        cheap=True,
        doc="The smaller one; where they are equal, each gets half of the gradient.",
    ),
    Function(
        "maximum",
        torch.maximum,
        "maximum({0}, {1})",
        lambda rnn, g, y, a, b: (_d_smaller(rnn, g, b, a), _d_smaller(rnn, g, a, b)),
        _A_B,
        cheap=True,
        doc="The larger one; where they are equal, each gets half of the gradient.",
    ),
    Function(
        "straight_through",
        lambda hard, soft: hard.detach() + (soft - soft.detach()),
        "{0}",
        lambda rnn, g, y, hard, soft: (None, g),
        {"hard": "number", "soft": "number"},
        cheap=True,
        doc="The value of hard with the gradient of soft (Bengio, Léonard and Courville 2013).",
    ),
    Function(
        "where",
        torch.where,
        "{0} ? {1} : {2}",
        lambda rnn, g, y, c, a, b: (None, rnn.where(c, g, 0.0), rnn.where(c, 0.0, g)),
        {"condition": "condition", **_A_B},
        cheap=True,
        doc="a where the condition is true, else b; comparisons and & | ~ make conditions.",
    ),
    # Over the features of a row.
    Reduction(
        "sum",
        lambda x: x.sum(-1, keepdim=True),
        "{0} + {1}",
        lambda rnn, g, y, x: (g,),
        doc="The sum of a row's features, (B, 1).",
    ),
    Reduction(
        "max",
        lambda x: x.amax(-1, keepdim=True),
        "maximum({0}, {1})",
        _d_max,
        doc="The largest of a row's features, (B, 1); equal ones share the gradient.",
        identity=-math.inf,
        openmp="largest",
    ),
)
FUNCTIONS: dict[str, Function] = {function.name: function for function in _TABLE}
