"""The gradients of approximate products: of three kinds, chosen for each operand.

``approx`` uses the multiplier in the gradient's sums too, as hardware that trains would. ``ste``
(straight-through) is the exact gradient of the exact product. ``analytic`` uses the multiplier's
own derivative, which jumps where the multiplier does.

B batch, C channels of the input, O of the output, G groups, L pixels of the output, R x S the
kernel; M, N rows and columns of a matrix product, K what it sums over.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoconv.dispatch.registration import (
    call_one_by_one,
    is_plain,
    records_gradients,
    without_autocast,
)
from hoconv.ops.approx.first_derivative import refuse_second_derivative
from hoconv.ops.approx.ops import NO_FORWARD_MODE, OPS, Ops
from hoconv.ops.approx.reference import Pair, columns
from hoconv.ops.approx.table_gradients.choice import describe

KINDS = ("approx", "ste", "analytic")
# What a user gives: tables and "difference" are of multipliers of integers, in table_gradients/.
Gradient = str | Sequence[Any]
Geometry = Sequence[Any]  # stride, padding, dilation, groups


def kinds(gradient: Gradient) -> tuple[str, str]:
    """Returns the kind of each operand's gradient.

    Raises:
        ValueError: `gradient` is neither a kind nor a pair of kinds.
        TypeError: `gradient` is neither a string nor a sequence.
    """
    is_pair = not isinstance(gradient, str) and isinstance(gradient, Sequence)
    pair = tuple(gradient) if is_pair else (gradient, gradient)
    if len(pair) == 2 and all(isinstance(kind, str) and kind in KINDS for kind in pair):
        return str(pair[0]), str(pair[1])
    error = ValueError if isinstance(gradient, Sequence) else TypeError
    raise error(
        f"gradient: expected one of {', '.join(KINDS)}, or a pair of them for the two operands, "
        f"for a multiplier of floats; got {describe(gradient)}"
    )


class _Product(torch.autograd.Function):
    """A product of two operands by a multiplier, which has entries if it is a table of mantissas;
    the arguments after them are the options of `backward`."""

    generate_vmap_rule = True
    eager: type[torch.autograd.Function]

    def __init_subclass__(cls) -> None:
        cls.eager = _make_eager(cls)

    @classmethod
    def of(cls, *args: Any) -> Tensor:
        """Applies the function, and refuses forward mode."""
        if is_plain(args):
            wanted = records_gradients() and torch._C._any_requires_grad(*args)
            return cls.eager.apply(*args) if wanted else cls.forward(*args)
        if not torch.compiler.is_compiling() and torch.overrides.has_torch_function(args):
            return torch.overrides.handle_torch_function(cls.of, args, *args)
        # A `jvp` that raises would refuse it too, but torch.compile takes no function with a `jvp`.
        try:
            return cls.apply(*args)
        except NotImplementedError as error:
            if "jvp" not in str(error):
                raise
            raise NotImplementedError(f"an approximate product {NO_FORWARD_MODE}") from None

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, entries, *ctx.options = inputs
        ctx.save_for_backward(a, b, entries)


def _make_eager(product: type[_Product]) -> type[torch.autograd.Function]:
    """Returns the function of a product for calls outside torch.func.

    Its context is set up in `forward`; PyTorch calls a `setup_context` of its own only after it
    has bound the arguments, which takes longer than a small product.
    """

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            output = product.forward(*args)
            product.setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            found = call_one_by_one(functools.partial(product.backward, ctx), (grad,))
            return (*found,)

    return Eager


class Multiply(_Product):
    """The elementwise product of a and b of equal shapes."""

    @staticmethod
    def forward(
        a: Tensor, b: Tensor, entries: Tensor | None, multiplier: str, gradient: tuple[str, str],
        impl: str,
    ) -> Tensor:  # fmt: skip
        return OPS[impl].multiply(a.contiguous(), b.contiguous(), multiplier, entries)

    @staticmethod
    @refuse_second_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, entries = ctx.saved_tensors
        multiplier, gradient, impl = ctx.options
        ops = OPS[impl]

        def gradient_of(kind: str, operand: Tensor, other: Tensor) -> Tensor:
            if kind == "approx":
                return ops.multiply(grad.contiguous(), other.contiguous(), multiplier, entries)
            if kind == "ste":
                return grad * other
            return grad * ops.multiply_derivative(operand, other, multiplier)

        need_a, need_b = ctx.needs_input_grad[:2]
        d_a = gradient_of(gradient[0], a, b) if need_a else None
        d_b = gradient_of(gradient[1], b, a) if need_b else None
        return d_a, d_b, None, None, None, None


class Matmul(_Product):
    """The matrix product of a (M, K) and b (K, N), or of a (B, M, K) and b (B, K, N)."""

    @staticmethod
    def forward(
        a: Tensor, b: Tensor, entries: Tensor | None, multiplier: str, gradient: tuple[str, str],
        impl: str,
    ) -> Tensor:  # fmt: skip
        return OPS[impl].matmul(a, b, multiplier, entries)

    @staticmethod
    @refuse_second_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, entries = ctx.saved_tensors
        multiplier, gradient, impl = ctx.options
        ops = OPS[impl]

        def gradient_of_left(kind: str, grad: Tensor, left: Tensor, right: Tensor) -> Tensor:
            if kind == "approx":
                return ops.matmul(grad, right.mT, multiplier, entries)
            if kind == "ste":
                with without_autocast(grad.device.type):
                    return grad @ right.mT
            return ops.matmul_derivative(grad, left, right, multiplier)

        need_a, need_b = ctx.needs_input_grad[:2]
        d_a = gradient_of_left(gradient[0], grad, a, b) if need_a else None
        d_b = gradient_of_left(gradient[1], grad.mT, b.mT, a.mT).mT if need_b else None
        return d_a, d_b, None, None, None, None


class Conv2d(_Product):
    """The convolution of x (B, C, H, W) with weight (O, C / G, R, S)."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, entries: Tensor | None, stride: Pair, padding: Pair,
        dilation: Pair, groups: int, multiplier: str, gradient: tuple[str, str], impl: str,
    ) -> Tensor:  # fmt: skip
        geometry = stride, padding, dilation, groups
        return OPS[impl].conv2d(x, weight, *geometry, multiplier, entries)

    @staticmethod
    @refuse_second_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, entries = ctx.saved_tensors
        *geometry, multiplier, gradient, impl = ctx.options
        by = multiplier, entries
        ops = OPS[impl]
        of_x, of_weight = (
            kind if needed else None
            for kind, needed in zip(gradient, ctx.needs_input_grad[:2], strict=True)
        )
        d_x = d_weight = None
        if "ste" in (of_x, of_weight):
            stride, padding, dilation, groups = geometry
            d_x, d_weight, _ = torch.ops.aten.convolution_backward(
                grad, x, weight, None, stride, padding, dilation, False, [0, 0], groups,
                [of_x == "ste", of_weight == "ste", False],
            )  # fmt: skip
        if of_x == "approx":
            d_x = ops.conv2d_backward_input(grad, weight, x.shape, *geometry, *by)
        elif of_x == "analytic":
            d_x = _analytic_input(ops, grad, x, weight, geometry, multiplier)
        if of_weight == "approx":
            d_weight = ops.conv2d_backward_weight(grad, x, weight.shape, *geometry, *by)
        elif of_weight == "analytic":
            d_weight = _analytic_weight(ops, grad, x, weight, geometry, multiplier)
        return d_x, d_weight, *(None,) * 8


