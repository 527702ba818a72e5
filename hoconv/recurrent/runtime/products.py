"""Computes matrix products of whole sequences, large ones by oneDNN where PyTorch has it.

T time steps, B batch, n features of x, m of the result, or of the gradient g.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hoconv.recurrent.ir import evaluate

# oneDNN takes longer to start: it is as fast as PyTorch's product from this many multiplications.
_LARGE = 1 << 24


def onednn() -> bool:
    """Whether PyTorch has oneDNN and its user allows it."""
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, (T, B, n) to (T, B, m): :func:`evaluate.linear`, not differentiable."""
    if not _suits_onednn(x, weight, x.numel() * len(weight)):
        return evaluate.linear(x, weight, bias)
    return _multiply(x, weight, bias)


def outer(g: Tensor, x: Tensor) -> Tensor:
    """g^T x, (T, B, m) and (T, B, n) to (m, n): :func:`evaluate.outer`, not differentiable."""
    if not _suits_onednn(g, x, g.numel() * x.shape[-1]):
        return evaluate.outer(g, x)
    g, x = g.flatten(0, 1), x.flatten(0, 1)
    if g.shape[1] < x.shape[1]:
        return _multiply(g.mT, x.mT)
    return _multiply(x.mT, g.mT).mT.contiguous()  # faster with fewer rows than columns


def _suits_onednn(a: Tensor, b: Tensor, multiplications: int) -> bool:
    return (
        multiplications >= _LARGE
        and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in (a, b))
        and onednn()
    )


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x, weight = (
        # Others oneDNN multiplies by its slow fallback.
        t if t.is_contiguous() or t.mT.is_contiguous() else t.contiguous()
        for t in (x, weight)
    )
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
