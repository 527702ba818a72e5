"""The tensors in batches and in what modules take and return: in tuples, lists, dicts and
dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

VALUES = bool | int | float | str | None


def describe(values: Any, tensors: list[Tensor]) -> Any:
    """Returns the structure of values, the shapes, strides, dtypes and devices of their tensors,
    numbers and texts, and the classes of other objects; appends the tensors to a list."""
    if isinstance(values, Tensor):
        tensors.append(values)
        return values.shape, values.stride(), values.dtype, values.device, values.requires_grad
    if isinstance(values, list | tuple):
        return (type(values), *[describe(part, tensors) for part in values])
    if isinstance(values, dict):
        return (type(values), *[(name, describe(part, tensors)) for name, part in values.items()])
    if _is_object(values):
        return (type(values), *[describe(part, tensors) for _, part in _fields(values)])
    return values if isinstance(values, VALUES) else type(values)


def tensors_of(values: Any) -> list[Tensor]:
    """Returns the tensors in values, in the order of :func:`describe`."""
    tensors: list[Tensor] = []
    describe(values, tensors)
    return tensors


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Returns values with `function` of each tensor in its place."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, list | tuple):
        parts = [map_tensors(function, part) for part in values]
        named = isinstance(values, tuple) and hasattr(values, "_fields")
        return type(values)(*parts) if named else type(values)(parts)
    mapped = values
    if isinstance(values, dict):
        mapped = copy.copy(values)
        mapped.update({name: map_tensors(function, part) for name, part in values.items()})
    elif _is_object(values):
        mapped = copy.copy(values)
        for name, part in _fields(values):
            object.__setattr__(mapped, name, map_tensors(function, part))  # also of a frozen one
    return mapped


def _is_object(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> list[tuple[str, Any]]:
    return [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
