"""Building the model of a run, and the implementation of each of its layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.nn.parameter import is_lazy

import hoconv
from hoconv.dispatch.declaration import layers
from hoconv.dispatch.implementations import Choice, choose
from training import console
from training.approximation import approximate
from training.configuration.errors import MisconfigurationException
from training.configuration.instantiation import instantiate_as
from training.results.saved import Saved, load_weights


def build(model: DictConfig, config: DictConfig) -> Any:
    """Makes the LightningModule that `model` describes; `config` says which of its layers are
    approximate, which it prints, which implementations layers use, in which memory format it is
    and whether it is compiled.

    Raises:
        MisconfigurationException: a value of either is not allowed, or a layer is lazy.
    """
    built = instantiate_as(
        pl.LightningModule, "model", model, "the _target_ of a pytorch_lightning.LightningModule"
    )
    if lazy := [name for name, parameter in built.named_parameters() if is_lazy(parameter)]:
        raise MisconfigurationException(
            f"model: {lazy[0]} has no shape before a forward pass; give its layer all sizes, or "
            f"call it once in the __init__ of {type(built).__name__}"
        )
    if converted := approximate(built, config.approx):
        console.show_multipliers(converted)
    set_implementations(built, config.impl)
    if config.channels_last:
        built.to(memory_format=torch.channels_last)
    if config.compile:
        getattr(built, "network", built).compile()
    return built


def build_trained(saved: Saved, config: DictConfig) -> Any:
    """Makes the model of a checkpoint, with its weights; `config` is as for :func:`build`.

    Raises:
        MisconfigurationException: as of :func:`build`; or the weights are not those of the model.
    """
    model = build(config.model, config)
    load_weights(model, saved)
    return model


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

    Raises:
        ImplementationError: one that was asked for by name cannot run.
    """
    return {name: choose(layer.operator, layer.impl, device_type) for name, layer in layers(model)}


def show_implementations(
    model: nn.Module, trainer: pl.Trainer, data: pl.LightningDataModule
) -> dict[str, str]:
    """Prints the start-up table for a trainer's device; returns each layer's implementation.

    A layer that has a method ``why_unfused()`` says there why no fused kernel computes it, and data
    that has a method ``fetching(trainer)`` where its batches come from.

    Raises:
        ImplementationError: an implementation that was asked for by name cannot run.
    """
    chosen = choose_implementations(model, trainer.strategy.root_device.type)
    reasons = {name: choice.why for name, choice in chosen.items()}
    for name, layer in layers(model):
        if hasattr(layer, "why_unfused") and (unfused := _why_unfused(layer, trainer)):
            reasons[name] += f"; not fused: {unfused}"
    names = {name: choice.name for name, choice in chosen.items()}
    where: Any = getattr(data, "fetching", None)
    console.show_implementations(names, reasons, where and where(trainer))
    return names


def _why_unfused(layer: Any, trainer: pl.Trainer) -> str | None:
    """Asks a copy of the layer, on the device and in the precision in which the trainer runs it.

    The layer itself is moved later, when the fit begins.
    """
    precision = trainer.strategy.precision_plugin
    copied: Any = precision.convert_module(copy.deepcopy(layer).to(trainer.strategy.root_device))
    with precision.forward_context():
        return copied.why_unfused()


def as_plain(impl: Any) -> Any:
    """`impl` as results.json holds it: a string, or a dict."""
    return OmegaConf.to_container(impl, resolve=True) if OmegaConf.is_config(impl) else impl
