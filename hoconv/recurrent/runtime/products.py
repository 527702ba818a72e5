"""Computes matrix products of whole sequences, large ones by oneDNN where PyTorch has it.

T time steps, B batch, n features of x, m features of the result.
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
    float32_on_cpu = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in (x, weight))
    large = x.numel() * len(weight) >= _LARGE
    if float32_on_cpu and large and onednn():
        if not (weight.is_contiguous() or weight.mT.is_contiguous()):
            weight = weight.contiguous()  # others oneDNN multiplies by its slow fallback
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return evaluate.linear(x, weight, bias)
