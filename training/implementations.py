"""The implementation of each layer: which one the user asked for, and which one it will use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from torch import nn

import hoconv
from hoconv.declaration import layers
from hoconv.implementations import Choice, choose

MAX_LABEL = 64  # characters: the longest tag that W&B takes


def set_implementations(model: nn.Module, impl: Any) -> None:
    """Sets `impl`, as the configuration has it, on every layer of a model.

    Args:
        model: as the start-up table names its layers.
        impl: a name, or a mapping from an operator's or a layer's name to a name.

    Raises:
        MisconfigurationException: it is neither, or a name in it is unknown.
    """
    asked = as_plain(impl)
    names = asked.values() if isinstance(asked, Mapping) else [asked]
    if not all(isinstance(name, str) for name in names):
        raise MisconfigurationException(
            "impl: expected the name of an implementation, or {operator or layer: name}; "
            f"got {asked!r}"
        )
    try:
        hoconv.set_impl(model, asked)
    except ValueError as error:
        raise MisconfigurationException(str(error)) from error


def choose_implementations(model: nn.Module, device_type: str) -> dict[str, Choice]:
    """Decides, for each layer's qualified name, which implementation it uses on a device.

    The reason includes why a layer that could compute all in one kernel does not, where it says so
    by a method ``why_unfused()``.

    Raises:
        ImplementationError: one that was asked for by name cannot run.
    """
    chosen = {}
    for name, layer in layers(model):
        choice = choose(layer.operator, layer.impl, device_type)
        if unfused := getattr(layer, "why_unfused", lambda: None)():
            choice = Choice(choice.name, f"{choice.why}; not fused: {unfused}")
        chosen[name] = choice
    return chosen


def as_plain(impl: Any) -> Any:
    """`impl` as results.json holds it: a string, or a dict."""
    return OmegaConf.to_container(impl, resolve=True) if OmegaConf.is_config(impl) else impl


def label(impl: Any) -> str:
    """`impl` in the name of a folder or of a run: ``cuda``, or ``recurrent-cpp_approx_conv2d-cuda``
    for a mapping; what is longer than `MAX_LABEL` is cut off."""
    asked = as_plain(impl)
    if not isinstance(asked, Mapping):
        return str(asked)
    return "_".join(f"{key}-{name}" for key, name in asked.items())[:MAX_LABEL]
