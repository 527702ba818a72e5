"""The high-order convolution as torch.library ops: schema, fake, autograd, autocast, FLOPs.

The operator is bilinear in x and weight, so three maps are closed under differentiation: the
forward F(x, w), the input gradient X(g, w) and the weight gradient W(g, x). `backward` is both
gradients in one pass over g. Each op has an overload per implementation (`.cpp`, `.cuda`).

B batch, C channels, G groups of channels, H height, W width, K = k * k taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hoconv.bilinear import register_second_gradients, save_forward, with_tangents
from hoconv.registration import (
    Op,
    define,
    gradient_layout,
    register_autocast,
    register_gradient,
)

_library = torch.library.Library("hoconv", "FRAGMENT")
_ops = torch.ops.hoconv

_SCHEMAS = {
    "high_order_conv2d": "(Tensor x, Tensor weight, int dilation) -> Tensor",
    "high_order_conv2d_backward":
        "(Tensor grad, Tensor x, Tensor weight, int dilation) -> (Tensor, Tensor)",
    "high_order_conv2d_grad_input": "(Tensor grad, Tensor weight, int dilation) -> Tensor",
    "high_order_conv2d_grad_weight":
        "(Tensor grad, Tensor x, SymInt[] size, SymInt[] stride, int dilation) -> Tensor",
}  # fmt: skip


def _register(impl: str) -> Op:
    """Registers the ops of one implementation, whose kernels come with a compiled library.

    Returns:
        The forward.
    """
    fakes = (_fake_forward, _fake_backward, _fake_grad_input, _fake_grad_weight)
    forward, backward, grad_input, grad_weight = (
        define(_library, name, impl, schema, fake)
        for (name, schema), fake in zip(_SCHEMAS.items(), fakes, strict=True)
    )

    def differentiate_forward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if x is not None and weight is not None:
            return *backward(grad, x, weight, ctx.option), None
        if weight is not None:
            return grad_input(grad, weight, ctx.option), None, None
        return None, grad_weight(grad, x, *ctx.layout, ctx.option), None

    def save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        grad, x, weight, ctx.dilation = inputs
        ctx.save_for_backward(grad, x, weight)
        ctx.set_materialize_grads(False)

    def differentiate_backward(ctx: Any, u: Tensor | None, v: Tensor | None):
        """u and v are the cotangents of X(g, w) and W(g, x), shaped as x and w."""
        grad, x, weight = ctx.saved_tensors
        need_grad, need_x, need_weight = ctx.needs_input_grad[:3]
        d, d_grad, d_x, d_weight = ctx.dilation, None, None, None
        if need_grad and u is not None:
            d_grad = forward(u, weight, d)
        if need_grad and v is not None:
            through_v = forward(x, v, d)
            d_grad = through_v if d_grad is None else d_grad + through_v
        if need_x and v is not None:
            d_x = grad_input(grad, v, d)
        if need_weight and u is not None:
            d_weight = grad_weight(grad, u, *gradient_layout(weight), d)
        return d_grad, d_x, d_weight, None

    def backward_with_tangents(grad: Tensor, x: Tensor, weight: Tensor, dilation: int):
        d_weight = grad_weight(grad, x, *gradient_layout(weight), dilation)
        return grad_input(grad, weight, dilation), d_weight

    for op, differentiate, save, tangents in (
        (forward, differentiate_forward, save_forward, with_tangents(forward)),
        (backward, differentiate_backward, save_backward, backward_with_tangents),
    ):
        register_gradient(_library, op, differentiate, save, tangents)
    register_second_gradients(_library, forward, grad_input, grad_weight)
    register_autocast(_library, forward)
    return forward


def _fake_forward(x: Tensor, weight: Tensor, dilation: int) -> Tensor:
    return torch.empty_like(x)


def _fake_backward(grad: Tensor, x: Tensor, weight: Tensor, dilation: int):
    return torch.empty_like(x), torch.empty_like(weight)


def _fake_grad_input(grad: Tensor, weight: Tensor, dilation: int) -> Tensor:
    return torch.empty_like(grad)


def _fake_grad_weight(grad: Tensor, x: Tensor, size: list, stride: list, dilation: int) -> Tensor:
    return grad.new_empty_strided(size, stride)


def _flops(weight_shape: tuple[int, ...], channels: int) -> int:
    """A multiply and an add for every tap, channel and pixel."""
    taps, B, _, H, W = weight_shape
    return 2 * taps * B * channels * H * W


cpp = _register("cpp")
cuda = _register("cuda")


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
