"""The definition of the high-order convolution, in plain PyTorch: pad, slice, multiply, add.

B batch, C channels, G groups of channels, H height, W width, k kernel size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def high_order_conv2d(x: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """out[b, c, h, w] = sum over i of weight[i, b, g(c), h, w] * x[b, c, h + dy(i), w + dx(i)].

    Tap i looks at dy = dilation * (i // k) - before and dx = dilation * (i % k) - before, where
    before = dilation * (k - 1) // 2; outside the image x is zero; g(c) = c // (C / G).
    Half precision is accumulated in float32.
    """
    taps, _, G, H, W = weight.shape
    k = round(taps**0.5)
    # From there on all taps but the centre see zeros.
    down, across = min(dilation, 2 * H), min(dilation, 2 * W)
    padding = []
    for total in (across * (k - 1), down * (k - 1)):  # both sides together
        padding += [total // 2, total - total // 2]
    accumulate = torch.promote_types(x.dtype, torch.float32)

    x_padded = F.pad(x.to(accumulate), padding)
    x_padded = x_padded.unflatten(1, (G, x.shape[1] // G))
    out = torch.zeros((), dtype=accumulate, device=x.device)
    for i in range(taps):
        top, left = down * (i // k), across * (i % k)
        window = x_padded[..., top : top + H, left : left + W]  # (B, G, C / G, H, W)
        out = out + window * weight[i].to(accumulate).unsqueeze(2)
    return out.flatten(1, 2).to(x.dtype)
