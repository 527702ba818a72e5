"""Losses of a validation or a test that are no numbers."""

from __future__ import annotations

import math
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_only

from training import console


class EvaluatedLosses(pl.Callback):
    """Warns where a validation or a test ends with a loss that is NaN or infinite, of each metric
    once. The run goes on: a loss in training that is not finite stops it, and a metric of another
    name is NaN where there was nothing to count.

    A loss is a metric whose name ends in ``loss``.

    Attributes:
        notes: what was said, a line for each of these losses, with how often it happened.
    """

    def __init__(self) -> None:
        self._first: dict[str, str] = {}  # name -> the value, and when
        self._times: dict[str, int] = {}

    @property
    def notes(self) -> list[str]:
        return [
            f"{name} was {first}" + (f", and {more} more times" if more else "")
            for name, first in self._first.items()
            for more in [self._times[name] - 1]
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first, "times": self._times}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._first == {}:  # a test after the fit loads the best checkpoint, of an epoch before
            self._first, self._times = dict(state_dict["first"]), dict(state_dict["times"])

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._look(trainer, f" in the validation of epoch {trainer.current_epoch}")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look(trainer, " in the test")

    @rank_zero_only
    def _look(self, trainer: pl.Trainer, when: str) -> None:
        for name, value in trainer.callback_metrics.items():
            if name.startswith("train") or not name.endswith("loss") or math.isfinite(value):
                continue
            self._times[name] = self._times.get(name, 0) + 1
            if name not in self._first:
                self._first[name] = f"{float(value)}{when}"
                console.warn(f"{name} is {self._first[name]}; it is never the best")
