"""The high-order layer and its gradient, composed of ops that can be differentiated.

B batch, C channels, G groups of channels, H height, W width, k kernel size, K = k * k taps,
s kernel size of the generator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hoconv.ops.high_order.conv2d.operator import OPERATOR as APPLICATION
from hoconv.ops.high_order.layer import reference


def get_application(impl: str) -> Any:
    """Returns an implementation of the high-order convolution."""
    return APPLICATION.implementations[impl].function


def forward(
    impl: str, x: Tensor, weight: Tensor, bias: Tensor | None, kernel_size: int, dilation: int,
    softmax: bool, residual: bool, allow_tf32: bool,
) -> Tensor:  # fmt: skip
    normalize = "softmax" if softmax else None
    return reference.high_order_layer(
        x, weight, bias, kernel_size, dilation, normalize, residual, get_application(impl)
    )


def backward(
    impl: str, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, kernel_size: int,
    dilation: int, softmax: bool, residual: bool, allow_tf32: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the gradients of x, weight and bias; the bias's even where the bias is None."""
    H, W = x.shape[2:]
    normalize = "softmax" if softmax else None
    padded, padding = reference.pad(x, weight)
    taps = reference.generate(padded, padding, weight, bias, kernel_size, normalize)
    apply_backward = getattr(torch.ops.hoconv.high_order_conv2d_backward, impl)
    d_x, d_taps = apply_backward(grad, x, taps.transpose(0, 1), dilation)
    d_taps = d_taps.transpose(0, 1)
    if softmax:
        d_taps = torch.ops.aten._softmax_backward_data(d_taps, taps, 1, taps.dtype)
    d_padded, d_weight, d_bias = torch.ops.aten.convolution_backward(
        d_taps.flatten(1, 2), padded, weight, [weight.shape[0]], [1, 1], [padding] * 2, [1, 1],
        False, [0, 0], 1, [True, True, True],
    )  # fmt: skip
    d_x = d_x + d_padded[..., :H, :W]
    return d_x + grad if residual else d_x, d_weight, d_bias
