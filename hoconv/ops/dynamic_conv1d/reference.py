"""The definition of the dynamic 1-D convolution, in plain PyTorch: pad, slice, multiply, add.

B batch, C channels, H heads, K taps, T time steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dynamic_conv1d(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    """out[b, c, t] = sum over j of weight[b, h(c), j, t] * x[b, c, t + j - padding].

    x is (B, C, T) and zero before its first and after its last step; weight is (B or 1, H, K,
    T or 1); h(c) = c // (C / H). Half precision is accumulated in float32.
    """
    _, H, K, _ = weight.shape
    T = x.shape[2]
    accumulate = torch.promote_types(x.dtype, torch.float32)

    x_padded = F.pad(x.to(accumulate), (padding, K - 1 - padding))
    x_padded = x_padded.unflatten(1, (H, x.shape[1] // H))
    out = torch.zeros((), dtype=accumulate, device=x.device)
    for j in range(K):
        window = x_padded[..., j : j + T]  # (B, H, C / H, T)
        out = out + window * weight[:, :, j].to(accumulate).unsqueeze(2)
    return out.flatten(1, 2).to(x.dtype)