def _analytic_input(
    ops: Ops, grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, multiplier: str
) -> Tensor:
    """Computes the analytic gradient of x.

    The convolution is a matrix product of unfolded windows (L, K) with filters (K, O / G).
    """
    stride, padding, dilation, groups = geometry
    d_columns = ops.matmul_derivative(
        grad.flatten(2).unflatten(1, (groups, -1)).flatten(0, 1).mT,
        columns(x, weight.shape, *geometry).mT,
        weight.reshape(groups, weight.shape[0] // groups, -1).mT.repeat(x.shape[0], 1, 1),
        multiplier,
    )
    d_columns = d_columns.mT.unflatten(0, (x.shape[0], groups)).flatten(1, 2)  # (B, G * K, L)
    return F.fold(d_columns, x.shape[2:], weight.shape[2:], dilation, padding, stride)


def _analytic_weight(
    ops: Ops, grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, multiplier: str
) -> Tensor:
    """Computes the analytic gradient of the weight.

    The convolution is a matrix product of filters (O / G, K) with all windows (K, B * L).
    """
    groups = geometry[3]
    unfolded = columns(x, weight.shape, *geometry).unflatten(0, (x.shape[0], groups))
    d_filters = ops.matmul_derivative(
        grad.flatten(2).unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(2),
        weight.reshape(groups, weight.shape[0] // groups, -1),
        unfolded.permute(1, 2, 0, 3).flatten(2),
        multiplier,
    )
    return d_filters.reshape(weight.shape)
