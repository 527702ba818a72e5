"""The ops of an operator that is bilinear in x and weight, and their gradients.

Three maps are closed under differentiation: the forward F(x, w), the input gradient X(g, w) and the
weight gradient W(g, x), which is given the size and stride of its result; so is X where the size
of g leaves it open. Each map takes the operator's option last. X is the adjoint of F in x, and may
be an operator itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hoconv.dispatch.registration import (
    Op,
    define,
    gradient_layout,
    register_autocast,
    register_gradient,
)
from hoconv.jit import Library


class BilinearOps(NamedTuple):
    """F, X and W of one implementation."""

    forward: Op
    grad_input: Op
    grad_weight: Op
    layout_of_x: Callable[[Tensor], tuple[Any, ...]]  # what X is given of its result


def _no_layout(x: Tensor) -> tuple[()]:
    return ()


def register_bilinear(
    library: torch.library.Library,
    name: str,
    impl: str,
    option: str,
    code: Library | None = None,
    *,
    fake_forward: Callable[..., Tensor] | None = None,
    one_pass: bool = False,
) -> BilinearOps:
    """Registers the ops of one implementation.

    They are ``<name>`` for F, ``<name>_grad_input`` for X and ``<name>_grad_weight`` for W, each
    with gradients of every order in reverse and forward mode.

    Args:
        option: the last argument in the schemas, ``int padding``, say.
        code: the compiled code that has the kernels, if any.
        fake_forward: the fake of F where x and its result differ in size; then X is given one.
        one_pass: whether the kernels have ``<name>_backward`` too, X and W in one pass over g.
    """

    def define_one(suffix: str, schema: str, fake: Callable[..., Any]) -> Op:
        return define(library, name + suffix, impl, schema.format(option), fake, code)

    layout = "SymInt[] size, SymInt[] stride, "
    of_x = layout if fake_forward else ""
    ops = BilinearOps(
        define_one("", "(Tensor x, Tensor weight, {}) -> Tensor", fake_forward or _fake_like_first),
        define_one("_grad_input", f"(Tensor grad, Tensor weight, {of_x}{{}}) -> Tensor",
                   _fake_gradient if fake_forward else _fake_like_first),
        define_one("_grad_weight", f"(Tensor grad, Tensor x, {layout}{{}}) -> Tensor",
                   _fake_gradient),
        gradient_layout if fake_forward else _no_layout,
    )  # fmt: skip
    backward = None
    if one_pass:
        schema = "(Tensor grad, Tensor x, Tensor weight, {}) -> (Tensor, Tensor)"
        backward = define_one("_backward", schema, _fake_backward)
        _register_gradient_of_backward(library, ops, backward)
    _register_gradient_of_forward(library, ops, backward)
    _register_gradient_of_grad_input(library, ops)
    _register_gradient_of_grad_weight(library, ops)
    register_autocast(library, ops.forward)
    return ops


def _fake_like_first(x: Tensor, weight: Tensor, option: Any) -> Tensor:
    return torch.empty_like(x)


def _fake_gradient(grad: Tensor, other: Tensor, size: list, stride: list, option: Any) -> Tensor:
    return grad.new_empty_strided(size, stride)


def _fake_backward(grad: Tensor, x: Tensor, weight: Tensor, option: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _register_gradient_of_forward(
    library: torch.library.Library, ops: BilinearOps, backward: Op | None
) -> None:
    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.option = inputs
        need_x, need_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        ctx.of_x, ctx.of_weight = ops.layout_of_x(x), gradient_layout(weight)

    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if backward is not None and x is not None and weight is not None:
            return *backward(grad, x, weight, ctx.option), None
        d_x = None if weight is None else ops.grad_input(grad, weight, *ctx.of_x, ctx.option)
        d_weight = None if x is None else ops.grad_weight(grad, x, *ctx.of_weight, ctx.option)
        return d_x, d_weight, None

    register_gradient(library, ops.forward, differentiate, save, _with_tangents(ops.forward))


def _register_gradient_of_grad_input(library: torch.library.Library, ops: BilinearOps) -> None:
    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, weight, *_, ctx.option = inputs
        ctx.save_for_backward(grad, weight)
        ctx.others = len(inputs) - 2

    def differentiate(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        """u is the cotangent of X(g, w), shaped as x."""
        grad, weight = ctx.saved_tensors
        need_grad, need_weight = ctx.needs_input_grad[:2]
        d_grad = d_weight = None
        if need_grad:
            d_grad = ops.forward(u, weight, ctx.option)
        if need_weight:
            d_weight = ops.grad_weight(grad, u, *gradient_layout(weight), ctx.option)
        return d_grad, d_weight, *(None,) * ctx.others

    register_gradient(library, ops.grad_input, differentiate, save, _with_tangents(ops.grad_input))


def _register_gradient_of_grad_weight(library: torch.library.Library, ops: BilinearOps) -> None:
    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, x, _, _, ctx.option = inputs
        ctx.save_for_backward(grad, x)
        ctx.of_x = ops.layout_of_x(x)

    def differentiate(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        """v is the cotangent of W(g, x), shaped as w."""
        grad, x = ctx.saved_tensors
        need_grad, need_x = ctx.needs_input_grad[:2]
        d_grad = ops.forward(x, v, ctx.option) if need_grad else None
        d_x = ops.grad_input(grad, v, *ctx.of_x, ctx.option) if need_x else None
        return d_grad, d_x, None, None, None

    register_gradient(
        library, ops.grad_weight, differentiate, save, _with_tangents(ops.grad_weight)
    )


def _register_gradient_of_backward(
    library: torch.library.Library, ops: BilinearOps, backward: Op
) -> None:
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        grad, x, weight, ctx.option = inputs
        ctx.save_for_backward(grad, x, weight)
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, u: Tensor | None, v: Tensor | None) -> tuple[Tensor | None, ...]:
        """u and v are the cotangents of X(g, w) and W(g, x), shaped as x and w."""
        grad, x, weight = ctx.saved_tensors
        need_grad, need_x, need_weight = ctx.needs_input_grad[:3]
        option, d_grad, d_x, d_weight = ctx.option, None, None, None
        if need_grad and u is not None:
            d_grad = ops.forward(u, weight, option)
        if need_grad and v is not None:
            through_v = ops.forward(x, v, option)
            d_grad = through_v if d_grad is None else d_grad + through_v
        if need_x and v is not None:
            d_x = ops.grad_input(grad, v, *ops.layout_of_x(x), option)
        if need_weight and u is not None:
            d_weight = ops.grad_weight(grad, u, *gradient_layout(weight), option)
        return d_grad, d_x, d_weight, None

    def call_with_tangents(
        grad: Tensor, x: Tensor, weight: Tensor, option: Any
    ) -> tuple[Tensor, Tensor]:
        d_weight = ops.grad_weight(grad, x, *gradient_layout(weight), option)
        return ops.grad_input(grad, weight, *ops.layout_of_x(x), option), d_weight

    register_gradient(library, backward, differentiate, save, call_with_tangents)


def _with_tangents(op: Op) -> Callable[..., Tensor]:
    """Returns a function that calls an op, whose first two arguments may have tangents.

    The result's tangent is by the product rule.
    """

    def call(a: Tensor, b: Tensor, *options: Any) -> Tensor:
        (a, d_a), (b, d_b) = forward_ad.unpack_dual(a), forward_ad.unpack_dual(b)
        tangents = []
        if d_a is not None:
            tangents.append(op(d_a, b, *options))
        if d_b is not None:
            tangents.append(op(a, d_b, *options))
        return forward_ad.make_dual(op(a, b, *options), sum(tangents[1:], tangents[0]))

    return call
