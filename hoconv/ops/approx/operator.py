"""Approximate products: the public functions and the operators' declarations.

B batch, C channels of the input, O of the output, G groups, H x W pixels of the input, OH x OW of
the output, R x S the kernel; M, N rows and columns of a matrix product, K what it sums over.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoconv.dispatch.declaration import Benchmark, Cost, Implementation, Operator, Sample, declare
from hoconv.dispatch.implementations import resolve
from hoconv.dispatch.registration import autocasts, check_dense, compiled
from hoconv.ops.approx import gradients, multipliers
from hoconv.ops.approx.gradients import Gradient
from hoconv.ops.approx.ops import KERNELS
from hoconv.ops.approx.reference import Pair, output_size

# Every implementation gives the same bits.
_TOLERANCES = {torch.float32: 0.0}


def multiply(
    a: Tensor, b: Tensor, multiplier: str, *, gradient: Gradient = "approx", impl: str = "auto"
) -> Tensor:
    """Multiplies elementwise as the multiplier does.

    Args:
        a, b: float32, of shapes that broadcast; any strides.
        multiplier: a name of ``hoconv.approx.MULTIPLIERS``.
        gradient: the kind of gradient, or a pair of kinds, for a and for b. ``"approx"``: the
            output's gradient is multiplied by the multiplier too; ``"ste"`` (straight-through): the
            exact gradient of the exact product; ``"analytic"``: the multiplier's own derivative.
        impl: ``"auto"``, ``"reference"``, ``"cpp"`` or ``"cuda"``.

    Returns:
        float32, of the broadcast shape. Under autocast half-precision inputs are converted.

    Raises:
        ValueError: an unknown multiplier or kind of gradient; the shapes do not broadcast.
        TypeError: a dtype other than float32; an option of another type.
        hoconv.dispatch.implementations.ImplementationError: `impl` names one that cannot run here.
    """
    a, b = _check_operands("a", a, "b", b, multiplier)
    try:
        torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        raise ValueError(
            f"b: expected a shape that broadcasts with a's, {tuple(a.shape)}, got {tuple(b.shape)}"
        ) from None
    name = resolve("approx_multiply", impl, a.device.type)
    return MULTIPLY.implementations[name].function(a, b, multiplier, gradient)


def matmul(
    a: Tensor, b: Tensor, multiplier: str, *, gradient: Gradient = "approx", impl: str = "auto"
) -> Tensor:
    """The matrix product whose multiplications are approximate.

    ``out[m, n] = sum over k of a[m, k] * b[k, n]`` in a fixed order (chunks of 1,024 consecutive k,
    each added in ascending order from zero, then the chunks), so that every implementation gives
    the same bits.

    Args:
        a: (..., M, K), float32, any strides.
        b: (K, N), which all matrices of a share (their rows then form one matrix); or (..., K, N)
            with leading dimensions that broadcast with a's.
        multiplier, gradient, impl: as for :func:`multiply`. With ``"approx"`` both gradients are
            such matrix products themselves.

    Returns:
        (..., M, N), float32. Under autocast half-precision inputs are converted.

    Raises:
        ValueError: the shapes do not fit; an unknown multiplier or kind of gradient.
        TypeError: a dtype other than float32; an option of another type.
        hoconv.dispatch.implementations.ImplementationError: `impl` names one that cannot run here.
    """
    a, b = _check_operands("a", a, "b", b, multiplier)
    fits = a.dim() >= 2 and b.dim() >= 2 and a.shape[-1] == b.shape[-2]
    if fits and b.dim() > 2:
        try:
            torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except RuntimeError:
            fits = False
    if not fits:
        raise ValueError(
            f"b: expected (K, N) or (..., K, N) for a of shape (..., M, K), got "
            f"{tuple(b.shape)} for {tuple(a.shape)}"
        )
    name = resolve("approx_matmul", impl, a.device.type)
    return MATMUL.implementations[name].function(a, b, multiplier, gradient)


def conv2d(
    x: Tensor,
    weight: Tensor,
    multiplier: str,
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
        x: (B, C, H, W), float32, any strides.
        weight: (O, C / G, R, S), float32, any strides.
        multiplier, gradient, impl: as for :func:`multiply`; a pair is for x and the weight.
        stride, dilation: in pixels, at least 1; an int or a pair (rows, columns).
        padding: zeros on each side; an int, a pair, ``"valid"`` (none), or ``"same"``, which keeps
            H and W and needs a stride of 1; if their number is odd, one more is at the end.
        groups: G, dividing C and O.

    Returns:
        (B, O, OH, OW), float32. Under autocast half-precision inputs are converted.

    Raises:
        ValueError: a shape or an option does not fit; an unknown multiplier or kind of gradient.
        TypeError: a dtype other than float32; an option of another type.
        hoconv.dispatch.implementations.ImplementationError: `impl` names one that cannot run here.
    """
    x, weight = _check_operands("x", x, "weight", weight, multiplier)
    stride, dilation = as_pair("stride", stride, 1), as_pair("dilation", dilation, 1)
    if x.dim() != 4:
        raise ValueError(f"x: expected 4 dimensions (B, C, H, W), got shape {tuple(x.shape)}")
    if weight.dim() != 4 or min(weight.shape[2:]) < 1:
        raise ValueError(
            f"weight: expected 4 dimensions (O, C / groups, R, S) with a kernel of at least 1 x 1, "
            f"got shape {tuple(weight.shape)}"
        )
    left, right, top, bottom = pad_widths(weight, padding, stride, dilation)
    if (left, top) != (right, bottom):  # the kernels pad both sides alike
        x = F.pad(x, (0, right - left, 0, bottom - top))
    padding = top, left
    C, (O, channels) = x.shape[1], weight.shape[:2]  # noqa: E741
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or C % groups:
        raise ValueError(f"groups: expected a divisor of the {C} channels of x, got {groups!r}")
    if O % groups or channels * groups != C:
        raise ValueError(
            f"weight: expected (O, {C // groups}, R, S) with O divisible by groups={groups} for "
            f"the {C} channels of x, got shape {tuple(weight.shape)}"
        )
    if min(output_size(x.shape, weight.shape, stride, padding, dilation)) < 1:
        raise ValueError(
            f"weight: its kernel of {tuple(weight.shape[2:])} with dilation {dilation} is larger "
            f"than x of shape {tuple(x.shape)} with padding {padding}"
        )
    name = resolve("approx_conv2d", impl, x.device.type)
    function = CONV2D.implementations[name].function
    return function(x, weight, multiplier, stride, padding, dilation, groups, gradient)


