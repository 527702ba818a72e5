"""The loss of every training step: losses.csv, to compare runs bit for bit, and train/loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from training.callbacks.finite import NotFiniteError
from training.results.table import GrowingTable

NAME = "train/loss"


class LossRecord(pl.Callback):
    """Writes ``step,loss`` for every training batch, in digits that give the same float back; of
    several devices the mean. Every ``trainer.log_every_n_steps`` of them the last is logged as
    ``train/loss``, and it is what the progress bar shows.

    Losses stay on the device until so many of them are fetched at once, so that the record does
    not slow the run down: ``self.log(..., prog_bar=True)`` in a step would wait for each. What is
    fetched is on disk at once, and the rest follows at the end of an epoch, when a checkpoint is
    made and when the run fails or is interrupted. A run that goes on after a checkpoint goes on
    after its last row.

    Raises:
        NotFiniteError: while training: a loss is NaN or infinite.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._losses: list[Tensor] = []
        self._rows = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rows = state_dict["rows"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trainer = trainer
        self._losses = []
        if trainer.is_global_zero:
            self._table = GrowingTable(self.path, ("step", "loss"), self._rows)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._losses.append(outputs["loss"].detach())
        every = trainer.log_every_n_steps  # pyright: ignore
        if every and (self._rows + len(self._losses)) % every == 0:
            self._flush()
            metrics = {NAME: trainer.progress_bar_metrics[NAME], "epoch": trainer.current_epoch}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._flush()

    def state_dict(self) -> dict[str, Any]:
        self._flush()
        return {"rows": self._rows}

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if trainer.world_size == 1 and not isinstance(exception, NotFiniteError):
            self._flush()  # other processes, if there are any, do not come here

    def _flush(self) -> None:
        if not self._losses:
            return
        mean: Any = self._trainer.strategy.reduce(torch.stack(self._losses), reduce_op="mean")
        values = mean.tolist()
        steps = range(self._rows + 1, self._rows + len(values) + 1)
        self._losses, self._rows = [], steps[-1]
        self._trainer.callback_metrics[NAME] = torch.tensor(values[-1], dtype=torch.float64)
        self._trainer.progress_bar_metrics[NAME] = values[-1]
        if self._trainer.is_global_zero:
            self._table.extend({"step": s, "loss": v} for s, v in zip(steps, values))
        for step, value in zip(steps, values):
            if not math.isfinite(value):
                raise NotFiniteError(
                    f"the loss of step {step} is {value}; the same command with debug=find_nan "
                    "says which layer it began in"
                )
