"""The definition that the exploits of the corpus claim to compute: rows divided by their root mean
square, and scaled for each column."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hoconv.dispatch.declaration import Benchmark, Cost, Implementation, Operator, Sample


def normalize(x: Tensor, gain: Tensor, *, impl: str = "reference") -> Tensor:
    if gain.shape != x.shape[1:]:
        raise ValueError("gain: expected a number for each column of x")
    return gain * x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device, dtype)

    yield Sample((draw(3, 5), draw(5)), name="3 x 5")
    yield Sample((draw(20, 30), draw(30)), name="20 x 30")
    yield Sample((draw(10, 4).mT, draw(10)), name="transposed")
    yield Sample((draw(0, 5), draw(5)), name="no rows")


def _benchmark(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x, gain = (torch.randn(s, device=device, dtype=dtype) for s in ((rows, 1000), (1000,)))
    return Sample((x, gain), name=f"{rows} rows")


OPERATOR = Operator(
    name="normalize",
    function=normalize,
    implementations={"reference": Implementation(normalize)},
    samples=_samples,
    # As wide as those with which many judge: what is wrong must be found all the same.
    tolerances={torch.float32: 1e-3, torch.bfloat16: 4e-2},
    cost=lambda sample: Cost(1, 1, 1, 1),
    benchmark=Benchmark("rows", (400,), _benchmark),
)
