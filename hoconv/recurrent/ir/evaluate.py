"""What each kind of op means on tensors: the definition that every implementation follows.

Rows are the last but one dimension, features the last: (B, n), or (T, B, n) of whole sequences.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "bool": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """What states and elementwise functions are computed in: float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "softplus": F.softplus,
    "erf": torch.erf,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.invert,
    "where": torch.where,
    "sum": lambda x: x.sum(-1, keepdim=True),
    "max": lambda x: x.amax(-1, keepdim=True),
}
_TENSORS_ONLY = ("minimum", "maximum", "where")


def elementwise(kind: str, *operands: Tensor | float, dtype: torch.dtype) -> Tensor:
    """A function of rows; numbers among the operands are constants of `dtype`."""
    if kind in _TENSORS_ONLY:
        device = next(o.device for o in operands if isinstance(o, Tensor))
        operands = tuple(
            # Not torch.tensor, which would wait for a GPU.
            o if isinstance(o, Tensor) else torch.full((), o, dtype=dtype, device=device)
            for o in operands
        )
    return ELEMENTWISE[kind](*operands)


def cat(parts: Sequence[Tensor]) -> Tensor:
    """Features beside each other; a parameter's are repeated for every row."""
    rows = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*rows, part.shape[-1]) for part in parts], -1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, in the dtype of the weight."""
    return F.linear(x.to(weight.dtype), weight, bias)