def _check_operands(
    a_name: str, a: Tensor, b_name: str, b: Tensor, multiplier: str
) -> tuple[Tensor, Tensor]:
    """Returns both operands, converted under autocast and checked."""
    multipliers.check(multiplier)
    check_dense(a, a_name)
    check_dense(b, b_name)
    if autocasts(a.device.type):
        a, b = (t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in (a, b))
    for name, t in ((a_name, a), (b_name, b)):
        if t.dtype != torch.float32:
            raise TypeError(
                f"{name}: expected float32, whose bits the multiplier works on, got {t.dtype}; "
                f"convert it with {name}.float(), or use autocast, which does"
            )
    if b.device != a.device:
        raise ValueError(f"{b_name}: expected the device of {a_name}, {a.device}, got {b.device}")
    return a, b


def as_pair(name: str, value: Any, least: int) -> Pair:
    """Returns a pair of ints, also of one that stands for both, each at least `least`."""
    # Of tuples it is known at once that they are sequences.
    pair = tuple(value) if isinstance(value, (tuple, Sequence)) else (value, value)
    are_ints = all(map(_is_int, pair))
    if not are_ints or len(pair) != 2:
        error = ValueError if are_ints else TypeError
        raise error(f"{name}: expected an int or a pair of them, got {value!r}")
    if min(pair) < least:
        raise ValueError(f"{name}: expected at least {least}, got {value!r}")
    return pair


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def pad_widths(weight: Tensor, padding: Any, stride: Any, dilation: Any) -> tuple[int, ...]:
    """Returns how many pixels the padding of `conv2d` adds on the left, right, top and bottom."""
    if padding == "valid":
        return 0, 0, 0, 0
    if not isinstance(padding, str):
        height, width = as_pair("padding", padding, 0)
        return width, width, height, height
    if padding != "same":
        raise ValueError(f"padding: expected a number, a pair, 'same' or 'valid'; got {padding!r}")
    stride, dilation = as_pair("stride", stride, 1), as_pair("dilation", dilation, 1)
    if stride != (1, 1):
        raise ValueError(f"padding: 'same' needs a stride of 1, got {stride}")
    height, width = (d * (n - 1) for d, n in zip(dilation, weight.shape[2:], strict=True))
    return width // 2, width - width // 2, height // 2, height - height // 2


def _multiply(impl: str, a: Tensor, b: Tensor, multiplier: str, gradient: Gradient) -> Tensor:
    a, b = torch.broadcast_tensors(a, b)
    return gradients.Multiply.of(a, b, multiplier, gradients.kinds(gradient), impl)


