"""The dynamic 1-D convolution as torch.library ops, with their FLOPs.

The operator is bilinear in x and weight. Its weight gradient sums over the dimensions that the
weight shares, batch or time, inside the kernel: `size` says which have size 1. Each op has an
overload per implementation (`.cpp`, `.triton`, `.cuda`).

`dynamic_conv1d_layer` generates the weights by a linear map of each step of x, too. It returns them
beside the output, for `dynamic_conv1d_layer_backward`. Tangents and gradients of higher order are
computed by composed.py, from ops that are differentiable any number of times.

B batch, C channels, H heads, K taps, T time steps.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hoconv.dispatch.registration import Op, define, kernels, register_layer
from hoconv.ops.bilinear import BilinearOps, register_bilinear
from hoconv.ops.dynamic_conv1d import composed

_library = torch.library.Library("hoconv", "FRAGMENT")
_ops = torch.ops.hoconv

KERNELS = kernels("dynamic_conv1d")
cpp = register_bilinear(_library, "dynamic_conv1d", "cpp", "int padding", KERNELS["cpp"])
triton = register_bilinear(_library, "dynamic_conv1d", "triton", "int padding")
cuda = register_bilinear(_library, "dynamic_conv1d", "cuda", "int padding", KERNELS["cuda"])


def _implement_in_triton(name: str) -> None:
    def launch(*args: Any) -> Tensor:
        from hoconv.ops.dynamic_conv1d import triton_kernels  # which imports Triton

        return getattr(triton_kernels, name)(*args)

    _library.impl(f"{name}.triton", launch, "CUDA")


for _name in ("dynamic_conv1d", "dynamic_conv1d_grad_input", "dynamic_conv1d_grad_weight"):
    _implement_in_triton(_name)


_LAYER = (
    "(Tensor x, Tensor weight, Tensor? bias, int heads, int padding, bool softmax)"
    " -> (Tensor, Tensor)"
)
# The gradients that are not needed are empty tensors.
_LAYER_BACKWARD = (
    "(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor taps, int padding, bool softmax, "
    "bool need_x, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)"
)


def _register_layer(impl: str, ops: BilinearOps) -> Op:
    """Registers the ops of a layer by one implementation.

    Returns:
        The forward.
    """
    code = KERNELS.get(impl)
    forward = define(_library, "dynamic_conv1d_layer", impl, _LAYER, _fake_layer, code)
    backward = define(
        _library, "dynamic_conv1d_layer_backward", impl, _LAYER_BACKWARD, _fake_layer_backward, code
    )
    composed_forward = functools.partial(composed.forward, ops.forward)
    if code is None:  # PyTorch's ops around kernels in Python
        for op, kernel in (
            (forward, composed_forward),
            (backward, functools.partial(composed.backward, ops)),
        ):
            op.kernel = kernel
            name = op.overload.name().removeprefix("hoconv::")
            # Autograd has recorded the op when it is called: not the ops within it, too.
            _library.impl(name, torch.no_grad()(kernel), "CUDA")

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, bias, _, *ctx.options = inputs
        ctx.save_for_backward(x, weight, bias, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        need_x, need_weight, need_bias = needed = ctx.needs_input_grad[:3]
        d_x, d_weight, d_bias = backward(grad, *ctx.saved_tensors, *ctx.options, *needed)
        return (
            d_x if need_x else None, d_weight if need_weight else None,
            d_bias if need_bias else None, None, None, None,
        )  # fmt: skip

    register_layer(
        _library, forward, backward, save, differentiate, composed_forward,
        functools.partial(composed.backward_of_parameters, ops),
    )  # fmt: skip
    return forward


def _fake_layer(
    x: Tensor, weight: Tensor, bias: Tensor | None, heads: int, padding: int, softmax: bool
) -> tuple[Tensor, Tensor]:
    (B, _, T), generated = x.shape, weight.shape[0]
    if x.is_cuda:
        taps = composed.arrange(x.new_empty(B, T, generated), heads, softmax)
    else:
        taps = x.new_empty(B, heads, generated // heads, T)
    return torch.empty_like(x), taps


def _fake_layer_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, taps: Tensor, padding: int,
    softmax: bool, *needed: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    found = (
        torch.empty_like(grad),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape[0]),
    )
    return (*(d if need else x.new_empty(0) for d, need in zip(found, needed, strict=True)),)


# Implementation -> the forward of a layer.
LAYER = {
    "cpp": _register_layer("cpp", cpp),
    "triton": _register_layer("triton", triton),
    "cuda": _register_layer("cuda", cuda),
}


def _flops(x_shape: tuple[int, ...], taps: int) -> int:
    """Counts a multiply and an add for every tap, channel and time step, in each of the maps."""
    B, C, T = x_shape
    return 2 * taps * B * C * T


@register_flop_formula([_ops.dynamic_conv1d, _ops.dynamic_conv1d_grad_input])
def _applied_flops(x_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
    return _flops(x_shape, weight_shape[2])


@register_flop_formula(_ops.dynamic_conv1d_grad_weight)
def _grad_weight_flops(grad_shape: Any, x_shape: Any, size: Any, *args: Any, **kwargs: Any) -> int:
    return _flops(grad_shape, size[2])


@register_flop_formula(_ops.dynamic_conv1d_layer)
def _layer_flops(x_shape: Any, weight_shape: Any, bias_shape: Any, heads: int, *args: Any,
                 **kwargs: Any) -> int:  # fmt: skip
    return _generator_flops(x_shape, weight_shape) + _flops(x_shape, weight_shape[0] // heads)


@register_flop_formula(_ops.dynamic_conv1d_layer_backward)
def _layer_backward_flops(
    grad_shape: Any, x_shape: Any, weight_shape: Any, bias_shape: Any, taps_shape: Any,
    padding: int, softmax: bool, need_x: bool, need_weight: bool, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    generator = _generator_flops(x_shape, weight_shape)
    return (need_x + need_weight) * generator + (1 + need_x) * _flops(x_shape, taps_shape[2])


def _generator_flops(x_shape: tuple[int, ...], weight_shape: tuple[int, ...]) -> int:
    B, C, T = x_shape
    return 2 * B * T * C * weight_shape[0]
