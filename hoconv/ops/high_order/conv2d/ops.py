"""The high-order convolution as torch.library ops, with their FLOPs.

The operator is bilinear in x and weight, and its kernels compute both gradients in one pass. Each
op has an overload per implementation (`.cpp`, `.cuda`). `window` is
:meth:`hoconv.ops.high_order.conv2d.window.Window.numbers`.

B batch, C channels, G groups of channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hoconv.dispatch.registration import gradient_layout, kernels
from hoconv.ops.bilinear import BilinearOps, register_bilinear
from hoconv.ops.high_order.conv2d.window import VALID, is_channels_last

_library = torch.library.Library("hoconv", "FRAGMENT")
_ops = torch.ops.hoconv


def lay_out(x: Tensor, height: int, width: int, window: list[int]) -> tuple[list[int], list[int]]:
    """Returns the size and stride of a result of this height and width: x's where the windows keep
    its size, else with channels last where they are last in x."""
    *_, stride_down, stride_across, scale_down, scale_across, padding = window
    if stride_down == stride_across == scale_down == scale_across == 1 and padding != VALID:
        return gradient_layout(x)
    size = [*x.shape[:2], height, width]
    if is_channels_last(x):
        like = torch.empty((size[0], height, width, size[1]), device="meta").movedim(-1, 1)
    else:
        like = torch.empty(size, device="meta")
    return size, list(like.stride())


def _fake_forward(x: Tensor, weight: Tensor, window: list[int]) -> Tensor:
    return x.new_empty_strided(*lay_out(x, weight.shape[3], weight.shape[4], window))


def _register(impl: str) -> BilinearOps:
    return register_bilinear(
        _library, "high_order_conv2d", impl, "int[] window", KERNELS[impl],
        fake_forward=_fake_forward, one_pass=True,
    )  # fmt: skip


KERNELS = kernels("high_order/conv2d")
cpp, cuda = _register("cpp"), _register("cuda")


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
