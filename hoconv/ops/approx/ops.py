"""The approximate products as torch.library ops: schema, fake, FLOPs.

Each op has an overload per implementation. The reference has one too, since torch.compile would
unroll its loop over k. An op of a multiplier has no gradient: gradients.py has those that the user
can choose. Products of quantised numbers by a table of integers have the gradient that they are
given.

B batch, C channels of the input, O of the output, G groups, H x W pixels of the input, OH x OW of
the output, R x S the kernel; M, N rows and columns of a matrix product, K what it sums over.
"""

from __future__ import annotations

import functools
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
from hoconv.ops.approx import function_products, reference
from hoconv.ops.approx.accumulators import Adder, Register, parse
from hoconv.ops.approx.first_derivative import refuse_second_derivative
from hoconv.ops.approx.reference import Pair
from hoconv.ops.approx.table_gradients.backward import Operand, of_conv2d, of_matmul

NO_FORWARD_MODE = (
    "has no forward-mode derivative; use reverse mode: backward, torch.func.vjp or "
    "torch.func.jacrev"
)

_MOST_TAPS = 64  # as in csrc/approx/cuda/depthwise.cu
_library = torch.library.Library("hoconv", "FRAGMENT")
_ops = torch.ops.hoconv
KERNELS = kernels("approx")

_MULTIPLIER = "str multiplier, Tensor? entries=None"
_WINDOWS = "SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, SymInt groups"
_GRIDS = (
    "Tensor scale_a, Tensor zero_a, Tensor scale_b, Tensor zero_b, Tensor? table, str? function, "
    "Tensor? terms_a, Tensor? terms_b, bool signed, str? accumulator"
)
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
    # result is (B, M, N) int32. At each addition sums are kept within least to most, if given.
    "approx_table_matmul":
        "(Tensor a, Tensor b, Tensor table, int? least=None, int? most=None) -> Tensor",
    # Bytes x (B, C, H, W) and weight (O, 1, R, S), of up to _MOST_TAPS taps, and C groups; a sum is
    # kept within least to most at each addition, or wraps to them after the last. Without scales
    # the result is int32; with them, float32 as of approx_integer_total.
    "approx_table_depthwise":
        "(Tensor x, Tensor weight, Tensor table, SymInt[2] stride, SymInt[2] padding, "
        "SymInt[2] dilation, bool signed, int? least=None, int? most=None, bool wraps=False, "
        "Tensor? scale_a=None, Tensor? zero_a=None, Tensor? scale_b=None, Tensor? zero_b=None) "
        "-> Tensor",
    # Numbers of float32; see reference.py.
    "approx_range_of_batches":
        "(Tensor least, Tensor most, Tensor seen_least, Tensor seen_most, float? momentum) "
        "-> (Tensor, Tensor)",
    "approx_affine":
        "(Tensor least, Tensor most, int bits, bool signed) -> (Tensor, Tensor)",
    # float32 on a grid, to int32 or, of these, the lowest byte.
    "approx_integers": "(Tensor real, Tensor scale, Tensor zero, bool is_byte) -> Tensor",
    # The windows of bytes or int32 x (B, C, H, W), padded with fill or 0, for every output:
    # (G, C / G * R * S, B * OH * OW).
    "approx_windows":
        f"(Tensor x, Tensor? fill, SymInt[2] kernel, {_WINDOWS}) -> Tensor",
    # Sums (B, M, N) of products of integers, of which rows (B, M) and columns (B, N) are the sums,
    # as real numbers (M / pixels, B * N, pixels).
    "approx_integer_total":
        "(Tensor products, Tensor rows, Tensor columns, Tensor scale_a, Tensor zero_a, "
        "Tensor scale_b, Tensor zero_b, SymInt K, SymInt pixels) -> Tensor",
    # float32 grad (B, M, N), bytes a and b, table (256, 256) float32; the result is (B, M, K).
    "approx_table_derivative": "(Tensor grad, Tensor a, Tensor b, Tensor table) -> Tensor",
    # Integers a and b of equal shapes, or (B, M, K) and (B, K, N), any strides; a table of all
    # pairs of bytes or the code of a CFunction; the result is int64. See function_products.py.
    "approx_function_multiply": "(Tensor a, Tensor b, str function) -> Tensor",
    "approx_function_matmul":
        "(Tensor a, Tensor b, Tensor? table, str? function, bool signed, str? accumulator=None) "
        "-> Tensor",
    # float32 a (B, M, K), b (B, K, N), or x and weight, on grids of integers, each given by its
    # scale and zero point. The products of their integers are the table's, or the function's.
    # Their gradients have the terms of table_gradients.tables.GradientTable; without, they are
    # straight-through.
    "approx_integer_product": f"(Tensor a, Tensor b, {_GRIDS}) -> Tensor",
    "approx_integer_conv2d": f"(Tensor x, Tensor weight, {_GRIDS}, {_WINDOWS}) -> Tensor",
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
    table_depthwise: Op
    range_of_batches: Op
    affine: Op
    integers: Op
    windows: Op
    integer_total: Op
    table_derivative: Op
    function_multiply: Op
    function_matmul: Op
    integer_product: Op
    integer_conv2d: Op


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


