"""What the definitions of convolutions share: which numbers a tap sees, zeros outside."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def seen(x: Tensor, dim: int, offsets: Sequence[int]) -> Tensor:
    """x with a dimension more, before the last of its own: one entry an offset.

    ``out[..., j, ..., t] = x[..., t + offsets[j]]`` along `dim`, or 0 outside; the new dimension
    is in front of `dim`.
    """
    length = x.shape[dim]
    where = [[t + offset for t in range(length)] for offset in offsets]
    inside = torch.tensor([[0 <= i < length for i in row] for row in where], dtype=torch.bool)
    clamped = torch.tensor([[min(max(i, 0), length - 1) for i in row] for row in where],
                           dtype=torch.int64)  # fmt: skip
    dim = dim % x.dim()
    taken = x.index_select(dim, clamped.flatten()).unflatten(dim, (len(offsets), length))
    shape = [1] * taken.dim()
    shape[dim], shape[dim + 1] = len(offsets), length
    return torch.where(inside.view(shape), taken, 0.0)


def seen_by_taps(x: Tensor, down: Sequence[int], right: Sequence[int]) -> Tensor:
    """Of x (B, C, H, W) what every tap sees: (B, C, rows of taps, columns of taps, H, W)."""
    rows = seen(x, 2, down)  # (B, C, i, H, W)
    return seen(rows, 4, right).movedim(4, 3)
