"""The gradients of an op that is bilinear in x and weight.

Three maps are closed under differentiation: the forward F(x, w), the input gradient X(g, w) and the
weight gradient W(g, x), which is given the size and stride of its result. Each takes an int last,
a dilation, say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hoconv.registration import Op, gradient_layout, register_gradient


def save_forward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Saves what the gradients of F need: x and weight, or None, and the weight's layout."""
    x, weight, ctx.option = inputs
    need_x, need_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
    ctx.layout = gradient_layout(weight)


def with_tangents(op: Op) -> Callable[..., Tensor]:
    """The op where one of its first two arguments has a tangent, by the product rule."""

    def call(a: Tensor, b: Tensor, *options: Any) -> Tensor:
        (a, d_a), (b, d_b) = forward_ad.unpack_dual(a), forward_ad.unpack_dual(b)
        tangents = []
        if d_a is not None:
            tangents.append(op(d_a, b, *options))
        if d_b is not None:
            tangents.append(op(a, d_b, *options))
        return forward_ad.make_dual(op(a, b, *options), sum(tangents[1:], tangents[0]))

    return call


def register_second_gradients(
    library: torch.library.Library,
    forward: Op,
    grad_input: Op,
    grad_weight: Op,
) -> None:
    """Makes X and W differentiable any number of times."""

    def save_grad_input(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, weight, ctx.option = inputs
        ctx.save_for_backward(grad, weight)

    def differentiate_grad_input(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        grad, weight = ctx.saved_tensors
        need_grad, need_weight = ctx.needs_input_grad[:2]
        d_grad = forward(u, weight, ctx.option) if need_grad else None
        d_weight = (
            grad_weight(grad, u, *gradient_layout(weight), ctx.option) if need_weight else None
        )
        return d_grad, d_weight, None

    def save_grad_weight(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, x, _, _, ctx.option = inputs
        ctx.save_for_backward(grad, x)

    def differentiate_grad_weight(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        grad, x = ctx.saved_tensors
        need_grad, need_x = ctx.needs_input_grad[:2]
        d_grad = forward(x, v, ctx.option) if need_grad else None
        d_x = grad_input(grad, v, ctx.option) if need_x else None
        return d_grad, d_x, None, None, None

    for op, save, differentiate in (
        (grad_input, save_grad_input, differentiate_grad_input),
        (grad_weight, save_grad_weight, differentiate_grad_weight),
    ):
        register_gradient(library, op, differentiate, save, with_tangents(op))
