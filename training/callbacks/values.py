"""Walking through values that hold tensors: batches, and what modules take and return.

Tensors are found in tuples, lists, dicts, dataclasses and PackedSequences.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_map

# Of which there is one object each, so that ``is`` compares them without reading them.
SINGLE = bool, type(None), enum.Enum


class _Same:
    """Equal to another of the same object only: members of two Enums may be equal."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def map_values(
    function: Callable[[Tensor], Any], values: Any, other: Callable[[Any], Any] = lambda v: v
) -> Any:
    """Replaces every tensor by `function` of it, and everything else by `other` of it: what holds
    no tensor as a whole."""

    def map_leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        if isinstance(value, PackedSequence):
            return value._replace(data=function(value.data))
        if _is_object(value):
            mapped = copy.copy(value)
            for name in _names_of(value):
                item = map_values(function, getattr(value, name), other)
                object.__setattr__(mapped, name, item)
            return mapped
        return other(value)

    def is_leaf(value: Any) -> bool:
        # PyTorch's trees would take a PackedSequence apart as a tuple.
        return isinstance(value, PackedSequence) or not _holds_tensor(value)

    return tree_map(map_leaf, values, is_leaf=is_leaf)


def tensors_of(values: Any) -> list[Tensor]:
    """Returns the tensors in values, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, PackedSequence):
        return [values.data]
    apart = _take_apart(values)
    return [] if apart is None else [tensor for part in apart[1] for tensor in tensors_of(part)]


def holds_packed(values: Any) -> bool:
    """Whether there is a PackedSequence in values."""
    if isinstance(values, PackedSequence):
        return True
    apart = None if isinstance(values, Tensor) else _take_apart(values)
    return apart is not None and any(map(holds_packed, apart[1]))


def holds_both(values: Any) -> bool:
    """Whether there is a dataclass in values that is a container, too: it holds a tensor twice."""
    if isinstance(values, Tensor | PackedSequence) or (apart := _take_apart(values)) is None:
        return False
    both = _is_object(values) and isinstance(values, dict | list | tuple)
    return both or any(map(holds_both, apart[1]))


def describe(values: Any) -> Any:
    """Returns what a graph depends on: the tensors' shapes, strides, types, devices, whether they
    require gradients, where they are, and whether they have attributes of their own. Of values
    without tensors the class and, beside tensors, which are :data:`SINGLE` objects."""
    if isinstance(values, Tensor):
        plain = values.layout is torch.strided and not values.is_nested
        layout = (values.shape, values.stride()) if plain else (values.layout, values.is_nested)
        kind = type(values), bool(vars(values))
        return *layout, values.dtype, values.device, values.requires_grad, *kind
    if isinstance(values, SINGLE):
        return _Same(values)
    if isinstance(values, PackedSequence):
        return PackedSequence, describe(values.data)
    if (apart := _take_apart(values)) is None:
        return type(values)
    structure, parts = apart
    described = [*map(describe, parts)]
    holds = any(type(part) is tuple for part in described)
    return (type(values), *structure, *described) if holds else type(values)


def _take_apart(values: Any) -> tuple[tuple[Any, ...], list[Any]] | None:
    """Returns the names of what a container or a dataclass holds, and that; None for others."""
    if type(values) in (tuple, list):  # most batches: sooner than by PyTorch's trees
        return (), list(values)
    if type(values) is dict:
        return tuple(values), list(values.values())
    if _is_object(values):
        names = _names_of(values)
        return names, [getattr(values, name) for name in names]
    parts, tree = tree_flatten(values, is_leaf=lambda v: v is not values)
    is_leaf = len(parts) == 1 and parts[0] is values
    return None if is_leaf else ((repr(tree),), parts)


def _holds_tensor(value: Any) -> bool:
    return type(describe(value)) is tuple


def _is_object(value: Any) -> bool:
    """Whether a value is a dataclass, which PyTorch's trees do not look into."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _names_of(value: Any) -> tuple[str, ...]:
    """The fields of a dataclass, and what else it has."""
    fields = [field.name for field in dataclasses.fields(value)]
    return (*dict.fromkeys((*fields, *getattr(value, "__dict__", ()))),)
