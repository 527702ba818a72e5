"""The values that the taps of a convolution read, for definitions; zeros outside."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gather_at(x: Tensor, dim: int, where: Sequence[Sequence[int]]) -> Tensor:
    """Gathers x along `dim` at every row of positions, into a new dimension in front of `dim`.

    Along the two, ``out[j, t] = x[where[j][t]]``, or 0 outside.
    """
    length, count = x.shape[dim], len(where[0])
    inside = torch.tensor([[0 <= i < length for i in row] for row in where], dtype=torch.bool)
    clamped = torch.tensor([[min(max(i, 0), length - 1) for i in row] for row in where],
                           dtype=torch.int64)  # fmt: skip
    dim = dim % x.dim()
    taken = x.index_select(dim, clamped.flatten()).unflatten(dim, (len(where), count))
    shape = [1] * taken.dim()
    shape[dim], shape[dim + 1] = len(where), count
    return torch.where(inside.view(shape), taken, 0.0)


def gather_shifted(x: Tensor, dim: int, offsets: Sequence[int]) -> Tensor:
    """Gathers x shifted along `dim` by every offset: ``out[j, t] = x[t + offsets[j]]``."""
    return gather_at(x, dim, [[t + offset for t in range(x.shape[dim])] for offset in offsets])


def gather_taps(x: Tensor, down: Sequence[int], right: Sequence[int]) -> Tensor:
    """Gathers what every tap reads of x (B, C, H, W): (B, C, tap rows, tap columns, H, W)."""
    rows = gather_shifted(x, 2, down)  # (B, C, i, H, W)
    return gather_shifted(rows, 4, right).movedim(4, 3)
