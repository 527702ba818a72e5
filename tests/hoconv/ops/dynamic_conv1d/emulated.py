"""Runs the emulated kernels and compares them with the definition; ends with 1 where they differ.

A process of its own: what it registers for tensors of a CPU stays.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from hoconv import dynamic_conv1d
from hoconv.dispatch.registration import gradient_layout
from hoconv.ops.dynamic_conv1d.operator import OPERATOR
from tests.hoconv.ops.emulation.compile import report

_CPU = torch.device("cpu")
_RANDOM = 60  # calls of each dtype
_RESULTS = ("output", "gradient of x", "gradient of weight")


def _calls(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor, int]]:
    for sample in OPERATOR.samples(_CPU, dtype):
        yield sample.name, *sample.args, sample.kwargs["padding"]
    for _ in range(_RANDOM):
        yield _random_call(dtype)


def _random_call(dtype: torch.dtype) -> tuple[str, Tensor, Tensor, int]:
    """Draws sizes around those of a kernel's tiles, and layouts."""
    H, channels = random.choice([(1, 100), (2, 64), (3, 20), (2, 5), (5, 4), (17, 1), (12, 3)])
    K = random.choice([1, 2, 3, 4, 7, 9, 10, 31, 58, 70])
    B, T = random.randint(1, 3), random.choice([1, 7, 8, 16, 63, 64, 72, 130, 257])
    steps, batch = (1 if random.random() < 0.3 else n for n in (T, B))
    x = _laid_out(torch.randn(B, H * channels, T, dtype=torch.float64).to(dtype))
    weight = _laid_out(torch.randn(batch, H, K, steps, dtype=torch.float64).to(dtype))
    padding = random.randrange(K)
    name = f"{tuple(x.shape)}, {tuple(weight.shape)}, {x.stride()}, {weight.stride()}, {padding}"
    return name, x, weight, padding


def _laid_out(t: Tensor) -> Tensor:
    """Returns the same numbers in any order of the dimensions, or with gaps, at odd addresses."""
    order = random.sample(range(t.dim()), t.dim()) if random.random() < 0.7 else range(t.dim())
    back = [order.index(i) for i in range(t.dim())]
    t = t.permute(*order).contiguous()
    if random.random() < 0.3:
        wider = t.new_zeros(*t.shape[:-1], t.shape[-1] + 3)
        wider[..., 1:-2] = t
        t = wider[..., 1:-2]
    return t.permute(back)


def _run(x: Tensor, weight: Tensor, grad: Tensor, padding: int) -> list[Tensor]:
    ops = torch.ops.hoconv
    return [
        ops.dynamic_conv1d.cuda(x, weight, padding),
        ops.dynamic_conv1d_grad_input.cuda(grad, weight, padding),
        ops.dynamic_conv1d_grad_weight.cuda(grad, x, *gradient_layout(weight), padding),
    ]


def _expect(x: Tensor, weight: Tensor, grad: Tensor, padding: int) -> list[Tensor]:
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    output = dynamic_conv1d(*leaves, padding=padding, impl="reference")
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.double())]


def _differences(x: Tensor, weight: Tensor, padding: int) -> Iterator[str]:
    """Yields the name of each result that differs."""
    grad = _laid_out(torch.randn(x.shape, dtype=torch.float64).to(x.dtype))
    found, expected = _run(x, weight, grad, padding), _expect(x, weight, grad, padding)
    tolerance = OPERATOR.tolerances[x.dtype]
    for name, result, exact in zip(_RESULTS, found, expected, strict=True):
        if exact.numel() and not (result - exact).norm() <= tolerance * exact.norm():
            yield name


def _planted() -> Iterator[str]:
    """Yields what differs where infinities or NaN are among the numbers."""
    for _ in range(100):
        name, x, weight, padding = _random_call(torch.bfloat16)
        tensors = [t.clone() for t in (x, weight, torch.randn(x.shape).bfloat16())]
        planted = random.choice(tensors)
        at = tuple(random.randrange(size) for size in planted.shape)
        planted[at] = random.choice([math.inf, math.nan])
        x, weight, grad = tensors
        found, expected = _run(x, weight, grad, padding), _expect(x, weight, grad, padding)
        for result, exact, kind in zip(found, expected, _RESULTS, strict=True):
            if not torch.equal(result.isfinite(), exact.isfinite()):
                yield f"{kind} of {name}, {at}"


def _every() -> Iterator[str]:
    for dtype in OPERATOR.tolerances:
        for name, x, weight, padding in _calls(dtype):
            for result in _differences(x, weight, padding):
                yield f"{dtype}, {name}: {result}"
    yield from _planted()


if __name__ == "__main__":
    sys.exit(report(_every()))
