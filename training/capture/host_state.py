"""What the host holds, to be set back after a step that was captured in vain."""

from __future__ import annotations

import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SAVED = (dict, list, deque, set, np.ndarray, Tensor)


class HostState:
    """What containers and objects hold now.

    Args:
        owners: dictionaries, lists, deques, sets, arrays, tensors, and objects with attributes;
            others are left as they are. What is within is not looked into.
    """

    def __init__(self, owners: Iterable[Any]) -> None:
        found: dict[int, Any] = {}
        for owner in owners:
            for each in (owner, getattr(owner, "__dict__", None)):
                if isinstance(each, _SAVED):
                    found[id(each)] = each
        self._saved = [(each, _copy(each)) for each in found.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Sets all of it back, where it has changed: some of it cannot be written to."""
        for now, before in self._saved:
            if isinstance(now, dict):
                if not _is_same(now.items(), before.items()):
                    kind: Any = OrderedDict if isinstance(now, OrderedDict) else dict
                    kind.clear(now)  # without what a class of its own would do
                    kind.update(now, before)
            elif isinstance(now, set):
                if now != before:
                    now.clear()
                    now.update(before)
            elif isinstance(now, np.ndarray):
                if now.tobytes() != before.tobytes():
                    now[...] = before
            elif isinstance(now, Tensor):
                if not torch.equal(now, before):
                    now.copy_(before)
            elif len(now) != len(before) or any(map(operator.is_not, now, before)):
                now.clear()
                now.extend(before)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def _is_same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and not any(
        key is not other or value is not was for (key, value), (other, was) in zip(a, b)
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
