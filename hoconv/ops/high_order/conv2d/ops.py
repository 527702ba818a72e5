"""The high-order convolution as torch.library ops, with their FLOPs.

The operator is bilinear in x and weight, and its kernels compute both gradients in one pass. Each
op has an overload per implementation (`.cpp`, `.cuda`).

B batch, C channels, G groups of channels, H height, W width, K = k * k taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from hoconv.dispatch.registration import kernels
from hoconv.ops.bilinear import register_bilinear

_library = torch.library.Library("hoconv", "FRAGMENT")
_ops = torch.ops.hoconv

KERNELS = kernels("high_order/conv2d")
cpp = register_bilinear(
    _library, "high_order_conv2d", "cpp", "dilation", KERNELS["cpp"], one_pass=True
)
cuda = register_bilinear(
    _library, "high_order_conv2d", "cuda", "dilation", KERNELS["cuda"], one_pass=True
)


def _flops(weight_shape: tuple[int, ...], channels: int) -> int:
    """Counts a multiply and an add for every tap, channel and pixel."""
    taps, B, _, H, W = weight_shape
    return 2 * taps * B * channels * H * W


@register_flop_formula(_ops.high_order_conv2d)
def _forward_flops(x_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
    return _flops(weight_shape, x_shape[1])


@register_flop_formula(_ops.high_order_conv2d_backward)
def _backward_flops(
    grad_shape: Any, x_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any
) -> int:
    return 2 * _flops(weight_shape, grad_shape[1])


@register_flop_formula(_ops.high_order_conv2d_grad_input)
def _grad_input_flops(grad_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
    return _flops(weight_shape, grad_shape[1])


@register_flop_formula(_ops.high_order_conv2d_grad_weight)
def _grad_weight_flops(grad_shape: Any, x_shape: Any, size: Any, *args: Any, **kwargs: Any) -> int:
    return _flops(size, grad_shape[1])
