"""Writes an op that works row by row as an expression that C++ and CUDA share."""

from __future__ import annotations

import math

import torch

from hoconv.recurrent.ir.evaluate import DTYPES
from hoconv.recurrent.ir.functions import FUNCTIONS, Reduction
from hoconv.recurrent.ir.kinds import is_elementwise, is_reduction
from hoconv.recurrent.ir.program import Op, Value
from hoconv.recurrent.ir.random import threshold

TYPES = {"f64": "double", "f32": "float", "bf16": "BFloat16", "f16": "Half", "bool": "bool"}


def literal(number: float, dtype: str) -> str:
    """A constant, rounded to a dtype as by PyTorch; past the dtype's range it is infinite."""
    rounded = torch.tensor(number, dtype=DTYPES[dtype], device="cpu").item()
    if math.isnan(rounded):
        return f"not_a_number<{TYPES[dtype]}>()"
    if math.isinf(rounded):
        return f"{'-' * (rounded < 0)}infinity<{TYPES[dtype]}>()"
    return f"{TYPES[dtype]}({rounded!r})"


def expression(op: Op, names: dict[Value, str], feature: str) -> str:
    """The expression of an op's result.

    Args:
        names: the variables that hold the operands.
        feature: the index of the feature to compute.
    """
    real = next((v.type.dtype for v in op.values if v.type.dtype != "bool"), op.result.type.dtype)
    operands = [names[i] if isinstance(i, Value) else literal(i, real) for i in op.inputs]
    own = TYPES[op.result.type.dtype]
    if is_elementwise(op.kind):
        return FUNCTIONS[op.kind].c.format(*operands, type=own)
    if op.kind == "fill":
        return literal(op.attrs[0], op.result.type.dtype)
    if op.kind == "keep":
        return f"philox(seed, {feature}, row, t, {op.attrs[1]}) < {threshold(op.attrs[0])}ull"
    assert is_reduction(op.kind) or op.kind == "slice", op.kind
    return operands[0]  # the operand has one feature: it is the result


def initial(op: Op) -> str:
    """The initial value of a reduction."""
    return literal(reduction(op).identity, op.result.type.dtype)


def reduced(op: Op, total: str, value: str) -> str:
    """The reduction of a total and one more value."""
    return reduction(op).c.format(total, value)


def reduction(op: Op) -> Reduction:
    """The entry of a reduction in the table."""
    entry = FUNCTIONS[op.kind]
    assert isinstance(entry, Reduction), op.kind
    return entry
