"""Starting a fit from the weights of another run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from training import console


class InitialWeights(pl.Callback):
    """Loads the weights that fit once the model is complete, and names those that do not.

    Args:
        path: of the checkpoint that they come from.
        weights: its state dict.

    Raises:
        MisconfigurationException: when the fit starts: none of the weights fits.
    """

    def __init__(self, path: Path, weights: Mapping[str, Any]) -> None:
        self._path = path
        self._weights = weights

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        own = pl_module.state_dict()
        fitting = {
            name: value
            for name, value in self._weights.items()
            if isinstance(value, Tensor) and _shape(own.get(name)) == _shape(value)
        }
        if not fitting:
            raise MisconfigurationException(
                f"ckpt: no weights of {self._path} fit the model, a {type(pl_module).__name__}; "
                "give a checkpoint of the same network, or leave ckpt out"
            )
        pl_module.load_state_dict(fitting, strict=False)
        total = sum(isinstance(value, Tensor) for value in own.values())
        console.stdout().print(
            f"Starting from the weights of {self._path}: {len(fitting)} of {total} tensors",
            soft_wrap=True, highlight=False, markup=False,
        )  # fmt: skip
        for name in [*own, *(name for name in self._weights if name not in own)]:
            if name not in fitting and not _same(own.get(name), self._weights.get(name)):
                console.warn(f"ckpt: {name}: {_describe(own, self._weights, name)}")
        self._weights = {}


def _describe(own: Mapping[str, Any], saved: Mapping[str, Any], name: str) -> str:
    if name not in own:
        return "not in the model, left out"
    if name not in saved:
        return "not in the checkpoint, starts anew"
    if isinstance(own[name], Tensor):
        return f"{_shape(saved[name])} in the checkpoint, {_shape(own[name])} here: starts anew"
    return "another one in the checkpoint, the model keeps its own"


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value.cpu(), other.cpu())
    return type(value) is type(other) and value == other
