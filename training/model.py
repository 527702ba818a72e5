"""Building a model from its configuration."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from torch.nn.parameter import is_lazy

from training.configuration.errors import MisconfigurationException
from training.configuration.instantiation import instantiate_as
from training.implementations import set_implementations


def build(model: DictConfig, config: DictConfig) -> Any:
    """Makes the LightningModule that `model` describes; `config` says which implementations its
    layers use, in which memory format it is and whether it is compiled.

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
    set_implementations(built, config.impl)
    if config.channels_last:
        built.to(memory_format=torch.channels_last)
    if config.compile:
        getattr(built, "network", built).compile()
    return built
