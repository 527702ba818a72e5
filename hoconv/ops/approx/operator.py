"""Approximate products: the public functions and the operators' declarations.

B batch, C channels of the input, O of the output, G groups, H x W pixels of the input, OH x OW of
the output, R x S the kernel; M, N rows and columns of a matrix product, K what it sums over.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoconv.dispatch.declaration import Benchmark, Implementation, Operator, declare
from hoconv.dispatch.implementations import resolve
from hoconv.dispatch.registration import autocasts, check_dense, compiled
from hoconv.ops.approx import gradients, samples
from hoconv.ops.approx.geometry import as_pair, check_windows
from hoconv.ops.approx.gradients import Gradient
from hoconv.ops.approx.mantissas import MantissaTable
from hoconv.ops.approx.ops import KERNELS
from hoconv.ops.approx.sources.find import AnyMultiplier, find
from hoconv.ops.approx.tables import OfIntegers, table_conv2d, table_matmul, table_multiply

# Every implementation gives the same bits.
_TOLERANCES = {torch.float32: 0.0}


def multiply(
    a: Tensor,
    b: Tensor,
    multiplier: AnyMultiplier,
    *,
    gradient: Gradient = "approx",
    impl: str = "auto",
) -> Tensor:
    """Multiplies elementwise as the multiplier does.

    Args:
        a, b: float32, of shapes that broadcast; any strides. For a multiplier of integers, its
            dtype: int8 or uint8 of a table, int32 of a function in C.
        multiplier: a name of ``hoconv.approx.MULTIPLIERS``, or what
            :func:`hoconv.approx.multiplier` takes or returns.
        gradient: the kind of gradient, or a pair of kinds, for a and for b. ``"approx"``: the
            output's gradient is multiplied by the multiplier too; ``"ste"`` (straight-through): the
            exact gradient of the exact product; ``"analytic"``: the multiplier's own derivative.
        impl: ``"auto"``, ``"reference"``, ``"cpp"`` or ``"cuda"``.

    Returns:
        float32, of the broadcast shape. Under autocast half-precision inputs are converted. Of
        integers: int32, or int64 of a function in C, without a gradient.

    Raises:
        ValueError: an unknown multiplier or kind of gradient; the shapes do not broadcast.
        TypeError: a dtype other than the multiplier's; an option of another type.
        hoconv.dispatch.implementations.ImplementationError: `impl` names one that cannot run here.
    """
    a, b, multiplier = _check_operands("a", a, "b", b, multiplier)
    try:
        torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        raise ValueError(
            f"b: expected a shape that broadcasts with a's, {tuple(a.shape)}, got {tuple(b.shape)}"
        ) from None
    name = resolve("approx_multiply", impl, a.device.type)
    if isinstance(multiplier, OfIntegers):
        return table_multiply(a, b, multiplier, name)
    return MULTIPLY.implementations[name].function(a, b, multiplier, gradient)


def matmul(
    a: Tensor,
    b: Tensor,
    multiplier: AnyMultiplier,
    *,
    gradient: Gradient = "approx",
    impl: str = "auto",
) -> Tensor:
    """The matrix product whose multiplications are approximate.

    ``out[m, n] = sum over k of a[m, k] * b[k, n]`` in a fixed order (chunks of 1,024 consecutive k,
    each added in ascending order from zero, then the chunks), so that every implementation gives
    the same bits.

    Args:
        a: (..., M, K), float32, or as for :func:`multiply`; any strides.
        b: (K, N), which all matrices of a share (their rows then form one matrix); or (..., K, N)
            with leading dimensions that broadcast with a's.
        multiplier, gradient, impl: as for :func:`multiply`. With ``"approx"`` both gradients are
            such matrix products themselves.

    Returns:
        (..., M, N), float32. Under autocast half-precision inputs are converted. Of integers:
        int32, or int64 of a function in C, without a gradient.

    Raises:
        ValueError: the shapes do not fit; an unknown multiplier or kind of gradient.
        TypeError: a dtype other than the multiplier's; an option of another type.
        hoconv.dispatch.implementations.ImplementationError: `impl` names one that cannot run here.
    """
    a, b, multiplier = _check_operands("a", a, "b", b, multiplier)
    check_matrices("a", a, "b", b)
    name = resolve("approx_matmul", impl, a.device.type)
    if isinstance(multiplier, OfIntegers):
        return of_matrices(functools.partial(_table_matmul, multiplier, name), a, b)
    return MATMUL.implementations[name].function(a, b, multiplier, gradient)


def check_matrices(a_name: str, a: Tensor, b_name: str, b: Tensor) -> None:
    """Checks that matrices have a product.

    Raises:
        ValueError: they have none.
    """
    fits = a.dim() >= 2 and b.dim() >= 2 and a.shape[-1] == b.shape[-2]
    if fits and b.dim() > 2:
        try:
            torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except RuntimeError:
            fits = False
    if not fits:
        raise ValueError(
            f"{b_name}: expected (K, N) or (..., K, N) for {a_name} of shape (..., M, K), got "
            f"{tuple(b.shape)} for {tuple(a.shape)}"
        )


def conv2d(
    x: Tensor,
    weight: Tensor,
    multiplier: AnyMultiplier,
    *,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    gradient: Gradient = "approx",
    impl: str = "auto",
) -> Tensor:
    """The convolution of :func:`torch.nn.functional.conv2d` with approximate multiplications.

    The order of every sum is fixed, so that all implementations give the same bits: chunks of 1,024
    consecutive k, each added in ascending order from zero, then the chunks; k counts (c, r, s) of
    the weight for the output, (o, r, s) for the gradient of x and (b, oh, ow) for that of the
    weight. The zeros around x are operands like all others.

    Args:
        x: (B, C, H, W), float32, or as for :func:`multiply`; any strides.
        weight: (O, C / G, R, S), likewise.
        multiplier, gradient, impl: as for :func:`multiply`; a pair is for x and the weight.
        stride, dilation: in pixels, at least 1; an int or a pair (rows, columns).
        padding: zeros on each side; an int, a pair, ``"valid"`` (none), or ``"same"``, which keeps
            H and W and needs a stride of 1; if their number is odd, one more is at the end.
        groups: G, dividing C and O.

    Returns:
        (B, O, OH, OW), float32. Under autocast half-precision inputs are converted. Of integers:
        int32, or int64 of a function in C, without a gradient.

    Raises:
        ValueError: a shape or an option does not fit; an unknown multiplier or kind of gradient.
        TypeError: a dtype other than the multiplier's; an option of another type.
        hoconv.dispatch.implementations.ImplementationError: `impl` names one that cannot run here.
    """
    x, weight, multiplier = _check_operands("x", x, "weight", weight, multiplier)
    x, *windows = check_windows(x, weight, stride, padding, dilation, groups)
    name = resolve("approx_conv2d", impl, x.device.type)
    if isinstance(multiplier, OfIntegers):
        return table_conv2d(x, weight, windows, groups, multiplier, name)
    function = CONV2D.implementations[name].function
    return function(x, weight, multiplier, *windows, groups, gradient)


def _check_operands(
    a_name: str, a: Tensor, b_name: str, b: Tensor, multiplier: AnyMultiplier
) -> tuple[Tensor, Tensor, Any]:
    """Returns both operands, converted under autocast and checked, and the multiplier, found."""
    multiplier = find(multiplier)
    check_dense(a, a_name)
    check_dense(b, b_name)
    dtype, what = torch.float32, "float32, whose bits the multiplier works on"
    fix = "convert it with {0}.float(), or use autocast, which does"
    if isinstance(multiplier, OfIntegers):
        dtype, what = multiplier.dtype, f"{multiplier.dtype}, an operand of {multiplier!r}"
        fix = "use ApproxConv2d or ApproxLinear, which quantise"
    elif autocasts(a.device.type):
        a, b = (t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in (a, b))
    for name, t in ((a_name, a), (b_name, b)):
        if t.dtype != dtype:
            raise TypeError(f"{name}: expected {what}, got {t.dtype}; {fix.format(name)}")
    if b.device != a.device:
        raise ValueError(f"{b_name}: expected the device of {a_name}, {a.device}, got {b.device}")
    return a, b, multiplier


def _parts(
    multiplier: str | MantissaTable, gradient: Gradient, device: torch.device
) -> tuple[str, Tensor | None, tuple[str, str]]:
    """Returns a multiplier's name or, of a table, its entries; and the kinds of the gradients."""
    pair = gradients.kinds(gradient)
    if isinstance(multiplier, str):
        return multiplier, None, pair
    check_derivative(multiplier, gradient)
    return "", multiplier.on(device), pair


