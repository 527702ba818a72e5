"""losses.csv: the loss of every training step, to compare runs bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor


class LossRecord(pl.Callback):
    """Writes ``step,loss`` for every training batch, in digits that give the same float back.

    Losses stay on the device until ``trainer.log_every_n_steps`` of them are fetched at once, so
    that the record does not slow the run down; what is fetched is on disk at once, and the rest
    follows when the run fails or is interrupted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._losses: list[Tensor] = []
        self._written = 0

    @rank_zero_only
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.path.write_text("step,loss\n")
        self._losses, self._written = [], 0

    @rank_zero_only
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._losses.append(outputs["loss"].detach())
        if len(self._losses) >= trainer.log_every_n_steps:  # pyright: ignore
            self._flush()

    @rank_zero_only
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._flush()

    @rank_zero_only
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._flush()

    def _flush(self) -> None:
        if not self._losses:
            return
        values = torch.stack(self._losses).tolist()
        self._losses = []
        with self.path.open("a") as file:
            for step, value in enumerate(values, start=self._written + 1):
                file.write(f"{step},{value!r}\n")
        self._written += len(values)
