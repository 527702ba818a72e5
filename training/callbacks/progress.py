"""Showing how far a run is."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import RichProgressBar
from pytorch_lightning.utilities import rank_zero_only

from training import console


def make_progress() -> pl.Callback:
    """Makes the callback that shows progress, in a terminal as a bar, elsewhere a line an epoch."""
    return _ProgressBar() if console.stdout().is_terminal else _EpochLines()


class _ProgressBar(RichProgressBar):
    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


class _EpochLines(pl.Callback):
    """A line an epoch, which is counted as in the bar, in loggers and in the names of files."""

    @rank_zero_only
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = (f"{name} {value:.4g}" for name, value in trainer.callback_metrics.items())
        last = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs - 1}"
        line = f"epoch {trainer.current_epoch}{last}"
        console.stdout().print(line, *metrics, soft_wrap=True, markup=False, highlight=False)
