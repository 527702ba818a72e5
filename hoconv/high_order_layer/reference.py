"""The definition of the high-order layer: generate the weights, then apply them.

B batch, C channels, G groups of channels, H height, W width, k kernel size, K = k * k taps,
s kernel size of the generator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from hoconv.high_order import reference


def high_order_layer(
    x: Tensor,
    generator_weight: Tensor,
    generator_bias: Tensor | None,
    kernel_size: int,
    dilation: int,
    normalize: str | None,
    residual: bool,
    apply: Callable[[Tensor, Tensor, int], Tensor] = reference.high_order_conv2d,
) -> Tensor:
    """The generator's convolution, optional softmax over taps, application, optional residual.

    generator_weight is (K * G, C, s, s): channel i * G + g of its output is tap i of group g.
    `apply` is an implementation of the high-order convolution.
    """
    s = int(generator_weight.shape[-1])  # to torch.compile a constant, as padding must be
    before = (s - 1) // 2
    padded = x if s % 2 else F.pad(x, (0, 1, 0, 1))  # an even size pads one more after
    generated = F.conv2d(padded, generator_weight, generator_bias, padding=before)
    taps = generated.unflatten(1, (kernel_size**2, -1))  # (B, K, G, H, W)
    if normalize:
        taps = taps.softmax(dim=1)
    out = apply(x, taps.transpose(0, 1), dilation)
    return x + out if residual else out
