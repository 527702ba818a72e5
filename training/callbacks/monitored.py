"""Metrics that a callback monitors, checked before training."""

from __future__ import annotations

import difflib
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.callbacks import ModelCheckpoint

VALIDATED = 1  # batches, to see what a validation logs


class MonitoredMetrics(pl.Callback):
    """Validates a batch before the first step, and stops where the validation does not log what a
    checkpoint or another callback monitors.

    Metrics under ``train/`` are not checked: they are logged while training.

    Raises:
        MisconfigurationException: when the fit starts.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and _monitored(trainer):
            trainer.num_sanity_val_steps = trainer.num_sanity_val_steps or VALIDATED

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        logged = sorted(name for name in trainer.callback_metrics if not name.startswith("train/"))
        for callback, metric in _monitored(trainer).items():
            if metric not in logged:
                close = difflib.get_close_matches(metric, logged, 1)
                raise MisconfigurationException(
                    f"{callback}.monitor: no validation logs {metric!r}; use "
                    + (close[0] if close else f"one of {', '.join(logged)}")
                )


def _monitored(trainer: Any) -> dict[str, Any]:
    """What is monitored by a callback of each name."""
    return {
        "checkpoint"
        if isinstance(callback, ModelCheckpoint)
        else type(callback).__name__: callback.monitor
        for callback in trainer.callbacks
        if getattr(callback, "monitor", None) and not callback.monitor.startswith("train/")
    }
