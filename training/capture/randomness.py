"""The random number generators of the host that all code shares."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


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
