"""The transforms of torch.func, computed by loops and torch.autograd.grad only.

Names and signatures are torch.func's, as far as scripts/fuzz.py uses them, so that a program can
run with either module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


def vmap(function: Function, in_dims: Sequence[int | None]) -> Function:
    """Returns a function that calls the given one with each slice."""

    def mapped(*tensors: Tensor) -> Any:
        pairs = list(zip(tensors, in_dims, strict=True))
        count = next(t.shape[d] for t, d in pairs if d is not None)
        results = [
            function(*(t if d is None else t.select(d, i) for t, d in pairs)) for i in range(count)
        ]
        if isinstance(results[0], tuple):
            return tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return torch.stack(results)

    return mapped


def grad(function: Function, argnums: tuple[int, ...]) -> Function:
    """Returns the gradient of a function whose value is one number."""

    def gradient(*tensors: Tensor) -> tuple[Tensor, ...]:
        again, inputs = _inputs(tensors, argnums)
        value = function(*inputs)
        return _gradients(value, inputs, argnums, torch.ones_like(value), again)

    return gradient


def jacrev(function: Function, argnums: tuple[int, ...]) -> Function:
    """Returns the Jacobian, computed row by row."""

    def jacobian(*tensors: Tensor) -> tuple[Tensor, ...]:
        again, inputs = _inputs(tensors, argnums)
        value = function(*inputs)
        rows = []
        for i in range(value.numel()):
            unit = torch.zeros_like(value).flatten()
            unit[i] = 1
            unit = unit.view_as(value)
            rows.append(_gradients(value, inputs, argnums, unit, again, retain=True))
        if not rows:
            return tuple(inputs[i].new_zeros(*value.shape, *inputs[i].shape) for i in argnums)
        return tuple(torch.stack(column).unflatten(0, value.shape) if value.dim() else column[0]
                     for column in zip(*rows, strict=True))  # fmt: skip

    return jacobian


jacfwd = jacrev


def hessian(function: Function, argnums: tuple[int, ...]) -> Function:
    """Returns the Hessian with respect to one argument; the function's value is one number."""
    (argument,) = argnums

    def second(*tensors: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        first = grad(function, argnums)
        return (jacrev(lambda *t: first(*t)[0], (argument,))(*tensors),)

    return second


def jvp(
    function: Function, primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Returns the value and the derivative along the tangents: the gradient, which is linear in the
    cotangent, is differentiated with respect to it."""
    arguments = tuple(range(len(primals)))
    again, inputs = _inputs(primals, arguments)
    value = function(*inputs)
    cotangent = torch.zeros_like(value).requires_grad_()
    gradients = _gradients(value, inputs, arguments, cotangent, True)
    inner = sum(
        ((g * t).sum() for g, t in zip(gradients, tangents, strict=True)), value.new_zeros(())
    )
    along = torch.zeros_like(value)
    if inner.requires_grad:
        along = torch.autograd.grad(
            inner, cotangent, create_graph=again, materialize_grads=True
        )[0]  # fmt: skip
    return (value if again else value.detach()), along


def _inputs(tensors: Sequence[Tensor], argnums: Sequence[int]) -> tuple[bool, list[Tensor]]:
    """Returns whether the result is differentiated again, and inputs to differentiate by."""
    again = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    inputs = [
        t if i not in argnums else t.view_as(t) if t.requires_grad else t.detach().requires_grad_()
        for i, t in enumerate(tensors)
    ]
    return again, inputs


def _gradients(
    value: Tensor, inputs: Sequence[Tensor], argnums: Sequence[int], cotangent: Tensor,
    again: bool, retain: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    return torch.autograd.grad(
        value, [inputs[i] for i in argnums], cotangent, create_graph=again,
        retain_graph=again or retain, materialize_grads=True,
    )  # fmt: skip