def check_derivative(multiplier: MantissaTable, gradient: Gradient) -> None:
    """Checks that a table is not asked for a derivative of its own.

    Raises:
        ValueError: it is.
    """
    if "analytic" in gradients.kinds(gradient):
        raise ValueError(
            f"gradient: expected approx or ste for {multiplier!r}, which has no derivative of its "
            f"own; got {gradient!r}"
        )


def _multiply(
    impl: str, a: Tensor, b: Tensor, multiplier: str | MantissaTable, gradient: Gradient
) -> Tensor:
    a, b = torch.broadcast_tensors(a, b)
    name, entries, pair = _parts(multiplier, gradient, a.device)
    return gradients.Multiply.of(a, b, entries, name, pair, impl)


def _matmul(
    impl: str, a: Tensor, b: Tensor, multiplier: str | MantissaTable, gradient: Gradient
) -> Tensor:
    name, entries, pair = _parts(multiplier, gradient, a.device)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return gradients.Matmul.of(a, b, entries, name, pair, impl)

    return of_matrices(product, a, b)


def _table_matmul(table: OfIntegers, impl: str, a: Tensor, b: Tensor) -> Tensor:
    if a.dim() == 2:
        return table_matmul(a[None], b[None], table, impl=impl)[0]
    return table_matmul(a, b, table, impl=impl)


