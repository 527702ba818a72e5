"""Runs the emulated kernels and compares them with the definition; ends with 1 where they differ.

A process of its own: what it registers for tensors of a CPU stays.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hoconv import high_order_conv2d
from hoconv.dispatch.registration import gradient_layout
from hoconv.ops.high_order.conv2d.operator import OPERATOR, samples
from hoconv.ops.high_order.conv2d.window import Window
from tests.hoconv.ops.emulation.compile import report
from tests.hoconv.ops.high_order.support import CHANNELS_LAST, generated_last, is_close

_CPU = torch.device("cpu")
_RANDOM = 60  # calls of each dtype
_RESULTS = ("output", "gradient of x", "gradient of weight")


def _calls(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor, dict[str, Any]]]:
    for sample in samples(_CPU, dtype):
        x, weight = sample.args
        yield sample.name, x, weight, dict(sample.kwargs)
    for call in CHANNELS_LAST:
        yield str(call), *generated_last(call, _CPU, dtype)
    for _ in range(_RANDOM):
        yield _random_call(dtype)


def _random_call(dtype: torch.dtype) -> tuple[str, Tensor, Tensor, dict[str, Any]]:
    """Draws a window with any stride, scale, dilation and padding, and layouts."""
    dense = random.random() < 0.5
    options: dict[str, Any] = {
        name: (random.randint(1, most), random.randint(1, most))
        for name, most in (("kernel_size", 8), ("dilation", 4), ("stride", 4), ("scale", 3))
        if not (dense and name in ("stride", "scale"))
    }
    if dense and random.random() < 0.5:  # taps that are aligned for loads of several pixels
        options["dilation"] = options["dilation"][0], random.choice([4, 8, 16])
        options["kernel_size"] = options["kernel_size"][0], random.randint(1, 3)
    options["padding"] = random.choice(["zeros", "replicate", "valid"])
    taps = math.prod(options["kernel_size"])
    window = Window.of(taps, **options)
    width = random.choice([8, 16, 24]) if dense else random.randint(1, 18)
    G, size = random.randint(1, 3), (random.randint(1, 12), width)
    if options["padding"] == "valid":
        size = tuple(axis.reach + pixels for axis, pixels in zip(window, size, strict=True))
    x = torch.randn(2, G * random.choice([1, 2, 3, 4, 8, 16, 40]), *size, dtype=dtype)
    weight = torch.randn(2, taps * G, *window.output_size(*size), dtype=dtype)
    layouts = [torch.contiguous_format, torch.channels_last]
    x, weight = (t.contiguous(memory_format=random.choice(layouts)) for t in (x, weight))
    name = f"{tuple(x.shape)} in {G}, strides {x.stride()} and {weight.stride()}, {options}"
    return name, x, weight.unflatten(1, (taps, G)).transpose(0, 1), options


def _run(x: Tensor, weight: Tensor, grad: Tensor, window: Window) -> list[Tensor]:
    ops, numbers = torch.ops.hoconv, window.numbers()
    of_x, of_weight = gradient_layout(x), gradient_layout(weight)
    return [
        ops.high_order_conv2d.cuda(x, weight, numbers),
        ops.high_order_conv2d_grad_input.cuda(grad, weight, *of_x, numbers),
        ops.high_order_conv2d_grad_weight.cuda(grad, x, *of_weight, numbers),
    ]


def _differences(x: Tensor, weight: Tensor, options: dict[str, Any]) -> Iterator[str]:
    """Yields the name of each result that differs."""
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    output = high_order_conv2d(*leaves, impl="reference", **options)
    grad = torch.randn_like(output).to(x.dtype)
    expected = [output.detach(), *torch.autograd.grad(output, leaves, grad.double())]
    found = _run(x, weight, grad, Window.of(weight.shape[0], **options))
    for name, result, exact in zip(_RESULTS, found, expected, strict=True):
        if not is_close(result, exact):
            yield name


def _planted() -> Iterator[str]:
    """Yields what differs where infinities or NaN are among the numbers."""
    options: dict[str, Any] = {"kernel_size": 3, "scale": 2}
    window = Window.of(9, **options)
    for channels, place, value in itertools.product((4, 32), range(3), (math.inf, math.nan)):
        sizes = (1, channels, 5, 6), (9, 1, 1, 10, 12), (1, channels, 10, 12)
        x, weight, grad = tensors = [torch.randn(size, dtype=torch.bfloat16) for size in sizes]
        flat = tensors[place].flatten()
        flat[:: flat.numel() // 3] = value  # the first reads or is read outside the image
        leaves = [t.double().requires_grad_() for t in (x, weight)]
        output = high_order_conv2d(*leaves, impl="reference", **options)
        exact = [output.detach(), *torch.autograd.grad(output, leaves, grad.double())]
        for name, result, expected in zip(_RESULTS, _run(x, weight, grad, window), exact):
            if not torch.allclose(result.double(), expected, 0.02, 0.02, equal_nan=True):
                yield f"{value} in {('x', 'weight', 'grad')[place]}, {channels} channels: {name}"


def _every() -> Iterator[str]:
    for dtype in OPERATOR.tolerances:
        for name, x, weight, options in _calls(dtype):
            for result in _differences(x, weight, options):
                yield f"{dtype}, {name}: {result}"
    yield from _planted()


if __name__ == "__main__":
    sys.exit(report(_every()))
