"""Evaluates ops on tensors: the definition that every implementation follows.

The last dimension is features, the one before it rows: (B, n), or (T, B, n) of whole sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hoconv.recurrent.ir.functions import FUNCTIONS

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "bool": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and elementwise functions: float32 for half precision."""
    return torch.promote_types(dtype, torch.float32)


def in_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Does what ``t.to(dtype)`` does, and takes less time where that is nothing."""
    return t if t.dtype == dtype else t.to(dtype)


def elementwise(kind: str, *operands: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Evaluates a function of the table; numbers among the operands are constants of `dtype`."""
    function = FUNCTIONS[kind]
    assert function.evaluate is not None, kind
    device = next((o.device for o in operands if isinstance(o, Tensor)), None)
    if function.doc and device is not None:  # PyTorch's operators take numbers, its functions none
        operands = tuple(
            # Not torch.tensor, which would wait for a GPU. Past the dtype's range it is infinite.
            o
            if isinstance(o, Tensor)
            else torch.full((), o, dtype=torch.float64, device=device).to(dtype)
            for o in operands
        )
    return function.evaluate(*operands)


def cat(parts: Sequence[Tensor], axis: int = -1) -> Tensor:
    """Concatenates features; those of a parameter are repeated for every row."""
    axis = axis if axis < 0 else axis - parts[0].dim()
    rows = torch.broadcast_shapes(*(part.shape[:axis] for part in parts))
    return torch.cat([part.expand(*rows, *part.shape[axis:]) for part in parts], axis)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, in the dtype of the weight.

    Of a sequence with other strides PyTorch multiplies step by step, and adds the bias by itself.
    """
    return F.linear(in_dtype(x, weight.dtype).contiguous(), weight, bias)


def delay(
    source: Tensor, initial: Tensor, valid: Tensor | None = None, *, steps: int, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The state before each step (T, B, n), and after the last one (B, n), of its next values.

    Args:
        source: the next values, (T, B, n) or what is repeated to that.
        initial: (B, n).
        valid: (T, B, 1) bool, whether a step is within its sequence; None where all are.
        steps: T.
        reverse: whether the first step is the last of the sequence.
    """
    first = initial.unsqueeze(0)
    source = source.expand(steps, *initial.shape)
    whole = torch.cat((source, first) if reverse else (first, source))
    # A sequence of fewer steps ends, or backwards begins, at an entry before the last one.
    length = None if valid is None else valid.sum(0, keepdim=True).expand_as(first)
    if reverse:
        whole = whole if length is None else whole.scatter_(0, length, first)
        return whole[1:], whole[0].clone()
    return whole[:-1], whole[-1].clone() if length is None else whole.gather(0, length)[0]


def outer(g: Tensor, x: Tensor) -> Tensor:
    """g^T x, the sum over the rows of whole sequences: the gradient of a weight."""
    return g.flatten(0, 1).mT @ x.flatten(0, 1)