def of_matrices(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Computes a product of matrices with leading dimensions by one of (M, K) and (K, N), or of
    (B, M, K) and (B, K, N)."""
    if a.dim() == b.dim() == 2:
        return product(a, b)
    if b.dim() == 2:
        return product(a.flatten(0, -2), b).reshape(*a.shape[:-1], b.shape[1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (
        t.expand(*batch, *t.shape[-2:]).reshape(math.prod(batch), *t.shape[-2:]) for t in (a, b)
    )
    return product(a, b).unflatten(0, batch)


def _conv2d(
    impl: str, x: Tensor, weight: Tensor, multiplier: str | MantissaTable, stride: Any,
    padding: Any, dilation: Any, groups: int, gradient: Gradient,
) -> Tensor:  # fmt: skip
    windows = (  # whoever calls an implementation by itself gives what the operator is given
        as_pair("stride", stride, 1),
        as_pair("padding", padding, 0),
        as_pair("dilation", dilation, 1),
    )
    name, entries, pair = _parts(multiplier, gradient, x.device)
    return gradients.Conv2d.of(x, weight, entries, *windows, groups, name, pair, impl)


def _implementations(function: Callable[..., Tensor]) -> dict[str, Implementation]:
    return {
        "reference": Implementation(functools.partial(function, "reference")),
        "cpp": compiled(functools.partial(function, "cpp"), ("cpu",), KERNELS["cpp"]),
        "cuda": compiled(functools.partial(function, "cuda"), ("cuda",), KERNELS["cuda"]),
    }


MULTIPLY = declare(
    Operator(
        name="approx_multiply",
        function=multiply,
        implementations=_implementations(_multiply),
        samples=samples.multiply_samples,
        tolerances=_TOLERANCES,
        cost=samples.multiply_cost,
        benchmark=Benchmark("products", (2**16, 2**20, 2**24), samples.multiply_benchmark),
        bitwise=True,
    )
)
MATMUL = declare(
    Operator(
        name="approx_matmul",
        function=matmul,
        implementations=_implementations(_matmul),
        samples=samples.matmul_samples,
        tolerances=_TOLERANCES,
        cost=samples.matmul_cost,
        benchmark=Benchmark("rows and columns", (64, 128, 256, 512), samples.matmul_benchmark),
        bitwise=True,
    )
)
CONV2D = declare(
    Operator(
        name="approx_conv2d",
        function=conv2d,
        implementations=_implementations(_conv2d),
        samples=samples.conv2d_samples,
        tolerances=_TOLERANCES,
        cost=samples.conv2d_cost,
        benchmark=Benchmark(
            "batch size (256 x 14 x 14, 256 filters of 3 x 3)", (1, 8, 32), samples.conv2d_benchmark
        ),
        bitwise=True,
    )
)
