"""What the host holds, to be set back after a step that was captured in vain."""

from __future__ import annotations

import array
import copy
import functools
import operator
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from training.capture.attributes import is_data, is_of_library

_MISSING = object()


class HostState:
    """What containers, objects and random generators hold now.

    Args:
        owners: dictionaries, lists, deques, sets, arrays, tensors, generators, cells of functions,
            and objects with attributes; others are left as they are. What is within is not looked
            into.
        tensors: of which the memory is kept, and whether they are trained; not what is in it.
    """

    def __init__(self, owners: Iterable[Any], tensors: Iterable[Tensor] = ()) -> None:
        self._restorers: list[Callable[[], None]] = [
            functools.partial(_restore_memory, each, each.detach(), each.requires_grad)
            for each in tensors
        ]
        seen: set[int] = set()
        for owner in owners:
            for each in (owner, _attributes_of(owner), *type(owner).__mro__):
                if id(each) not in seen and not (isinstance(each, type) and is_of_library(each)):
                    seen.add(id(each))
                    self._save(each)

    @torch.no_grad()
    def restore(self) -> None:
        """Sets all of it back, where it has changed: some of it cannot be written to."""
        for restore in self._restorers:
            restore()

    def _save(self, owner: Any) -> None:
        names: Iterable[str] = ()
        if isinstance(owner, type):
            names = [name for name, value in vars(owner).items() if is_data(name, value)]
        elif isinstance(owner, types.CellType):
            names = ["cell_contents"]
        else:
            kinds = [kind for kind in type(owner).__mro__ if not is_of_library(kind)]
            slots = (name for kind in kinds for name, value in vars(kind).items()
                     if isinstance(value, types.MemberDescriptorType))  # fmt: skip
            names = ["__class__", *(name for name in slots if not name.startswith("__"))]
        if names:
            before = {name: _get(owner, name) for name in names}
            self._restorers.append(functools.partial(_restore_attributes, owner, before))
        kind = next((each for each in _KINDS if isinstance(owner, each.kind)), None)
        if kind is not None:
            self._restorers.append(functools.partial(_restore, kind, owner, kind.read(owner)))


def _attributes_of(owner: Any) -> Any:
    try:
        return vars(owner)
    except Exception:  # there are none, or the object does not show them
        return None


def _restore(kind: _Kind, owner: Any, saved: Any) -> None:
    if not kind.same(kind.read(owner), saved):
        kind.write(owner, saved)


def _restore_memory(tensor: Tensor, memory: Tensor, requires_grad: bool) -> None:
    if tensor.data_ptr() != memory.data_ptr() or tensor.shape != memory.shape:
        tensor.data = memory
    if tensor.is_leaf and tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _restore_attributes(owner: Any, before: dict[str, Any]) -> None:
    assign, remove = (setattr, delattr) if isinstance(owner, type) else _OF_OBJECTS
    for name, value in before.items():
        if _get(owner, name) is value:
            continue
        if value is _MISSING:
            remove(owner, name)
        else:
            assign(owner, name, value)


def _get(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except Exception:  # a slot that is not filled, say
        return _MISSING


_OF_OBJECTS = object.__setattr__, object.__delattr__


class _Kind(NamedTuple):
    """How things of a class are saved: by its own methods, not those of a class that derives from
    it.

    Attributes:
        read: returns what one holds.
        same: whether it still holds the same.
        write: lets it hold that again.
    """

    kind: Any
    read: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    write: Callable[[Any, Any], Any]


def _are_identical(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _of_dictionary(kind: Any) -> _Kind:
    def read(owner: Any) -> list[Any]:
        return [*kind.keys(owner), *kind.values(owner)]

    def write(owner: Any, saved: list[Any]) -> None:
        kind.clear(owner)
        half = len(saved) // 2
        for key, value in zip(saved[:half], saved[half:], strict=True):
            kind.__setitem__(owner, key, value)

    return _Kind(kind, read, _are_identical, write)


def _of_sequence(kind: Any) -> _Kind:
    def write(owner: Any, saved: list[Any]) -> None:
        kind.clear(owner)
        kind.extend(owner, saved)

    return _Kind(kind, lambda owner: list(kind.__iter__(owner)), _are_identical, write)


def _of_set() -> _Kind:
    def write(owner: set[Any], saved: set[Any]) -> None:
        set.clear(owner)
        set.update(owner, saved)

    return _Kind(set, lambda owner: set(set.__iter__(owner)), operator.eq, write)


def _set_state(owner: Any, state: Any) -> None:
    owner.bit_generator.state = state


def _never(a: Any, b: Any) -> bool:
    return False


_KINDS = (
    _of_dictionary(OrderedDict),
    _of_dictionary(dict),
    _of_sequence(list),
    _of_sequence(deque),
    _of_set(),
    _Kind(
        array.array | bytearray, copy.copy, lambda a, b: bytes(a) == bytes(b),
        lambda owner, saved: owner.__setitem__(slice(None), saved),
    ),
    _Kind(
        np.ndarray, copy.copy, lambda a, b: a.tobytes() == b.tobytes(),
        lambda owner, saved: owner.__setitem__(..., saved),
    ),
    _Kind(Tensor, lambda owner: owner.detach().clone(), torch.equal, Tensor.copy_),
    _Kind(np.random.Generator, lambda owner: owner.bit_generator.state, _never, _set_state),
    _Kind(random.Random, random.Random.getstate, _never, random.Random.setstate),
    _Kind(
        np.random.RandomState, lambda owner: owner.get_state(), _never,
        lambda owner, saved: owner.set_state(saved),
    ),
)  # fmt: skip
