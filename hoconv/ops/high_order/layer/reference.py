"""The definition of the high-order layer: generate the weights, then apply them.

B batch, C channels, G groups of channels, H height, W width, K taps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from hoconv.ops.high_order.conv2d import reference
from hoconv.ops.high_order.conv2d.window import Normalize, Window, normalize_taps


def high_order_layer(
    x: Tensor,
    generator_weight: Tensor,
    generator_bias: Tensor | None,
    window: Window,
    normalize: Normalize | None,
    residual: bool,
    apply: Callable[[Tensor, Tensor, Window], Tensor] = reference.high_order_conv2d,
) -> Tensor:
    """Computes the generator's convolution, normalises the taps if asked for, applies them, and
    adds x if asked for.

    `apply` is an implementation of the high-order convolution.
    """
    if 0 in x.shape[1:]:  # no channel or no pixel, which PyTorch's convolution does not take
        biases = 0 if generator_bias is None else generator_bias.sum()
        size = *x.shape[:2], *window.output_size(*x.shape[2:])
        # Empty, with a gradient for every argument.
        return x.new_zeros(size) * (x.sum() * (generator_weight.sum() + biases))
    padded, padding = pad(crop(x, window), generator_weight)
    taps = generate(padded, padding, generator_weight, generator_bias, window, normalize)
    out = apply(x, taps, window)
    return x + out if residual else out


def crop(x: Tensor, window: Window) -> Tensor:
    """Returns the pixels that are in the middle of a window: all, or with padding="valid" fewer."""
    for dim, axis in zip((2, 3), window, strict=True):
        if axis.padding == "valid":
            x = x.narrow(dim, axis.reach // 2, x.shape[dim] - axis.reach)
    return x


def pad(x: Tensor, generator_weight: Tensor) -> tuple[Tensor, int]:
    """Returns the input of the generator's convolution, and that convolution's padding."""
    s = int(generator_weight.shape[-1])  # int: torch.compile needs a constant as padding
    if s % 2 == 0:
        x = F.pad(x, (0, 1, 0, 1))  # an even size needs one more at the bottom and right
    return x, (s - 1) // 2


def generate(
    padded: Tensor, padding: int, weight: Tensor, bias: Tensor | None, window: Window,
    normalize: Normalize | None,
) -> Tensor:  # fmt: skip
    """Computes the taps of every output pixel and group, (K, B, G, H', W')."""
    strides = window.down.stride, window.across.stride
    generated = F.conv2d(padded, weight, bias, stride=strides, padding=padding)
    return normalize_taps(arrange(generated, window), normalize)


def arrange(generated: Tensor, window: Window) -> Tensor:
    """Arranges what a generator returns, (B, K * G * scale * scale, H, W), as taps
    (K, B, G, H * scale, W * scale)."""
    down, across = window
    taps = down.taps * across.taps
    if down.scale == across.scale == 1:
        return generated.unflatten(1, (taps, -1)).transpose(0, 1)
    fractions = generated.unflatten(1, (taps, -1, down.scale, across.scale))
    # (B, K, G, fraction down, fraction across, H, W)
    return fractions.permute(1, 0, 2, 5, 3, 6, 4).flatten(5).flatten(3, 4)
