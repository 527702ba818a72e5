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
from typing import Any

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
            names = [name for name in slots if not name.startswith("__")]
        if names:
            before = {name: _get(owner, name) for name in names}
            self._restorers.append(functools.partial(_restore_attributes, owner, before))
        for kind, restorer in _RESTORERS:
            if isinstance(owner, kind):
                self._restorers.append(restorer(owner))
                return


def _attributes_of(owner: Any) -> Any:
    try:
        return vars(owner)
    except Exception:  # there are none, or the object does not show them
        return None


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


# The methods of the kind itself are called, not those of a class that derives from it.


def _restorer_of_dictionary(now: dict[Any, Any]) -> Callable[[], None]:
    kind: Any = OrderedDict if isinstance(now, OrderedDict) else dict
    before = list(kind.items(now))

    def restore() -> None:
        pairs = list(kind.items(now))
        if len(pairs) != len(before) or any(
            key is not other or value is not was
            for (key, value), (other, was) in zip(pairs, before)
        ):
            kind.clear(now)
            for key, value in before:
                kind.__setitem__(now, key, value)

    return restore


def _restorer_of_sequence(kind: Any, now: Any) -> Callable[[], None]:
    before = list(kind.__iter__(now))

    def restore() -> None:
        items = list(kind.__iter__(now))
        if len(items) != len(before) or any(map(operator.is_not, items, before)):
            kind.clear(now)
            kind.extend(now, before)

    return restore


def _restorer_of_set(now: set[Any]) -> Callable[[], None]:
    before = set(set.__iter__(now))

    def restore() -> None:
        if set(set.__iter__(now)) != before:
            set.clear(now)
            set.update(now, before)

    return restore


def _restorer_of_array(now: Any) -> Callable[[], None]:
    before = copy.copy(now)

    def restore() -> None:
        if bytes(now) != bytes(before):
            now[:] = before

    return restore


def _restorer_of_ndarray(now: np.ndarray) -> Callable[[], None]:
    before = now.copy()

    def restore() -> None:
        if now.tobytes() != before.tobytes():
            now[...] = before

    return restore


def _restorer_of_tensor(now: Tensor) -> Callable[[], None]:
    before = now.detach().clone()

    def restore() -> None:
        if not torch.equal(now, before):
            now.copy_(before)

    return restore


def _restorer_of_generator(now: np.random.Generator) -> Callable[[], None]:
    before = now.bit_generator.state

    def restore() -> None:
        now.bit_generator.state = before

    return restore


_RESTORERS: tuple[tuple[Any, Callable[[Any], Callable[[], None]]], ...] = (
    (dict, _restorer_of_dictionary),
    (list, functools.partial(_restorer_of_sequence, list)),
    (deque, functools.partial(_restorer_of_sequence, deque)),
    (set, _restorer_of_set),
    (array.array | bytearray, _restorer_of_array),
    (np.ndarray, _restorer_of_ndarray),
    (Tensor, _restorer_of_tensor),
    (np.random.Generator, _restorer_of_generator),
    (random.Random, lambda now: functools.partial(now.setstate, now.getstate())),
    (np.random.RandomState, lambda now: functools.partial(now.set_state, now.get_state())),
)


class HostRandomness:
    """The state of the host's random number generators.

    Args:
        device: that trains; where it is the CPU, PyTorch's generator of the CPU is its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._generators: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
            "Python's random": (random.getstate, random.setstate),
            "NumPy's random": (_state_of_numpy, np.random.set_state),
        }
        if device.type != "cpu":
            generator = torch.get_rng_state, torch.set_rng_state
            self._generators["PyTorch's generator of the CPU"] = generator
        self._before = {name: state() for name, (state, _) in self._generators.items()}

    def used(self) -> str | None:
        """Returns the name of a generator that was used since."""
        for name, (state, _) in self._generators.items():
            if _as_bytes(state()) != _as_bytes(self._before[name]):
                return name
        return None

    def restore(self) -> None:
        """Sets the generators back."""
        for name, (_, restore) in self._generators.items():
            restore(self._before[name])


def _state_of_numpy() -> Any:
    return np.random.get_state(legacy=False)  # noqa: NPY002


def _as_bytes(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    return repr(state) if isinstance(state, dict) else state