def _matmul(impl: str, a: Tensor, b: Tensor, multiplier: str, gradient: Gradient) -> Tensor:
    kinds = gradients.kinds(gradient)
    if a.dim() == b.dim() == 2:
        return gradients.Matmul.of(a, b, multiplier, kinds, impl)
    if b.dim() == 2:
        out = gradients.Matmul.of(a.flatten(0, -2), b, multiplier, kinds, impl)
        return out.reshape(*a.shape[:-1], b.shape[1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (
        t.expand(*batch, *t.shape[-2:]).reshape(math.prod(batch), *t.shape[-2:]) for t in (a, b)
    )
    out = gradients.Matmul.of(a, b, multiplier, kinds, impl)
    return out.unflatten(0, batch)


def _conv2d(
    impl: str, x: Tensor, weight: Tensor, multiplier: str, stride: Any, padding: Any, dilation: Any,
    groups: int, gradient: Gradient,
) -> Tensor:  # fmt: skip
    windows = (  # whoever calls an implementation by itself gives what the operator is given
        as_pair("stride", stride, 1),
        as_pair("padding", padding, 0),
        as_pair("dilation", dilation, 1),
    )
    kinds = gradients.kinds(gradient)
    return gradients.Conv2d.of(x, weight, *windows, groups, multiplier, kinds, impl)


def _implementations(function: Callable[..., Tensor]) -> dict[str, Implementation]:
    return {
        "reference": Implementation(functools.partial(function, "reference")),
        "cpp": compiled(functools.partial(function, "cpp"), ("cpu",), KERNELS["cpp"]),
        "cuda": compiled(functools.partial(function, "cuda"), ("cuda",), KERNELS["cuda"]),
    }


def _draw(device: torch.device, dtype: torch.dtype, *shape: int, zeros: float = 0.3) -> Tensor:
    """Draws random numbers of many magnitudes, some of them zero."""
    values = torch.randn(shape, dtype=torch.float64) * torch.randn(shape).mul(2).exp2()
    return torch.where(torch.rand(shape) < zeros, 0.0, values).to(device, dtype)


def _multiply_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = functools.partial(_draw, device, dtype)
    for multiplier in multipliers.MULTIPLIERS:
        yield Sample((draw(37, 5), draw(37, 5), multiplier), name=multiplier)
    yield Sample((draw(3, 1, 4), draw(5, 1), "mbm16"), name="broadcast")
    yield Sample((draw(6, 4).mT, draw(4, 12)[:, ::2], "mbm32"), name="strided")
    yield Sample((draw(2, 3), draw(2, 3), "mbm16"), {"gradient": "ste"}, "straight-through")
    yield Sample((draw(2, 3), draw(2, 3), "mbm16"), {"gradient": "analytic"}, "analytic")
    yield Sample((draw(0, 3), draw(3), "mbm16"), name="empty")
    yield Sample((draw(), draw(), "mbm16"), name="of no dimensions")


def _matmul_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = functools.partial(_draw, device, dtype)
    for multiplier in multipliers.MULTIPLIERS:
        yield Sample((draw(7, 13), draw(13, 19), multiplier), name=multiplier)
    for M, K, N in ((1, 1, 1), (1, 40, 3), (130, 3, 2), (3, 5, 70), (20, 33, 17), (2, 2100, 3)):
        yield Sample((draw(M, K), draw(K, N), "mbm16"), name=f"{M} x {K} x {N}")
    for gradient in ("analytic", ("analytic", "approx")):
        options = {"gradient": gradient}
        yield Sample((draw(5, 6), draw(6, 7), "mbm32"), options, f"gradient: {gradient}")
    yield Sample((draw(2, 3, 4, 5), draw(5, 6), "mbm16"), name="shared right matrix")
    yield Sample((draw(2, 3, 4, 5), draw(3, 5, 6), "mbm16"), name="broadcast")
    yield Sample((draw(5, 9).mT, draw(11, 5).mT, "mbm32"), name="transposed")
    yield Sample((draw(0, 4), draw(4, 3), "mbm16"), name="no rows")
    yield Sample((draw(3, 0), draw(0, 2), "mbm16"), name="nothing to sum")


def _conv2d_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = functools.partial(_draw, device, dtype)

    def sample(
        name: str, B: int, C: int, H: int, W: int, O: int, k: int = 3, G: int = 1,  # noqa: E741
        multiplier: str = "mbm16", **options: Any,
    ) -> Sample:  # fmt: skip
        x, weight = draw(B, C, H, W), draw(O, C // G, k, k, zeros=0.1)
        return Sample((x, weight, multiplier), {"groups": G, **options}, name)

    for multiplier in multipliers.MULTIPLIERS:
        yield sample(multiplier, 2, 3, 6, 7, 4, multiplier=multiplier, padding=(1, 1))
    yield sample("1 x 1", 2, 4, 5, 5, 6, 1)
    yield sample("1 x 1, stride 2", 1, 4, 5, 6, 3, 1, stride=(2, 2))
    yield sample("5 x 5", 1, 2, 7, 8, 3, 5, padding=(2, 2))
    yield sample("stride, padding, dilation", 2, 2, 9, 11, 4, stride=(2, 3), padding=(2, 1),
                 dilation=(2, 1))  # fmt: skip
    yield sample("groups", 2, 6, 5, 5, 4, G=2, padding=(1, 1))
    yield sample("depthwise", 2, 5, 6, 6, 5, G=5, padding=(1, 1))
    yield sample("wide padding", 1, 2, 3, 3, 2, 2, padding=(3, 2))
    yield sample("more than one chunk of pixels", 8, 1, 20, 21, 2, 2)
    yield sample("many outputs", 1, 2, 4, 4, 70, 2)
    yield sample("empty batch", 0, 3, 5, 5, 2)
    x, weight = draw(2, 4, 6, 5), draw(3, 4, 3, 3)
    last = torch.channels_last
    yield Sample((x.to(memory_format=last), weight.to(memory_format=last), "mbm32"),
                 name="channels-last")  # fmt: skip
    yield Sample((draw(2, 4, 5, 12)[..., ::2].mT, weight, "mbm32"), name="strided")


def _cost(sample: Sample, out: int, products: int) -> Cost:
    """Returns the cost of a call with so many elements of output, computed by so many products."""
    inputs, out = sample.args[0].nbytes + sample.args[1].nbytes, 4 * out
    return Cost(inputs + out, 2 * inputs + out, 2 * products, 4 * products)


def _multiply_cost(sample: Sample) -> Cost:
    elements = math.prod(torch.broadcast_shapes(*(t.shape for t in sample.args[:2])))
    return _cost(sample, elements, elements)


def _matmul_cost(sample: Sample) -> Cost:
    a, b, _ = sample.args
    batch = math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    out = batch * a.shape[-2] * b.shape[-1]
    return _cost(sample, out, out * a.shape[-1])


def _conv2d_cost(sample: Sample) -> Cost:
    (x, weight, _), options = sample.args, sample.kwargs
    pairs = (as_pair(name, options.get(name, default), default)
             for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)))  # fmt: skip
    size = output_size(x.shape, weight.shape, *pairs)
    out = x.shape[0] * weight.shape[0] * math.prod(size)
    return _cost(sample, out, out * math.prod(weight.shape[1:]))


def _multiply_benchmark(size: int, device: torch.device, dtype: torch.dtype) -> Sample:
    a, b = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    return Sample((a, b, "mbm16"), name=f"{size} products")


def _matmul_benchmark(size: int, device: torch.device, dtype: torch.dtype) -> Sample:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return Sample((a, b, "mbm16"), name=f"{size} x {size} x {size}")


def _conv2d_benchmark(batch: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x = torch.randn(batch, 256, 14, 14, device=device, dtype=dtype)
    weight = torch.randn(256, 256, 3, 3, device=device, dtype=dtype)
    return Sample((x, weight, "mbm16"), {"padding": 1}, f"B={batch}, 256 x 14 x 14, 256 filters")


MULTIPLY = declare(
    Operator(
        name="approx_multiply",
        function=multiply,
        implementations=_implementations(_multiply),
        samples=_multiply_samples,
        tolerances=_TOLERANCES,
        cost=_multiply_cost,
        benchmark=Benchmark("products", (2**16, 2**20, 2**24), _multiply_benchmark),
        bitwise=True,
    )
)
MATMUL = declare(
    Operator(
        name="approx_matmul",
        function=matmul,
        implementations=_implementations(_matmul),
        samples=_matmul_samples,
        tolerances=_TOLERANCES,
        cost=_matmul_cost,
        benchmark=Benchmark("rows and columns", (64, 128, 256, 512), _matmul_benchmark),
        bitwise=True,
    )
)
CONV2D = declare(
    Operator(
        name="approx_conv2d",
        function=conv2d,
        implementations=_implementations(_conv2d),
        samples=_conv2d_samples,
        tolerances=_TOLERANCES,
        cost=_conv2d_cost,
        benchmark=Benchmark(
            "batch size (256 x 14 x 14, 256 filters of 3 x 3)", (1, 8, 32), _conv2d_benchmark
        ),
        bitwise=True,
    )
)
