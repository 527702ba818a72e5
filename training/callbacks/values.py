"""Walking through values that hold tensors: batches, and what modules take and return.

Tensors are found in tuples, lists, dicts, dataclasses and PackedSequences.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_map


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

    return tree_map(map_leaf, values, is_leaf=lambda v: is_packed(v) or not _holds_tensor(v))


def tensors_of(values: Any) -> list[Tensor]:
    """Returns the tensors in values, in order."""
    if isinstance(values, Tensor):
        return [values]
    if type(values) in (tuple, list):  # most batches: a walk of ten microseconds less
        return [tensor for value in values for tensor in tensors_of(value)]
    if type(values) is dict:
        return [tensor for value in values.values() for tensor in tensors_of(value)]
    if isinstance(values, PackedSequence):
        return [values.data]
    if _is_object(values):
        return [each for name in _names_of(values) for each in tensors_of(getattr(values, name))]
    parts, _ = tree_flatten(values, is_leaf=lambda v: v is not values)
    if len(parts) == 1 and parts[0] is values:
        return []
    return [each for part in parts for each in tensors_of(part)]


def describe(values: Any) -> Any:
    """Returns what a graph depends on: the tensors' shapes, strides, types, devices, whether they
    require gradients, and where they are. Of values without tensors the class and, beside tensors,
    which are None or a bool: ``is`` tells these from others without reading them."""
    if isinstance(values, Tensor):
        layout = values.shape, values.stride()
        return *layout, values.dtype, values.device, values.requires_grad, type(values)
    if values is None or isinstance(values, bool):
        return values
    structure: tuple[Any, ...] = ()
    if type(values) in (tuple, list):  # most batches
        parts = list(values)
    elif type(values) is dict:
        structure, parts = tuple(values), list(values.values())
    elif isinstance(values, PackedSequence):
        parts = [values.data]
    elif _is_object(values):
        structure = _names_of(values)
        parts = [getattr(values, name) for name in structure]
    else:
        parts, tree = tree_flatten(values, is_leaf=lambda v: v is not values)
        if len(parts) == 1 and parts[0] is values:
            return type(values)
        structure = (repr(tree),)
    described = [*map(describe, parts)]
    holds = any(type(part) is tuple for part in described)
    return (type(values), *structure, *described) if holds else type(values)


def _holds_tensor(value: Any) -> bool:
    return type(describe(value)) is tuple


def is_packed(value: Any) -> bool:
    """Whether a value is a PackedSequence, which PyTorch's trees take apart as a tuple."""
    return isinstance(value, PackedSequence)


def _is_object(value: Any) -> bool:
    """Whether a value is a dataclass, which PyTorch's trees do not look into."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _names_of(value: Any) -> tuple[str, ...]:
    """The fields of a dataclass, and what else it has."""
    fields = [field.name for field in dataclasses.fields(value)]
    return (*dict.fromkeys((*fields, *getattr(value, "__dict__", ()))),)
