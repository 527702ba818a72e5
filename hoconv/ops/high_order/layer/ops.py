"""The fused high-order layer as torch.library ops: schema, fake, autograd, autocast, FLOPs.

`high_order_layer` never writes the generated weights to memory. `high_order_layer_backward`
generates them again and returns the gradients of x and of the generator's parameters. Each has an
overload per implementation (`.cpp`, `.cuda`). Tangents and gradients of higher order are computed
by composed.py, from ops that are differentiable any number of times; and so is the gradient where
`is_backward_fused` says that this is faster.

Where `why_unfused` gives a reason, the layer is PyTorch's convolution and the same implementation
of the high-order convolution.

B batch, C channels, G groups of channels, H height, W width, k kernel size, K = k * k taps,
s kernel size of the generator.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hoconv.dispatch.registration import Op, define, register_layer
from hoconv.ops.high_order.conv2d.operator import CONVOLVE
from hoconv.ops.high_order.conv2d.window import Normalize, Padding, Pair, Window, make_pair
from hoconv.ops.high_order.layer import composed, reference
from hoconv.ops.high_order.layer.rule import KERNELS, is_backward_fused, why_unfused

_library = torch.library.Library("hoconv", "FRAGMENT")
_ops = torch.ops.hoconv

# allow_tf32: whether float32 products of the generator may be rounded to TF32, on a GPU.
_OPTIONS = "int kernel_size, int dilation, bool softmax, bool residual, bool allow_tf32"
_SCHEMAS = {
    "high_order_layer":
        f"(Tensor x, Tensor weight, Tensor? bias, {_OPTIONS}) -> Tensor",
    "high_order_layer_backward":
        f"(Tensor grad, Tensor x, Tensor weight, Tensor? bias, {_OPTIONS})"
        " -> (Tensor, Tensor, Tensor)",
}  # fmt: skip


def _register(impl: str) -> Op:
    """Registers the ops of one implementation.

    Returns:
        The forward.
    """
    forward, backward = (
        define(_library, name, impl, schema, fake, KERNELS[impl])
        for (name, schema), fake in zip(
            _SCHEMAS.items(), (_fake_forward, _fake_backward), strict=True
        )
    )
    composed_forward = functools.partial(composed.forward, impl)
    composed_backward = functools.partial(composed.backward, impl)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, *ctx.options = inputs
        ctx.save_for_backward(x, weight, bias)

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        kernel_size, dilation, _, _, allow_tf32 = ctx.options
        fused = is_backward_fused(impl, x, weight, kernel_size, dilation, allow_tf32)
        compute = backward if fused else composed_backward
        d_x, d_weight, d_bias = compute(grad, x, weight, bias, *ctx.options)
        return d_x, d_weight, None if bias is None else d_bias, *(None,) * 5

    register_layer(
        _library, forward, backward, save, differentiate, composed_forward, composed_backward
    )
    return forward


def _fake_forward(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    return torch.empty_like(x)


def _fake_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), weight.new_empty(weight.shape[0])


# Implementation -> its forward.
_FORWARD = {impl: _register(impl) for impl in KERNELS}


def _flops(x_shape: Any, weight_shape: Any, kernel_size: int) -> tuple[int, int]:
    """Counts those of the generator's convolution and those of the application."""
    B, C, H, W = x_shape
    pixels = B * H * W
    generator = 2 * pixels * weight_shape[0] * weight_shape[1] * weight_shape[2] * weight_shape[3]
    return generator, 2 * pixels * C * kernel_size**2


@register_flop_formula(_ops.high_order_layer)
def _forward_flops(
    x_shape: Any, weight_shape: Any, bias_shape: Any, kernel_size: int, *args: Any, **kwargs: Any
) -> int:
    return sum(_flops(x_shape, weight_shape, kernel_size))


@register_flop_formula(_ops.high_order_layer_backward)
def _backward_flops(
    grad_shape: Any, x_shape: Any, weight_shape: Any, bias_shape: Any, kernel_size: int,
    *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    generator, application = _flops(x_shape, weight_shape, kernel_size)
    return 3 * generator + 2 * application  # the weights are generated again


def run(
    impl: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kernel_size: Pair,
    dilation: Pair,
    stride: Pair,
    scale: Pair,
    padding: Padding,
    normalize: Normalize | None,
    residual: bool,
) -> Tensor:
    """Computes the layer by one implementation: in its fused kernel if there is one."""
    height, width = make_pair("kernel_size", kernel_size)
    window = Window.of(height * width, (height, width), dilation, stride, scale, padding)
    if 0 in x.shape[1:] or why_unfused(impl, weight, window, normalize):
        return reference.high_order_layer(
            x, weight, bias, window, normalize, residual, CONVOLVE[impl]
        )
    down = window.down
    options = down.taps, down.dilation, normalize == "softmax", residual, convolutions_allow_tf32()
    return _FORWARD[impl](x, weight, bias, *options)


def convolutions_allow_tf32() -> bool:
    """Returns whether float32 products of PyTorch's convolutions may be rounded to TF32, on a
    GPU."""
    return torch._C._get_cudnn_allow_tf32()


# torch.compile reads the flag when it compiles a graph, as it does for PyTorch's convolutions.
convolutions_allow_tf32._dynamo_marked_constant = True  # pyright: ignore
