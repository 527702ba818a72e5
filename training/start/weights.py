"""Starting a fit from the weights of another run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from torch import Tensor

from training import console
from training.approximation import approximate
from training.configuration.errors import MisconfigurationException
from training.configuration.instantiation import instantiate
from training.results.saved import RANGES, Saved, class_names, difference

# Arguments of models that say how many classes they tell apart.
COUNTS = ("num_categories", "num_classes")
MOST_NAMED = 4  # weights, in a line
ANOTHER = "another word"  # than any of a vocabulary, since it has a space


class InitialWeights(pl.Callback):
    """Loads the weights that fit once the model is complete, and names those that do not.

    Weights that stand for classes or words start anew where these are not the checkpoint's, even if
    there are as many.

    Args:
        start: the checkpoint that they come from.
        described: the configuration of the model, plain data.
        approx: that of its approximate layers.

    Raises:
        MisconfigurationException: when the fit starts: none of the weights fits; or they stand for
            other classes or words, and nothing says which do.
    """

    def __init__(self, start: Saved, described: Any, approx: Any) -> None:
        self._path = start.path
        self._weights = start.state_dict
        self._class_names = start.class_names
        self._described = described
        self._approx = approx

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        own = pl_module.state_dict()
        fitting = {
            name: value
            for name, value in self._weights.items()
            if isinstance(value, Tensor) and _shape(own.get(name)) == _shape(value)
        }
        total = sum(isinstance(value, Tensor) for value in own.values())
        if other := self._other_meaning(trainer, own):
            found = self._heads(own)
            heads = [name for name in found if name in fitting]
            if not found and len(fitting) == total:
                raise MisconfigurationException(
                    f"ckpt: {other}, in weights of the same shapes, and the model, a "
                    f"{type(pl_module).__name__}, has no argument {' or '.join(COUNTS)} that says "
                    "which stand for them; train on the same data, or leave ckpt out"
                )
            fitting = {name: value for name, value in fitting.items() if name not in heads}
            more = f", and {len(heads) - MOST_NAMED} more" if len(heads) > MOST_NAMED else ""
            if heads:
                console.warn(f"ckpt: {other}: {', '.join(heads[:MOST_NAMED])}{more} start anew")
        if not fitting:
            raise MisconfigurationException(
                f"ckpt: no weights of {self._path} fit the model, a {type(pl_module).__name__}; "
                "give a checkpoint of the same network, or leave ckpt out"
            )
        pl_module.load_state_dict(fitting, strict=False)
        console.stdout().print(
            f"Starting from the weights of {self._path}: {len(fitting)} of {total} tensors",
            soft_wrap=True, highlight=False, markup=False,
        )  # fmt: skip
        for name in [*own, *(name for name in self._weights if name not in own)]:
            fits = _shape(own.get(name)) == _shape(self._weights.get(name)) is not None
            found = RANGES in name  # by training, where only one of both has them
            if not fits and not found and not _same(own.get(name), self._weights.get(name)):
                console.warn(f"ckpt: {name}: {_describe(own, self._weights, name)}")
        self._weights = {}

    def _other_meaning(self, trainer: Any, own: Mapping[str, Any]) -> str | None:
        """Says how the checkpoint's classes or words differ; None where they are the same."""
        before, now = self._class_names, class_names(trainer.datamodule)
        if before is not None and now is not None:
            return difference(before, now, "the checkpoint", "the data")
        states = [name for name, value in own.items() if not isinstance(value, Tensor)]
        states = [name for name in states if not _same(own[name], self._weights.get(name))]
        return f"{self._path} has another {' and '.join(states)}" if states else None

    def _heads(self, own: Mapping[str, Any]) -> list[str]:
        """Returns the weights whose shapes another class or word would change."""
        described: Any = OmegaConf.create(_with_one_more(self._described))
        larger = instantiate(described)
        approximate(larger, self._approx)
        words = own.get("_extra_state")
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            larger.set_extra_state([*words, ANOTHER])
        found = larger.state_dict()
        return [name for name in own if _shape(own[name]) != _shape(found.get(name))]


def _with_one_more(described: Any) -> Any:
    """Returns the configuration of a model of one class more."""
    if not isinstance(described, dict):
        return described
    return {
        name: value + 1 if name in COUNTS and isinstance(value, int) else _with_one_more(value)
        for name, value in described.items()
    }


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
