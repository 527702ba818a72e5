"""Computes matrix products of whole sequences, large ones by oneDNN where PyTorch has it.

T time steps, B batch, n features of x, m features of the result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hoconv.recurrent.ir import evaluate

# oneDNN takes longer to start: it is as fast as PyTorch's product from this many multiplications.
_LARGE = 1 << 24


# On a GPU: the side of the tiles of a product, and the least number of rows to sum by themselves.
_TILE, _LEAST_ROWS = 64, 128


def onednn() -> bool:
    """Whether PyTorch has oneDNN and its user allows it."""
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, (T, B, n) to (T, B, m): :func:`evaluate.linear`, not differentiable."""
    float32_on_cpu = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in (x, weight))
    large = x.numel() * len(weight) >= _LARGE
    if float32_on_cpu and large and onednn():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return evaluate.linear(x, weight, bias)


def outer(g: Tensor, x: Tensor) -> Tensor:
    """g^T x, summed over time and batch, (T, B, m) and (T, B, n) to (m, n).

    On a GPU a small result has fewer tiles than there are multiprocessors: then the rows are summed
    in parts, side by side.
    """
    g, x = g.flatten(0, 1), x.flatten(0, 1)
    parts = _count_parts(g, x) if g.is_cuda and g.dtype == torch.float32 else 1
    if parts == 1:
        return g.mT @ x
    return torch.bmm(g.unflatten(0, (parts, -1)).mT, x.unflatten(0, (parts, -1))).sum(0)


def _count_parts(g: Tensor, x: Tensor) -> int:
    """The parts, a power of two, of equal numbers of rows."""
    rows, m = g.shape
    tiles = math.ceil(m / _TILE) * math.ceil(x.shape[1] / _TILE)
    wanted = torch.cuda.get_device_properties(g.device).multi_processor_count / tiles
    parts = 1
    while 2 * parts <= wanted and rows % (2 * parts) == 0 and rows // (2 * parts) >= _LEAST_ROWS:
        parts *= 2
    return parts
