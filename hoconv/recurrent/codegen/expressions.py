"""Each elementwise op as an expression in the C family, for C++ and for CUDA.

The functions are those of csrc/recurrent/math.h, which both compile.
"""

from __future__ import annotations

import math

import torch

from hoconv.recurrent.ir.evaluate import DTYPES
from hoconv.recurrent.ir.program import Op, Value
from hoconv.recurrent.ir.random import threshold

TYPES = {"f64": "double", "f32": "float", "bf16": "BFloat16", "f16": "Half", "bool": "bool"}

_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "eq": "==", "ne": "!=", "and": "&", "or": "|",
}  # fmt: skip
_PREFIXES = {"neg": "-", "not": "!"}
_FUNCTIONS = {
    "abs": "absolute", "exp": "exponential", "log": "logarithm", "sqrt": "square_root",
    "sigmoid": "sigmoid", "tanh": "hyperbolic_tangent", "relu": "relu", "softplus": "softplus",
    "erf": "error_function", "minimum": "minimum", "maximum": "maximum",
}  # fmt: skip


def literal(number: float, dtype: str) -> str:
    """A constant of a dtype, as PyTorch rounds it; what is past its range is infinite."""
    rounded = torch.tensor(number, dtype=DTYPES[dtype], device="cpu").item()
    if math.isnan(rounded):
        return f"not_a_number<{TYPES[dtype]}>()"
    if math.isinf(rounded):
        return f"{'-' * (rounded < 0)}infinity<{TYPES[dtype]}>()"
    return f"{TYPES[dtype]}({rounded!r})"


def expression(op: Op, names: dict[Value, str], feature: str) -> str:
    """The value of an op.

    Args:
        names: of the variables that hold its operands.
        feature: the index of the feature that is computed.
    """
    real = next((v.type.dtype for v in op.values if v.type.dtype != "bool"), op.result.type.dtype)
    operands = [names[i] if isinstance(i, Value) else literal(i, real) for i in op.inputs]
    own = TYPES[op.result.type.dtype]
    if op.kind in _OPERATORS:
        return f"{operands[0]} {_OPERATORS[op.kind]} {operands[1]}"
    if op.kind in _PREFIXES:
        return f"{_PREFIXES[op.kind]}{operands[0]}"
    if op.kind in _FUNCTIONS:
        return f"{_FUNCTIONS[op.kind]}({', '.join(operands)})"
    if op.kind == "where":
        return f"{operands[0]} ? {operands[1]} : {operands[2]}"
    if op.kind == "cast":
        return f"static_cast<{own}>({operands[0]})"
    if op.kind == "fill":
        return literal(op.attrs[0], op.result.type.dtype)
    if op.kind == "keep":
        return f"philox(seed, {feature}, row, t, {op.attrs[1]}) < {threshold(op.attrs[0])}ull"
    assert op.kind in ("sum", "max", "slice"), op.kind
    return operands[0]  # of one feature


def initial(op: Op) -> str:
    """What a reduction begins with."""
    return literal(0.0 if op.kind == "sum" else -math.inf, op.result.type.dtype)


def reduced(op: Op, total: str, value: str) -> str:
    """A reduction with one more value."""
    return f"{total} + {value}" if op.kind == "sum" else f"maximum({total}, {value})"
