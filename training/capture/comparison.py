"""Comparing what a captured step leaves with what an eager one does."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor


def present(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the largest difference of an element, relative to the largest of its tensor."""
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in expected]:
        return math.inf
    largest = 0.0
    for a, b in zip(found, expected, strict=True):
        same = (a == b) | ((a != a) & (b != b))  # or both are NaN
        if bool(same.all()):
            continue
        if not a.is_floating_point():
            return math.inf
        relative = (a.double() - b.double()).abs().max() / b.double().abs().max()
        if not relative.isfinite():
            return math.inf
        largest = max(largest, float(relative))
    return largest
