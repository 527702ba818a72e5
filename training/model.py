"""A model from its configuration."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig

from training.instantiation import instantiate


def build(model: DictConfig, config: DictConfig) -> Any:
    """The LightningModule that `model` describes, in the memory format of `config` and compiled
    where that says so."""
    built = instantiate(model)
    if config.channels_last:
        built.to(memory_format=torch.channels_last)
    if config.compile:
        built.network.compile()
    return built
