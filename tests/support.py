"""Implementations of operators on devices, as parameters of tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from hoconv.declaration import Operator, Sample
from hoconv.implementations import obstacle, set_impl

Network = TypeVar("Network", bound=nn.Module)


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

    def call(self, *args: Any, **kwargs: Any) -> Any:
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


def reference(network: Network) -> Network:
    """The network, its layers set to the reference: nothing is compiled for them."""
    set_impl(network, "reference")
    return network
