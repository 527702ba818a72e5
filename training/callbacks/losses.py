"""Recording the loss of every training step in losses.csv, and some as train/loss."""

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
    """Writes ``step,loss`` for every training batch, the mean over all devices, in digits that give
    the same float back: runs can be compared bit for bit. Every ``trainer.log_every_n_steps`` steps
    the last loss is logged as ``train/loss`` and shown in the progress bar.

    Losses stay on the device until ``log_every_n_steps`` of them are fetched and written at once:
    ``self.log(..., prog_bar=True)`` in a step would wait for each. The rest is written at the end
    of an epoch, with each checkpoint, and when the run fails or is interrupted. A resumed run
    appends after the rows that its checkpoint counts.

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
            self._flush()  # with several processes it would wait for those that did not fail

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
