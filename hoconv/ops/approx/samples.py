"""Sample calls of the approximate products, their cost, and the calls that are measured.

B batch, C channels of the input, O of the output, G groups, H x W pixels of the input; M, N rows
and columns of a matrix product, K what it sums over.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hoconv.dispatch.declaration import Cost, Sample
from hoconv.ops.approx import multipliers
from hoconv.ops.approx.geometry import as_pair
from hoconv.ops.approx.reference import output_size


def _draw(device: torch.device, dtype: torch.dtype, *shape: int, zeros: float = 0.3) -> Tensor:
    """Draws random numbers of many magnitudes, some of them zero."""
    values = torch.randn(shape, dtype=torch.float64) * torch.randn(shape).mul(2).exp2()
    return torch.where(torch.rand(shape) < zeros, 0.0, values).to(device, dtype)


def multiply_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = functools.partial(_draw, device, dtype)
    for multiplier in multipliers.MULTIPLIERS:
        yield Sample((draw(37, 5), draw(37, 5), multiplier), name=multiplier)
    yield Sample((draw(3, 1, 4), draw(5, 1), "mbm16"), name="broadcast")
    yield Sample((draw(6, 4).mT, draw(4, 12)[:, ::2], "mbm32"), name="strided")
    yield Sample((draw(2, 3), draw(2, 3), "mbm16"), {"gradient": "ste"}, "straight-through")
    yield Sample((draw(2, 3), draw(2, 3), "mbm16"), {"gradient": "analytic"}, "analytic")
    yield Sample((draw(0, 3), draw(3), "mbm16"), name="empty")
    yield Sample((draw(), draw(), "mbm16"), name="of no dimensions")


def matmul_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
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


def conv2d_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
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


def multiply_cost(sample: Sample) -> Cost:
    elements = math.prod(torch.broadcast_shapes(*(t.shape for t in sample.args[:2])))
    return _cost(sample, elements, elements)


def matmul_cost(sample: Sample) -> Cost:
    a, b, _ = sample.args
    batch = math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    out = batch * a.shape[-2] * b.shape[-1]
    return _cost(sample, out, out * a.shape[-1])


def conv2d_cost(sample: Sample) -> Cost:
    (x, weight, _), options = sample.args, sample.kwargs
    pairs = (as_pair(name, options.get(name, default), default)
             for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)))  # fmt: skip
    size = output_size(x.shape, weight.shape, *pairs)
    out = x.shape[0] * weight.shape[0] * math.prod(size)
    return _cost(sample, out, out * math.prod(weight.shape[1:]))


def multiply_benchmark(size: int, device: torch.device, dtype: torch.dtype) -> Sample:
    a, b = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    return Sample((a, b, "mbm16"), name=f"{size} products")


def matmul_benchmark(size: int, device: torch.device, dtype: torch.dtype) -> Sample:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return Sample((a, b, "mbm16"), name=f"{size} x {size} x {size}")


def conv2d_benchmark(batch: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x = torch.randn(batch, 256, 14, 14, device=device, dtype=dtype)
    weight = torch.randn(256, 256, 3, 3, device=device, dtype=dtype)
    return Sample((x, weight, "mbm16"), {"padding": 1}, f"B={batch}, 256 x 14 x 14, 256 filters")