def _fake_table_matmul(a: Tensor, b: Tensor, table: Tensor, *_: Any) -> Tensor:
    return table.new_empty(a.shape[0], a.shape[1], b.shape[2])


def _fake_table_depthwise(
    x: Tensor, weight: Tensor, table: Tensor, stride: Any, padding: Any, dilation: Any, *args: Any
) -> Tensor:  # fmt: skip
    size = reference.output_size(x.shape, weight.shape, stride, padding, dilation)
    is_real = len(args) > 4 and args[4] is not None
    dtype = torch.float32 if is_real else torch.int32
    return x.new_empty(x.shape[0], weight.shape[0], *size, dtype=dtype)


def _fake_range_of_batches(least: Tensor, most: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(least), torch.empty_like(most)


def _fake_affine(least: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(least), torch.empty_like(least, dtype=torch.int32)


def _fake_integers(real: Tensor, scale: Tensor, zero: Tensor, is_byte: bool) -> Tensor:
    return real.new_empty(real.shape, dtype=torch.uint8 if is_byte else torch.int32)


def _fake_windows(
    x: Tensor, fill: Tensor | None, kernel: Any, stride: Any, padding: Any, dilation: Any,
    groups: int,
) -> Tensor:  # fmt: skip
    size = reference.output_size(x.shape, [0, 0, *kernel], stride, padding, dilation)
    K = x.shape[1] // groups * math.prod(kernel)
    return x.new_empty(groups, K, x.shape[0] * math.prod(size))


def _fake_integer_total(products: Tensor, *args: Any) -> Tensor:
    (B, M, N), pixels = products.shape, args[-1]
    return products.new_empty(M // pixels, B * N, pixels, dtype=torch.float32)


def _fake_function_multiply(a: Tensor, b: Tensor, function: str) -> Tensor:
    return torch.empty_like(a, dtype=torch.int64, memory_format=torch.contiguous_format)


def _fake_function_matmul(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2], dtype=torch.int64)


def _fake_integer_product(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


def _fake_table_derivative(grad: Tensor, a: Tensor, *_: Any) -> Tensor:
    return grad.new_empty(a.shape)


def _fake_integer_conv2d(x: Tensor, weight: Tensor, *args: Any) -> Tensor:
    stride, padding, dilation, _ = args[-4:]
    return _fake_conv2d(x, weight, stride, padding, dilation)


_FAKES = {
    "approx_multiply": _fake_multiply,
    "approx_multiply_derivative": _fake_multiply,
    "approx_matmul": _fake_matmul,
    "approx_matmul_derivative": _fake_matmul_derivative,
    "approx_conv2d": _fake_conv2d,
    "approx_conv2d_backward_input": _fake_gradient,
    "approx_conv2d_backward_weight": _fake_gradient,
    "approx_table_matmul": _fake_table_matmul,
    "approx_table_depthwise": _fake_table_depthwise,
    "approx_range_of_batches": _fake_range_of_batches,
    "approx_affine": _fake_affine,
    "approx_integers": _fake_integers,
    "approx_windows": _fake_windows,
    "approx_integer_total": _fake_integer_total,
    "approx_table_derivative": _fake_table_derivative,
    "approx_function_multiply": _fake_function_multiply,
    "approx_function_matmul": _fake_function_matmul,
    "approx_integer_product": _fake_integer_product,
    "approx_integer_conv2d": _fake_integer_conv2d,
}


def _register(impl: str) -> Ops:
    """Registers the ops of one implementation; compiled kernels come with their library."""
    defined = [
        define(_library, name, impl, schema, _FAKES[name], KERNELS.get(impl))
        for name, schema in _SCHEMAS.items()
    ]
    ops = Ops(*defined)
    of_grids = (ops.integer_product, ops.integer_conv2d)
    for op in defined:
        if op not in of_grids:
            register_gradient(_library, op, _refuse, lambda *_: None, _refuse)
    for op in of_grids:
        differentiate = functools.partial(_differentiate, ops.table_derivative)
        register_gradient(_library, op, differentiate, _save_operands, _refuse_tangents)
    _implement_products_of_grids(impl, ops)
    if impl == "cuda":
        _implement("approx_table_derivative", impl, reference.table_derivative)
    if impl == "cpp":
        for name in (
            "table_depthwise", "range_of_batches", "affine", "integers", "windows",
            "integer_total",
        ):  # fmt: skip
            _implement(f"approx_{name}", impl, getattr(reference, name))
    # The same for all implementations: it sums nothing, and PyTorch is fast enough.
    _implement("approx_multiply_derivative", impl, reference.multiply_derivative)
    _implement("approx_function_multiply", impl, function_products.multiply)
    _implement("approx_function_matmul", impl, function_products.matmul)
    return ops


def _refuse(*_: Any) -> Any:
    raise NotImplementedError(
        "the op of an approximate product, as in an exported program, has no gradient; call "
        "a function of hoconv.approx, which takes the kind of gradient"
    )


def _refuse_tangents(*_: Any) -> Any:
    raise NotImplementedError(f"a product of a table {NO_FORWARD_MODE}")


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *grids, _, _, terms_a, terms_b = inputs[:10]
    ctx.save_for_backward(*grids, terms_a, terms_b)
    ctx.is_straight_through = terms_a is None and terms_b is None
    ctx.windows = inputs[12:]  # of a convolution


def _differentiate(lookup: Op, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    compute = functools.partial(_gradients, lookup)
    if not ctx.is_straight_through:
        compute = refuse_second_derivative(compute)
    return compute(ctx, grad)


def _gradients(lookup: Op, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # Read once: more often is an error under activation checkpointing.
    a, b, scale_a, zero_a, scale_b, zero_b, terms_a, terms_b = ctx.saved_tensors
    operands = Operand(a, scale_a, zero_a, terms_a), Operand(b, scale_b, zero_b, terms_b)
    needed = ctx.needs_input_grad[:2]
    if ctx.windows:
        *windows, groups = ctx.windows
        found = of_conv2d(grad, *operands, windows, groups, needed, lookup)
    else:
        found = of_matmul(grad, *operands, needed, lookup)
    return *found, *(None,) * 14


def integer_matmul(
    ops: Ops, a: Tensor, b: Tensor, table: Tensor | None, function: str | None, signed: bool,
    accumulator: str | None,
) -> Tensor:  # fmt: skip
    """Computes the matrix product of integers by a table or a function."""
    found = parse(accumulator, signed)
    if table is None or isinstance(found, Adder):
        return ops.function_matmul(a, b, table, function, signed, accumulator)
    dtype = torch.int8 if signed else torch.uint8
    a, b = a.to(dtype), b.to(dtype)
    if found is None:
        return ops.table_matmul(a, b, table)
    if found.saturates:
        return ops.table_matmul(a, b, table, found.least, found.most)
    return found.keep(ops.table_matmul(a, b, table).long()).int()


def has_depthwise_kernel(impl: str, weight: Tensor, register: Register | Adder | None) -> bool:
    """Returns whether a convolution by a table is best done without unfolded windows."""
    _, channels, rows, columns = weight.shape
    is_depthwise = channels == 1 and rows * columns <= _MOST_TAPS
    return impl == "cuda" and is_depthwise and not isinstance(register, Adder)


def _implement_products_of_grids(impl: str, ops: Ops) -> None:
    def to_integers(real: Tensor, scale: Tensor, zero: Tensor, table: Any, signed: bool) -> Tensor:
        q = ops.integers(real, scale, zero, table is not None)
        return q.view(torch.int8) if signed and table is not None else q

    def product(
        a: Tensor, b: Tensor, scale_a: Tensor, zero_a: Tensor, scale_b: Tensor, zero_b: Tensor,
        table: Tensor | None, function: str | None, signed: bool, accumulator: str | None,
        pixels: int,
    ) -> Tensor:  # fmt: skip
        """Computes the product of matrices of integers as :func:`reference.integer_total`."""
        products = integer_matmul(ops, a, b, table, function, signed, accumulator)
        rows, columns = (t.sum(dim, dtype=torch.int64) for t, dim in ((a, 2), (b, 1)))
        grids = scale_a, zero_a, scale_b, zero_b
        return ops.integer_total(products, rows, columns, *grids, a.shape[2], pixels)

    def integer_product(
        a: Tensor, b: Tensor, scale_a: Tensor, zero_a: Tensor, scale_b: Tensor, zero_b: Tensor,
        table: Tensor | None, function: str | None, terms_a: Tensor | None, terms_b: Tensor | None,
        signed: bool, accumulator: str | None,
    ) -> Tensor:  # fmt: skip
        q_a = to_integers(a, scale_a, zero_a, table, signed)
        q_b = to_integers(b, scale_b, zero_b, table, signed)
        grids = scale_a, zero_a, scale_b, zero_b
        out = product(q_a, q_b, *grids, table, function, signed, accumulator, 1)
        return out.view(a.shape[1], a.shape[0], b.shape[2]).transpose(0, 1)

    def integer_conv2d(
        x: Tensor, weight: Tensor, scale_a: Tensor, zero_a: Tensor, scale_b: Tensor, zero_b: Tensor,
        table: Tensor | None, function: str | None, terms_a: Tensor | None, terms_b: Tensor | None,
        signed: bool, accumulator: str | None, stride: Pair, padding: Pair, dilation: Pair,
        groups: int,
    ) -> Tensor:  # fmt: skip
        q_x = to_integers(x, scale_a, zero_a, table, signed)
        filters = to_integers(weight, scale_b, zero_b, table, signed)
        grids, register = (scale_a, zero_a, scale_b, zero_b), parse(accumulator, signed)
        if table is not None and has_depthwise_kernel(impl, weight, register):
            assert not isinstance(register, Adder)
            kept = (register.least, register.most, not register.saturates) if register else ()
            return ops.table_depthwise(
                q_x, filters, table, stride, padding, dilation, signed,
                *(kept or (None, None, False)), *grids,
            )  # fmt: skip
        windows = stride, padding, dilation
        size = reference.output_size(x.shape, weight.shape, *windows)
        a = ops.windows(q_x, zero_a, weight.shape[2:], *windows, groups).mT
        b = filters.view(groups, weight.shape[0] // groups, -1).mT
        pixels = math.prod(size)
        out = product(a, b, *grids, table, function, signed, accumulator, pixels)
        return out.view(x.shape[0], weight.shape[0], *size)

    _implement("approx_integer_product", impl, integer_product)
    _implement("approx_integer_conv2d", impl, integer_conv2d)


def _implement(name: str, impl: str, function: Callable[..., Any]) -> None:
    """Registers a function of PyTorch ops as the kernel of an op."""

    def contiguous(*args: Any) -> Any:
        found = function(*args)
        return found.contiguous() if isinstance(found, Tensor) else found

    # An op of a compiled library has a kernel for all devices already: the one that loads it.
    keys = ("CPU", "CUDA") if impl in KERNELS else ("CompositeExplicitAutograd",)
    for key in keys:
        _library.impl(f"{name}.{impl}", contiguous, key)


# Implementation -> its ops.
OPS = {impl: _register(impl) for impl in ("reference", "cpp", "cuda")}
_OF_EVERY_IMPL = {
    "approx_multiply_derivative", "approx_function_multiply", "approx_function_matmul",
    "approx_integer_product", "approx_integer_conv2d",
}  # fmt: skip
for _name in _SCHEMAS.keys() - _OF_EVERY_IMPL:
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
