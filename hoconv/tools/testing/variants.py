"""Parameters of tests: every implementation of an operator, on every device that it runs on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hoconv.dispatch.declaration import Operator, Sample
from hoconv.dispatch.implementations import obstacle


@dataclass(frozen=True)
class Variant:
    """An implementation of an operator, on a device."""

    operator: Operator
    impl: str
    device: str

    def __str__(self) -> str:
        return f"{self.operator.name}-{self.impl}-{self.device}"

    def obstacle(self) -> str | None:
        """Returns why tests cannot run here; None for a broken implementation, whose tests must
        fail."""
        return obstacle(self.operator, self.impl, self.device)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.operator.function(*args, impl=self.impl, **kwargs)

    def samples(self, dtype: torch.dtype) -> Iterable[Sample]:
        return self.operator.samples(torch.device(self.device), dtype)


def variants(operators: Iterable[Operator]) -> list[Any]:
    """Lists all variants of the operators, as parameters of the fixture `variant`."""
    return list(_variants(operators))


def _variants(operators: Iterable[Operator]) -> Iterator[Any]:
    for operator in operators:
        for impl, implementation in operator.implementations.items():
            for device in implementation.devices or ("cpu", "cuda"):
                variant = Variant(operator, impl, device)
                marks = [pytest.mark.gpu] if device == "cuda" else []
                yield pytest.param(variant, marks=marks, id=str(variant))
