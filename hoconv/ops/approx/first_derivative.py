"""First derivatives that refuse to be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _FirstDerivative(torch.autograd.Function):
    """Returns a first derivative unchanged, and raises where it is differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(derivative: Tensor, *sources: Tensor) -> Tensor:
        return derivative.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("an approximate product has no second derivative")


def refuse_second_derivative(
    backward: Callable[..., tuple[Any, ...]],
) -> Callable[..., tuple[Any, ...]]:
    """Wraps a `backward` so that its results raise where they are differentiated again."""

    @functools.wraps(backward)
    def wrapped(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # One without memory, which no kernel can read.
        if not torch.compiler.is_compiling() and grad._is_zerotensor():
            grad = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        if not torch.is_grad_enabled():
            return backward(ctx, grad)
        with torch.no_grad():
            found = backward(ctx, grad)
        sources = grad, *ctx.saved_tensors[:2]
        return tuple(None if d is None else _FirstDerivative.apply(d, *sources) for d in found)

    return wrapped
