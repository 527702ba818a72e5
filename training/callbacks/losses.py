"""Recording the loss of every training step in losses.csv, and some as train/loss."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor

from training.callbacks.finite import NotFiniteError
from training.results.table import GrowingTable

NAME = "train/loss"


class LossRecord(pl.Callback):
    """Writes ``step,loss`` for every training batch that has a loss, the mean over all devices, in
    digits that give the same float back: runs can be compared bit for bit. Every
    ``trainer.log_every_n_steps`` steps the last loss is logged as ``train/loss`` and shown in the
    progress bar.

    Losses stay on the device until there are ``log_every_n_steps`` of them. A GPU's are copied then
    and written when the next are copied: no step waits for the GPU, as it would for
    ``self.log(..., prog_bar=True)``. All are written at the end of an epoch, with each checkpoint,
    and when the run fails or is interrupted. A resumed run appends after the rows that its
    checkpoint counts.

    Raises:
        NotFiniteError: while training: a loss is NaN or infinite.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._losses: list[Tensor] = []  # on the device
        self._copies: deque[_Copy] = deque()  # on their way to the host
        self._rows = 0  # how many losses there were before `_losses`

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rows = state_dict["rows"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trainer = trainer
        self._losses = []
        self._copies.clear()
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
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is None:
            return  # the model skipped this batch, or optimises by itself
        self._losses.append(loss.detach())
        every = trainer.log_every_n_steps  # pyright: ignore
        if every and (self._rows + len(self._losses)) % every == 0:
            self._copy(logged_step=trainer.global_step)
            self._write(left=int(self._copies[-1].copied is not None))

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
        if self._losses:
            self._copy()
        self._write()

    def _copy(self, logged_step: int | None = None) -> None:
        """Begins to copy the losses to the host; the last is logged under a step, if there is
        one."""
        mean: Any = self._trainer.strategy.reduce(torch.stack(self._losses), reduce_op="mean")
        copied = None
        if mean.device.type == "cuda":
            mean = mean.to("cpu", non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        epoch = self._trainer.current_epoch
        self._copies.append(_Copy(self._rows + 1, mean, copied, logged_step, epoch))
        self._rows += len(self._losses)
        self._losses = []

    def _write(self, left: int = 0) -> None:
        """Writes the losses that were copied, and logs what is to be logged, but leaves some of the
        newest copies."""
        while len(self._copies) > left:
            copy = self._copies.popleft()
            if copy.copied is not None:
                copy.copied.synchronize()
            values = copy.losses.tolist()
            rows = [{"step": step, "loss": v} for step, v in enumerate(values, copy.first_row)]
            self._trainer.callback_metrics[NAME] = torch.tensor(values[-1], dtype=torch.float64)
            self._trainer.progress_bar_metrics[NAME] = values[-1]
            if self._trainer.is_global_zero:
                self._table.extend(rows)
            for row in rows:
                if not math.isfinite(row["loss"]):
                    raise NotFiniteError(
                        f"the loss of step {row['step']} is {row['loss']}; the same command with "
                        "debug=find_nan says which layer it began in"
                    )
            if copy.logged_step is not None:
                metrics = {NAME: values[-1], "epoch": copy.epoch}
                for logger in self._trainer.loggers:
                    logger.log_metrics(metrics, step=copy.logged_step)


class _Copy(NamedTuple):
    """Losses of successive batches, on their way to the host.

    Attributes:
        first_row: of the table.
        copied: a mark in the GPU's queue behind the copy; None where nothing is to be waited for.
        logged_step: as which the last is logged, or None.
        epoch: in which that is.
    """

    first_row: int
    losses: Tensor
    copied: torch.cuda.Event | None
    logged_step: int | None
    epoch: int
