"""The high-order layer and its gradient, composed of ops that can be differentiated.

B batch, C channels, G groups of channels, H height, W width, K taps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hoconv.ops.high_order.conv2d.operator import CONVOLVE
from hoconv.ops.high_order.conv2d.window import Normalize, Window
from hoconv.ops.high_order.layer import reference


def forward(
    impl: str, x: Tensor, weight: Tensor, bias: Tensor | None, kernel_size: int, dilation: int,
    softmax: bool, residual: bool, allow_tf32: bool,
) -> Tensor:  # fmt: skip
    window, normalize = _options(kernel_size, dilation, softmax)
    return reference.high_order_layer(x, weight, bias, window, normalize, residual, CONVOLVE[impl])


def backward(
    impl: str, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, kernel_size: int,
    dilation: int, softmax: bool, residual: bool, allow_tf32: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the gradients of x, weight and bias; the bias's even where the bias is None."""
    H, W = x.shape[2:]
    window, normalize = _options(kernel_size, dilation, softmax)
    padded, padding = reference.pad(x, weight)
    taps = reference.generate(padded, padding, weight, bias, window, normalize)
    apply_backward = getattr(torch.ops.hoconv.high_order_conv2d_backward, impl)
    d_x, d_taps = apply_backward(grad, x, taps, window.numbers())
    if softmax:
        pair = d_taps.transpose(0, 1), taps.transpose(0, 1)
        d_taps = torch.ops.aten._softmax_backward_data(*pair, 1, taps.dtype).transpose(0, 1)
    d_padded, d_weight, d_bias = torch.ops.aten.convolution_backward(
        d_taps.transpose(0, 1).flatten(1, 2), padded, weight, [weight.shape[0]], [1, 1],
        [padding] * 2, [1, 1], False, [0, 0], 1, [True, True, True],
    )  # fmt: skip
    d_x = d_x + d_padded[..., :H, :W]
    return d_x + grad if residual else d_x, d_weight, d_bias


def _options(kernel_size: int, dilation: int, softmax: bool) -> tuple[Window, Normalize | None]:
    window = Window.of(kernel_size**2, kernel_size, dilation)
    return window, "softmax" if softmax else None
