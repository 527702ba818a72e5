"""Splatting, the adjoint of the high-order convolution: the function and the declaration.

B batch, C channels, G groups of channels, H height, W width, k kernel size.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hoconv.dispatch.declaration import Benchmark, Cost, Implementation, Operator, Sample, declare
from hoconv.dispatch.implementations import resolve
from hoconv.dispatch.registration import Op, compiled
from hoconv.ops.high_order.conv2d import ops, reference
from hoconv.ops.high_order.conv2d.operator import (
    TOLERANCES,
    benchmark_sample,
    check_size,
    prepare,
    samples,
)
from hoconv.ops.high_order.conv2d.window import (
    Normalize,
    Padding,
    Pair,
    Window,
    check_normalize,
    normalize_taps,
)


def splat(
    x: Tensor,
    weight: Tensor,
    *,
    size: tuple[int, int] | None = None,
    dilation: Pair = 1,
    stride: Pair = 1,
    scale: Pair = 1,
    padding: Padding = "zeros",
    normalize: Normalize | None = None,
    kernel_size: Pair | None = None,
    impl: str = "auto",
) -> Tensor:
    """Spreads every pixel over its neighbours by the kernel that `weight` holds for it.

    It is the adjoint of :func:`hoconv.high_order_conv2d` with the same options:
    ``(high_order_conv2d(x, w) * y).sum()`` is ``(x * splat(y, w)).sum()``, and its kernels are
    those of that function's gradient. So ``out[b, c, y(h, i), z(w, j)]`` is the sum of
    ``weight[i * kw + j, b, g(c), h, w] * x[b, c, h, w]`` over pixels and taps, with y, z and g of
    that function; what falls on padded zeros is dropped. Half precision is accumulated in float32.

    Kernels that spread a sample are those of Gharbi et al., Sample-based Monte Carlo Denoising
    using a Kernel-Splatting Network, SIGGRAPH 2019.

    Args:
        x: (B, C, H', W'); float32, float64, float16 or bfloat16; any strides.
        weight: (kh * kw, B, G, H', W'), G dividing C; dtype and device of x; any strides.
        size: height and width of the result, which a stride leaves open; else None will do.
        dilation, stride, scale, padding, normalize, kernel_size, impl: as that function's.

    Returns:
        (B, C, *size), with the dtype and the memory format of x. Under autocast x and weight are
        cast to its dtype.

    Raises:
        ValueError: a shape or an option does not fit.
        TypeError: a dtype is not supported, or differs between x and weight.
        hoconv.dispatch.implementations.ImplementationError: `impl` names one that cannot run here.
    """
    x, weight = prepare(x, weight)
    check_size(weight, (x.shape[0], x.shape[2], x.shape[3]), x)
    window = Window.of(weight.shape[0], kernel_size, dilation, stride, scale, padding)
    result = _result_size(window, x, size)
    for axis, name, pixels in zip(window, ("height", "width"), result):
        axis.check(name, pixels)
    if window.output_size(*result) != tuple(x.shape[2:]):
        raise ValueError(
            f"size: expected the height and width of an image of which these windows compute "
            f"{tuple(x.shape[2:])} pixels, multiples of the scale; got {size}, of which they "
            f"compute {window.output_size(*result)}"
        )
    check_normalize(normalize)
    name = resolve("splat", impl, x.device.type)
    return _SPREAD[name](x, normalize_taps(weight, normalize), window, result)


def _result_size(window: Window, x: Tensor, size: tuple[int, int] | None) -> tuple[int, int]:
    if size is not None:
        if not isinstance(size, (tuple, list)) or len(size) != 2 or not all(map(_is_size, size)):
            raise ValueError(f"size: expected the height and width of the result, got {size!r}")
        return size[0], size[1]
    if window.down.stride > 1 or window.across.stride > 1:
        raise ValueError(
            "size: expected the height and width of the result, which a stride leaves open, "
            "got None"
        )
    height, width = (
        pixels // axis.scale + (axis.reach if axis.padding == "valid" else 0)
        for axis, pixels in zip(window, x.shape[2:])
    )
    return height, width


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _call_op(op: Op, x: Tensor, weight: Tensor, window: Window, size: tuple[int, int]) -> Tensor:
    numbers = window.numbers()
    return op(x, weight, *ops.lay_out(x, size[0], size[1], numbers), numbers)


# Implementation -> what computes it, of x, weights, a window and the size of the result.
_SPREAD: dict[str, Callable[[Tensor, Tensor, Window, tuple[int, int]], Tensor]] = {
    "reference": reference.splat,
    "cpp": functools.partial(_call_op, ops.cpp.grad_input),
    "cuda": functools.partial(_call_op, ops.cuda.grad_input),
}


def _run(
    impl: str, x: Tensor, weight: Tensor, size: tuple[int, int] | None, dilation: Pair,
    stride: Pair, scale: Pair, padding: Padding, normalize: Normalize | None,
    kernel_size: Pair | None,
) -> Tensor:  # fmt: skip
    window = Window.of(weight.shape[0], kernel_size, dilation, stride, scale, padding)
    weight = normalize_taps(weight, normalize)
    return _SPREAD[impl](x, weight, window, _result_size(window, x, size))


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Yields some of the convolution's, whose tests run the same kernels as gradients."""
    for sample in itertools.islice(samples(device, dtype), 0, None, 3):
        x, weight = sample.args
        if x.shape[2:] == weight.shape[3:]:
            yield sample
        else:
            draw = torch.randn(*x.shape[:2], *weight.shape[3:], dtype=torch.float64)
            options = {**sample.kwargs, "size": tuple(x.shape[2:])}
            yield Sample((draw.to(device, dtype), weight), options, sample.name)


def _cost(sample: Sample) -> Cost:
    x, weight = sample.args
    result = (
        x.element_size()
        * x.shape[0]
        * x.shape[1]
        * math.prod(sample.kwargs.get("size", x.shape[2:]))
    )
    flops = 2 * weight.numel() * x.shape[1] // weight.shape[2]
    return Cost(
        forward_bytes=x.nbytes + weight.nbytes + result,
        backward_bytes=2 * (x.nbytes + weight.nbytes) + result,
        forward_flops=flops,
        backward_flops=2 * flops,
    )


OPERATOR = declare(
    Operator(
        name="splat",
        function=splat,
        implementations={
            "reference": Implementation(functools.partial(_run, "reference")),
            "cpp": compiled(functools.partial(_run, "cpp"), ("cpu", "cuda"), ops.KERNELS["cpp"]),
            "cuda": compiled(functools.partial(_run, "cuda"), ("cuda",), ops.KERNELS["cuda"]),
        },
        samples=_samples,
        tolerances=TOLERANCES,
        cost=_cost,
        benchmark=Benchmark(
            axis="batch size (3 x 224 x 224, k = 5)",
            sizes=(8, 16, 32, 64, 128, 256, 512),
            sample=benchmark_sample,
        ),
    )
)
