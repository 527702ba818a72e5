"""The scripts as modules, and an operator declared here that they have never heard of."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from hoconv import declaration as operators
from hoconv.declaration import Benchmark, Cost, Implementation, Operator, Sample, declare
from hoconv.implementations import resolve

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script by name, as Python does when it is run: its folder is on the path."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Operator:
    """``x * y * scale``, the only declared operator; a test may add implementations to it."""

    def function(x: Tensor, y: Tensor, *, scale: float = 1.0, impl: str = "auto") -> Tensor:
        name = resolve("toy", impl, x.device.type)
        return operator.implementations[name].function(x, y, scale)

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for scale in (1.0, -2.0):
            x, y = (torch.randn(4, 5, dtype=torch.float64).to(device, dtype) for _ in "xy")
            yield Sample((x, y), {"scale": scale}, name=f"scale {scale:g}")
        yield Sample((torch.empty(0, device=device, dtype=dtype),) * 2, name="empty")

    def benchmark_sample(size: int, device: torch.device, dtype: torch.dtype) -> Sample:
        return Sample((torch.randn(size, device=device, dtype=dtype),) * 2, name=f"n={size}")

    def cost(sample: Sample) -> Cost:
        n, tensor = sample.args[0].numel(), sample.args[0].nbytes
        return Cost(3 * tensor, 5 * tensor, 2 * n, 4 * n)

    operator = Operator(
        name="toy",
        function=function,
        implementations={
            "reference": Implementation(lambda x, y, scale: x * y * scale),
            "swapped": Implementation(lambda x, y, scale: y * x * scale),
        },
        samples=samples,
        tolerances={torch.float32: 1e-6, torch.float16: 2e-3},
        cost=cost,
        benchmark=Benchmark("elements", (64, 256), benchmark_sample, {"twice": _twice}),
    )
    monkeypatch.setattr(operators, "_declared", {})
    return declare(operator)


def _twice(x: Tensor, y: Tensor) -> Tensor:
    return (x + x) * y / 2
