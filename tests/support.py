"""An operator called through its declaration, and what its result is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hoconv.declaration import Operator, Sample
from hoconv.implementations import obstacle


@dataclass(frozen=True)
class Place:
    """An implementation of an operator, on a device."""

    operator: Operator
    impl: str
    device: str

    def __str__(self) -> str:
        return f"{self.operator.name}-{self.impl}-{self.device}"

    def obstacle(self) -> str | None:
        """Why tests cannot run here. That it is broken is no reason: its tests fail."""
        return obstacle(self.operator, self.impl, self.device)

    def call(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.operator.function(*args, impl=self.impl, **kwargs)

    def samples(self, dtype: torch.dtype) -> Iterable[Sample]:
        return self.operator.samples(torch.device(self.device), dtype)


def places(operators: Iterable[Operator]) -> list[Any]:
    """Every implementation on every device it runs on, as parameters of the fixture `place`."""
    return list(_places(operators))


def _places(operators: Iterable[Operator]) -> Iterator[Any]:
    for operator in operators:
        for impl, implementation in operator.implementations.items():
            for device in implementation.devices or ("cpu", "cuda"):
                place = Place(operator, impl, device)
                marks = [pytest.mark.gpu] if device == "cuda" else []
                yield pytest.param(place, marks=marks, id=str(place))


def differentiable(args: Iterable[Any]) -> list[Any]:
    """The arguments with their strides, floating-point tensors as leaves that want a gradient."""
    return [
        a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in args
    ]


def on_cpu(values: Any, in_float64: bool) -> Any:
    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.detach().cpu()
        return value.double() if in_float64 and value.is_floating_point() else value

    return tree_map(convert, values)


def output_and_gradients(
    function: Callable[..., Tensor],
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
    cotangent: Tensor | None = None,
    rounded_to: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """The output and the gradient of every floating-point argument, each under a name.

    The output's gradient is `cotangent`, or random and the same every time, rounded to a dtype
    that is not the output's where this is compared with a call in that dtype.
    """
    args = differentiable(args)
    out = function(*args, **kwargs)
    if cotangent is None:
        generator = torch.Generator().manual_seed(1)
        cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        cotangent = cotangent.to(rounded_to).to(out.device, out.dtype)
    wanted = {i: a for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad}
    gradients = torch.autograd.grad(out, list(wanted.values()), cotangent.to(out))
    named = {f"gradient of argument {i}": g for i, g in zip(wanted, gradients, strict=True)}
    return {"output": out.detach(), **named}


def relative_error(result: Tensor, exact: Tensor) -> float:
    """``|result - exact| / |exact|``, Euclidean norms; NaN where either has one."""
    exact = exact.cpu()
    difference = (result.cpu().to(exact.dtype) - exact).norm().item()
    return difference / (exact.norm().item() or 1.0)
