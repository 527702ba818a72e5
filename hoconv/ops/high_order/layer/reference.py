"""The definition of the high-order layer: generate the weights, then apply them.

B batch, C channels, G groups of channels, H height, W width, k kernel size, K = k * k taps,
s kernel size of the generator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from hoconv.ops.high_order.conv2d import reference


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
    """Computes the generator's convolution, a softmax over taps if asked for, the application, and
    the residual sum if asked for.

    generator_weight is (K * G, C, s, s): channel i * G + g of its output is tap i of group g.
    `apply` is an implementation of the high-order convolution.
    """
    if 0 in x.shape[1:]:  # no channel or no pixel, which PyTorch's convolution does not take
        biases = 0 if generator_bias is None else generator_bias.sum()
        return x * (generator_weight.sum() + biases)  # empty, with a gradient for every argument
    padded, padding = pad(x, generator_weight)
    taps = generate(padded, padding, generator_weight, generator_bias, kernel_size, normalize)
    out = apply(x, taps.transpose(0, 1), dilation)
    return x + out if residual else out


def pad(x: Tensor, generator_weight: Tensor) -> tuple[Tensor, int]:
    """Returns the input of the generator's convolution, and that convolution's padding."""
    s = int(generator_weight.shape[-1])  # int: torch.compile needs a constant as padding
    if s % 2 == 0:
        x = F.pad(x, (0, 1, 0, 1))  # an even size needs one more at the bottom and right
    return x, (s - 1) // 2


def generate(
    padded: Tensor, padding: int, weight: Tensor, bias: Tensor | None, kernel_size: int,
    normalize: str | None,
) -> Tensor:  # fmt: skip
    """Computes the taps of every pixel and group, (B, K, G, H, W)."""
    generated = F.conv2d(padded, weight, bias, padding=padding)
    taps = generated.unflatten(1, (kernel_size**2, weight.shape[0] // kernel_size**2))
    return taps.softmax(dim=1) if normalize else taps
