"""The approximate products as torch.library ops: schema, fake, FLOPs.

Each op has an overload per implementation. The reference has one too, since torch.compile would
unroll its loop over k. An op of a multiplier has no gradient: gradients.py has those that the user
can choose. The gradient of a table's product is straight-through.

B batch, C channels of the input, O of the output, G groups, H x W pixels of the input, OH x OW of
the output, R x S the kernel; M, N rows and columns of a matrix product, K what it sums over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hoconv.dispatch.registration import (
    Op,
    define,
    kernels,
    register_gradient,
)
from hoconv.ops.approx import reference

NO_FORWARD_MODE = (
    "has no forward-mode derivative; use reverse mode: backward, torch.func.vjp or "
    "torch.func.jacrev"
)

_library = torch.library.Library("hoconv", "FRAGMENT")
_ops = torch.ops.hoconv
KERNELS = kernels("approx")

_MULTIPLIER = "str multiplier, Tensor? entries=None"
_WINDOWS = "SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, SymInt groups"
# A multiplier has a name, or the entries of a table of mantissas, with which the name is ignored.
_SCHEMAS = {
    # Of equal shapes, both contiguous; the derivative is with respect to a.
    "approx_multiply": f"(Tensor a, Tensor b, {_MULTIPLIER}) -> Tensor",
    "approx_multiply_derivative": "(Tensor a, Tensor b, str multiplier) -> Tensor",
    # a (B, M, K), b (B, K, N), or all without B; any strides.
    "approx_matmul": f"(Tensor a, Tensor b, {_MULTIPLIER}) -> Tensor",
    "approx_matmul_derivative": "(Tensor grad, Tensor a, Tensor b, str multiplier) -> Tensor",
    # x (B, C, H, W), weight (O, C / G, R, S), grad (B, O, OH, OW), any strides; `size` is that of
    # the result.
    "approx_conv2d": f"(Tensor x, Tensor weight, {_WINDOWS}, {_MULTIPLIER}) -> Tensor",
    "approx_conv2d_backward_input":
        f"(Tensor grad, Tensor weight, SymInt[] size, {_WINDOWS}, {_MULTIPLIER}) -> Tensor",
    "approx_conv2d_backward_weight":
        f"(Tensor grad, Tensor x, SymInt[] size, {_WINDOWS}, {_MULTIPLIER}) -> Tensor",
    # Bytes a (B, M, K), b (B, K, N), any strides, table (256, 256) int32 of all pairs of them; the
    # result is (B, M, N) int32.
    "approx_table_matmul": "(Tensor a, Tensor b, Tensor table) -> Tensor",
    # float32 a (B, M, K), b (B, K, N) on grids of integers, each given by its scale and zero point.
    # The products of their integers are the table's.
    "approx_table_product":
        "(Tensor a, Tensor b, Tensor scale_a, Tensor zero_a, Tensor scale_b, Tensor zero_b, "
        "Tensor table, bool signed) -> Tensor",
}  # fmt: skip


@dataclass(frozen=True)
class Ops:
    """The ops of one implementation; see their definitions in reference.py."""

    multiply: Op
    multiply_derivative: Op
    matmul: Op
    matmul_derivative: Op
    conv2d: Op
    conv2d_backward_input: Op
    conv2d_backward_weight: Op
    table_matmul: Op
    table_product: Op


def _fake_multiply(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def _fake_matmul(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def _fake_matmul_derivative(grad: Tensor, a: Tensor, b: Tensor, multiplier: str) -> Tensor:
    return a.new_empty(a.shape)


def _fake_conv2d(
    x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, *_: Any
) -> Tensor:  # fmt: skip
    size = reference.output_size(x.shape, weight.shape, stride, padding, dilation)
    return x.new_empty(x.shape[0], weight.shape[0], *size)


def _fake_gradient(grad: Tensor, other: Tensor, size: list[int], *options: Any) -> Tensor:
    return grad.new_empty(size)


def _fake_table_matmul(a: Tensor, b: Tensor, table: Tensor) -> Tensor:
    return table.new_empty(a.shape[0], a.shape[1], b.shape[2])


def _fake_table_product(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


_FAKES = {
    "approx_multiply": _fake_multiply,
    "approx_multiply_derivative": _fake_multiply,
    "approx_matmul": _fake_matmul,
    "approx_matmul_derivative": _fake_matmul_derivative,
    "approx_conv2d": _fake_conv2d,
    "approx_conv2d_backward_input": _fake_gradient,
    "approx_conv2d_backward_weight": _fake_gradient,
    "approx_table_matmul": _fake_table_matmul,
    "approx_table_product": _fake_table_product,
}


def _register(impl: str) -> Ops:
    """Registers the ops of one implementation; compiled kernels come with their library."""
    defined = [
        define(_library, name, impl, schema, _FAKES[name], KERNELS.get(impl))
        for name, schema in _SCHEMAS.items()
    ]
    ops = Ops(*defined)
    for op in defined:
        if op is not ops.table_product:
            register_gradient(_library, op, _refuse, lambda *_: None, _refuse)
    register_gradient(
        _library, ops.table_product, _straight_through, _save_operands, _refuse_tangents
    )
    _implement_table_product(impl, ops.table_matmul)
    # The same for all implementations: it sums nothing, and PyTorch is fast enough.
    _implement("approx_multiply_derivative", impl, reference.multiply_derivative)
    return ops


def _refuse(*_: Any) -> Any:
    raise NotImplementedError(
        "the op of an approximate product, as in an exported program, has no gradient; call "
        "a function of hoconv.approx, which takes the kind of gradient"
    )


def _refuse_tangents(*_: Any) -> Any:
    raise NotImplementedError(f"a product of a table {NO_FORWARD_MODE}")


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _straight_through(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Computes the gradients of the exact product."""
    a, b = ctx.saved_tensors
    d_a = grad @ b.mT if ctx.needs_input_grad[0] else None
    d_b = a.mT @ grad if ctx.needs_input_grad[1] else None
    return d_a, d_b, *(None,) * 6


