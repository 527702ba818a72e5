"""The dynamic 1-D convolution as torch.library ops: schema, fake, autograd, autocast, FLOPs.

The operator is bilinear in x and weight, so three maps are closed under differentiation: the
forward F(x, w), the input gradient X(g, w) and the weight gradient W(g, x). W sums over the
dimensions that the weight shares, batch or time, inside the kernel: `size` says which have size 1.
Each op has an overload per implementation (`.cpp`, `.cuda`).

B batch, C channels, H heads, K taps, T time steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hoconv.bilinear import register_second_gradients, save_forward, with_tangents
from hoconv.registration import Op, define, register_autocast, register_gradient

_library = torch.library.Library("hoconv", "FRAGMENT")
_ops = torch.ops.hoconv

_SCHEMAS = {
    "dynamic_conv1d": "(Tensor x, Tensor weight, int padding) -> Tensor",
    "dynamic_conv1d_grad_input": "(Tensor grad, Tensor weight, int padding) -> Tensor",
    "dynamic_conv1d_grad_weight":
        "(Tensor grad, Tensor x, SymInt[] size, SymInt[] stride, int padding) -> Tensor",
}  # fmt: skip


def _register(impl: str) -> Op:
    """Registers the ops of one implementation, whose kernels come with a compiled library.

    Returns:
        The forward.
    """
    forward, grad_input, grad_weight = (
        define(_library, name, impl, schema, fake)
        for (name, schema), fake in zip(
            _SCHEMAS.items(), (_fake, _fake, _fake_grad_weight), strict=True
        )
    )

    def differentiate_forward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_x = None if weight is None else grad_input(grad, weight, ctx.option)
        d_weight = None if x is None else grad_weight(grad, x, *ctx.layout, ctx.option)
        return d_x, d_weight, None

    register_gradient(
        _library, forward, differentiate_forward, save_forward, with_tangents(forward)
    )
    register_second_gradients(_library, forward, grad_input, grad_weight)
    register_autocast(_library, forward)
    return forward


def _fake(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    return torch.empty_like(x)


def _fake_grad_weight(grad: Tensor, x: Tensor, size: list, stride: list, padding: int) -> Tensor:
    return grad.new_empty_strided(size, stride)


cpp = _register("cpp")
cuda = _register("cuda")


def _flops(x_shape: tuple[int, ...], taps: int) -> int:
    """A multiply and an add for every tap, channel and time step, in each of the three maps."""
    B, C, T = x_shape
    return 2 * taps * B * C * T


@register_flop_formula([_ops.dynamic_conv1d, _ops.dynamic_conv1d_grad_input])
def _applied_flops(x_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
    return _flops(x_shape, weight_shape[2])


@register_flop_formula(_ops.dynamic_conv1d_grad_weight)
def _grad_weight_flops(grad_shape: Any, x_shape: Any, size: Any, *args: Any, **kwargs: Any) -> int:
    return _flops(grad_shape, size[2])
