"""The definition of the high-order convolution, in plain PyTorch: pad, slice, multiply, add.

B batch, C channels, G groups of channels, H height, W width, k kernel size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def high_order_conv2d(x: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """out[b, c, h, w] = sum over i of weight[i, b, g(c), h, w] * x[b, c, h + dy(i), w + dx(i)].

    Tap i reads at dy = dilation * (i // k) - before and dx = dilation * (i % k) - before, where
    before = dilation * (k - 1) // 2; outside the image x is zero; g(c) = c // (C / G).
    Half precision is accumulated in float32.
    """
    taps, _, G, H, W = weight.shape
    k = round(taps**0.5)
    before = dilation * (k - 1) // 2
    after = dilation * (k - 1) - before
    # At most the image's size: taps further out read zeros only.
    above, left = min(before, H), min(before, W)
    below, right = min(after, H), min(after, W)
    accumulate = torch.promote_types(x.dtype, torch.float32)

    x_padded = F.pad(x.to(accumulate), (left, right, above, below))
    x_padded = x_padded.unflatten(1, (G, x.shape[1] // G))
    out = torch.zeros((), dtype=accumulate, device=x.device)
    for i in range(taps):
        top = min(max(dilation * (i // k) - before, -above), below) + above
        side = min(max(dilation * (i % k) - before, -left), right) + left
        window = x_padded[..., top : top + H, side : side + W]  # (B, G, C / G, H, W)
        out = out + window * weight[i].to(accumulate).unsqueeze(2)
    return out.flatten(1, 2).to(x.dtype)