def _implement_table_product(impl: str, table_matmul: Op) -> None:
    def table_product(
        a: Tensor, b: Tensor, scale_a: Tensor, zero_a: Tensor, scale_b: Tensor, zero_b: Tensor,
        table: Tensor, signed: bool,
    ) -> Tensor:  # fmt: skip
        q_a = (a / scale_a).round().int() + zero_a
        q_b = (b / scale_b).round().int() + zero_b
        dtype = torch.int8 if signed else torch.uint8
        products = table_matmul(q_a.to(dtype), q_b.to(dtype), table)
        # The sum of (q_a - zero_a) (q_b - zero_b), whose first term, q_a q_b, is the table's.
        rows = q_a.sum(2, keepdim=True, dtype=torch.int64)
        columns = q_b.sum(1, keepdim=True, dtype=torch.int64)
        total = products - zero_b * rows - zero_a * columns + a.shape[2] * zero_a.long() * zero_b
        return (scale_a.double() * scale_b * total).float()

    _implement("approx_table_product", impl, table_product)


def _implement(name: str, impl: str, function: Callable[..., Tensor]) -> None:
    """Registers a function of PyTorch ops as the kernel of an op."""

    def contiguous(*args: Any) -> Tensor:
        return function(*args).contiguous()

    # An op of a compiled library has a kernel for all devices already: the one that loads it.
    keys = ("CPU", "CUDA") if impl in KERNELS else ("CompositeExplicitAutograd",)
    for key in keys:
        _library.impl(f"{name}.{impl}", contiguous, key)


# Implementation -> its ops.
OPS = {impl: _register(impl) for impl in ("reference", "cpp", "cuda")}
for _name in _SCHEMAS.keys() - {"approx_table_product", "approx_multiply_derivative"}:
    _implement(_name, "reference", getattr(reference, _name.removeprefix("approx_")))

# FLOPs: a multiply and an add for every product.


@register_flop_formula(_ops.approx_matmul)
def _matmul_flops(a_shape: Any, b_shape: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(a_shape) * b_shape[-1]


@register_flop_formula(_ops.approx_conv2d)
def _conv2d_flops(
    x_shape: Any, weight_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return 2 * math.prod(out_shape) * math.prod(weight_shape[1:])


@register_flop_formula(_ops.approx_conv2d_backward_input)
def _backward_input_flops(grad_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(grad_shape) * math.prod(weight_shape[1:])


@register_flop_formula(_ops.approx_conv2d_backward_weight)
def _backward_weight_flops(
    grad_shape: Any, x_shape: Any, size: Any, *args: Any, **kwargs: Any
) -> int:
    return 2 * math.prod(grad_shape) * math.prod(size[1:])
