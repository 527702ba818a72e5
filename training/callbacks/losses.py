"""Recording the loss of every training step in losses.csv; logging some, and what else there is."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import FSDPStrategy
from torch import Tensor
from torch.nn.utils import get_total_norm

from training.callbacks.finite import NotFiniteError
from training.processes import Reduced
from training.results.table import GrowingTable

NAME = "train/loss"
PATIENCE = 1.0  # seconds from one time to the next that a GPU's losses are written


class LossRecord(pl.Callback):
    """Writes ``step,loss`` for every training batch that has a loss, the mean over all devices, in
    digits that give the same float back: runs can be compared bit for bit. Every
    ``trainer.log_every_n_steps`` steps the last loss is logged as ``train/loss`` and shown in the
    progress bar. Loggers also get, of the same step, ``train/learning_rate``,
    ``train/gradient_norm``, after clipping, where no further batch adds to the gradients, and every
    other scalar tensor that ``training_step`` returns beside its loss, as ``train/<its name>``.

    Losses stay on the device until there are ``log_every_n_steps`` of them, which are copied then.
    Of a GPU, those that were copied before are written and logged, once a second: no step waits for
    it, as it would for ``self.log(..., prog_bar=True)``, and few for files. All are written at the
    end of an epoch, with each checkpoint, and when the run fails or is interrupted. A resumed run
    appends after the rows that its checkpoint counts.

    Raises:
        NotFiniteError: while training: a loss is NaN or infinite.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._losses: list[Tensor] = []  # on the device
        self._copies: deque[_Copy] = deque()  # on their way to the host
        self._rows = 0  # how many losses there were before `_losses`
        self._rate: Any = None  # of learning, in the step that is running
        self._written = -math.inf  # when losses were, on the host's clock

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rows = state_dict["rows"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trainer = trainer
        self._losses = []
        self._copies.clear()
        if trainer.is_global_zero:
            self._table = GrowingTable(self.path, ("step", "loss"), self._rows)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._logs(trainer, ahead=1) and trainer.optimizers:
            self._rate = trainer.optimizers[0].param_groups[0]["lr"]

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
        # Lightning divides it by the number of batches whose gradients are accumulated.
        divided = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self._losses.append(loss.detach() * divided if divided > 1 else loss.detach())
        if self._logs(trainer):
            self._copy(trainer.global_step, self._others(trainer, pl_module, outputs))
            if self._copies[-1].means.arrived:
                self._write()
            elif time.perf_counter() >= self._written + PATIENCE:
                self._write(left=1)

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

    def _logs(self, trainer: pl.Trainer, ahead: int = 0) -> bool:
        """Whether the last loss, or that of a step ahead, is logged."""
        every = trainer.log_every_n_steps  # pyright: ignore
        return bool(every) and (self._rows + len(self._losses) + ahead) % every == 0

    def _others(
        self, trainer: pl.Trainer, model: pl.LightningModule, outputs: Any
    ) -> dict[str, Any]:
        """What is logged with the loss: tensors on the device, and numbers."""
        if not trainer.loggers:
            return {}
        returned = outputs.items() if isinstance(outputs, Mapping) else ()
        others: dict[str, Any] = {
            f"train/{name}": value.detach()
            for name, value in returned
            if name != "loss" and isinstance(value, Tensor) and value.numel() == 1
        }
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        parts = trainer.fit_loop._should_accumulate() or isinstance(trainer.strategy, FSDPStrategy)
        if gradients and not parts:
            others["train/gradient_norm"] = get_total_norm(gradients)
        if isinstance(self._rate, float | int):  # a tensor's value would be waited for
            others["train/learning_rate"] = self._rate
        return others

    def _flush(self) -> None:
        if self._losses:
            self._copy()
        self._write()

    def _copy(
        self, logged_step: int | None = None, others: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Begins to copy the losses to the host; the last is logged under a step, if there is
        one, with `others`."""
        tensors = {name: value for name, value in others.items() if isinstance(value, Tensor)}
        kept = {name: value for name, value in others.items() if name not in tensors}
        parts = [
            *self._losses,
            *(each.reshape(()).to(self._losses[0]) for each in tensors.values()),
        ]
        means = Reduced(torch.stack(parts), "mean")
        epoch = self._trainer.current_epoch
        names = tuple(tensors)
        self._copies.append(_Copy(self._rows + 1, means, logged_step, epoch, names, kept))
        self._rows += len(self._losses)
        self._losses = []

    def _write(self, left: int = 0) -> None:
        """Writes the losses that were copied, and logs what is to be logged, but leaves some of the
        newest copies."""
        self._written = time.perf_counter()
        while len(self._copies) > left:
            copy = self._copies.popleft()
            values = copy.means.read()
            others = {**dict(zip(copy.names, values[len(values) - len(copy.names) :])), **copy.kept}
            values = values[: len(values) - len(copy.names)]
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
                metrics = {NAME: values[-1], **others, "epoch": copy.epoch}
                for logger in self._trainer.loggers:
                    logger.log_metrics(metrics, step=copy.logged_step)


class _Copy(NamedTuple):
    """Losses of successive batches, on their way to the host.

    Attributes:
        first_row: of the table.
        means: over all processes, of the losses and behind them of the values of `names`.
        logged_step: as which the last is logged, or None.
        epoch: in which that is.
        names: of the values that are logged with the last loss.
        kept: more of these, which are on the host.
    """

    first_row: int
    means: Reduced
    logged_step: int | None
    epoch: int
    names: tuple[str, ...]
    kept: Mapping[str, Any]
