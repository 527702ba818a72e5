"""The batch of a captured step: its tensors, and what else a graph of the step depends on.

Tensors are found in tuples, lists, dicts and dataclasses.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VALUES = bool | int | float | str | None


def describe(batch: Any, tensors: list[Tensor]) -> Any:
    """Returns the structure of a batch, the shapes, strides, dtypes and devices of its tensors, its
    numbers and texts, and the classes of other objects; appends its tensors to a list."""
    if isinstance(batch, Tensor):
        tensors.append(batch)
        return batch.shape, batch.stride(), batch.dtype, batch.device, batch.requires_grad
    if isinstance(batch, list | tuple):
        return (type(batch), *[describe(part, tensors) for part in batch])
    if isinstance(batch, dict):
        return (type(batch), *[(name, describe(part, tensors)) for name, part in batch.items()])
    if _is_object(batch):
        return (type(batch), *[describe(part, tensors) for _, part in _fields(batch)])
    return batch if isinstance(batch, VALUES) else type(batch)


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


def find_unfit(tensors: list[Tensor], device: torch.device) -> str | None:
    """Returns what a graph cannot have in its batch, or None."""
    for tensor in tensors:
        if tensor.device != device:
            return f"a tensor of the batch is on {tensor.device}"
        if type(tensor) is not Tensor:
            return f"a tensor of the batch is a {type(tensor).__name__}"
        if tensor.requires_grad:
            return "a tensor of the batch requires a gradient"
    if len({*map(id, tensors)}) < len(tensors):
        return "the batch has a tensor twice"
    return None
