"""Recording the loss of every training step in losses.csv; logging some, and what else there is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import FSDPStrategy
from torch import Tensor
from torch.nn.utils import get_total_norm

from training.callbacks.finite import NotFiniteError
from training.configuration.errors import MisconfigurationException
from training.lightning_loop import is_last_of_step
from training.processes import Exchange
from training.results.table import GrowingTable

NAME = "train/loss"


class LossRecord(pl.Callback):
    """Writes ``step,loss`` for every training batch that has a loss, the mean over all devices, in
    digits that give the same float back: runs can be compared bit for bit. Every
    ``trainer.log_every_n_steps`` steps the last loss is logged as ``train/loss`` and shown in the
    progress bar. Loggers also get, of the same step, ``train/learning_rate``,
    ``train/gradient_norm``, of what the optimizers train, after clipping, where no further batch
    adds to the gradients, and every other scalar tensor that ``training_step`` returns beside its
    loss, as ``train/<its name>``.

    Losses stay on the device until there are ``log_every_n_steps`` of them; a GPU's until about a
    second is over. No step waits for the GPU, as it would for ``self.log(..., prog_bar=True)``. All
    are written at the end of an epoch, with each checkpoint, and when the run fails or is
    interrupted. A resumed run appends after the rows that its checkpoint counts.

    Raises:
        NotFiniteError: while training: a loss is NaN or infinite.
        MisconfigurationException: when the fit ends: no batch had a loss.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._losses: list[Tensor] = []  # on the device
        self._logged: list[_Logged] = []  # of these
        self._rows = 0  # how many losses there were before them
        self._exchange = Exchange("mean", 1, torch.device("cpu"))
        self._rate: Any = None  # of learning, in the step that is running

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rows = state_dict["rows"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trainer = trainer
        self._losses, self._logged = [], []
        every, device = trainer.log_every_n_steps, trainer.strategy.root_device  # pyright: ignore
        self._exchange = Exchange("mean", max(1, every), device, self._rows)
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
            self._logged.append(self._describe(trainer, outputs))
            if self._exchange.due(self._rows + len(self._losses)):
                self._send()
                self._write(left=self._exchange.newest)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._flush()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if pl_module.automatic_optimization and not self._rows:
            raise MisconfigurationException(
                "nothing was trained: training_step returned no loss in any step; return one"
            )

    def state_dict(self) -> dict[str, Any]:
        self._flush()
        return {"rows": self._rows}

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if trainer.world_size == 1 and not isinstance(exception, NotFiniteError):
            self._flush()  # with several processes it would wait for those that did not fail

    def _logs(self, trainer: pl.Trainer, ahead: int = 0) -> bool:
        """Returns whether the last loss, or that of a step ahead, is logged."""
        every = trainer.log_every_n_steps  # pyright: ignore
        return bool(every) and (self._rows + len(self._losses) + ahead) % every == 0

    def _describe(self, trainer: pl.Trainer, outputs: Any) -> _Logged:
        """Returns what is logged with the last loss."""
        returned = outputs.items() if isinstance(outputs, Mapping) else ()
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Any] = {"epoch": trainer.current_epoch}
        if trainer.loggers:
            tensors |= {
                f"train/{name}": value.detach()
                for name, value in returned
                if name != "loss" and isinstance(value, Tensor) and value.numel() == 1
            }
            groups = (group for each in trainer.optimizers for group in each.param_groups)
            trained = dict.fromkeys(p for group in groups for p in group["params"])
            gradients = [p.grad for p in trained if p.grad is not None]
            if (
                gradients
                and is_last_of_step(trainer)
                and not isinstance(trainer.strategy, FSDPStrategy)
            ):
                tensors["train/gradient_norm"] = get_total_norm(gradients)
            if isinstance(self._rate, float | int):  # a tensor's value would be waited for
                numbers["train/learning_rate"] = self._rate
        return _Logged(self._rows + len(self._losses), trainer.global_step, tensors, numbers)

    def _flush(self) -> None:
        if self._losses:
            self._send()
        self._write()

    def _send(self) -> None:
        """Begins to bring the losses to the host, and what is logged with some of them."""
        others = [value for logged in self._logged for value in logged.tensors.values()]
        like = self._losses[0]
        values = torch.stack([*self._losses, *(each.reshape(()).to(like) for each in others)])
        first, self._rows = self._rows + 1, self._rows + len(self._losses)
        about = range(first, self._rows + 1), self._logged
        self._exchange.send(self._rows, values, about)
        self._losses, self._logged = [], []

    def _write(self, left: int = 0) -> None:
        """Writes the losses that are on their way, and logs what is to be logged, but leaves some
        of the newest exchanges."""
        for values, (numbers, logged) in self._exchange.read(left):
            rows = [{"step": step, "loss": v} for step, v in zip(numbers, values)]
            self._trainer.callback_metrics[NAME] = torch.tensor(
                rows[-1]["loss"], dtype=torch.float64
            )
            self._trainer.progress_bar_metrics[NAME] = rows[-1]["loss"]
            if self._trainer.is_global_zero:
                self._table.extend(rows)
            for row in rows:
                if not math.isfinite(row["loss"]):
                    raise NotFiniteError(
                        f"the loss of step {row['step']} is {row['loss']}; the same command with "
                        "debug=find_nan says which layer it began in"
                    )
            others = iter(values[len(rows) :])
            for each in logged:
                metrics = {NAME: rows[each.row - numbers.start]["loss"]}
                metrics |= {name: next(others) for name in each.tensors}
                for logger in self._trainer.loggers:
                    logger.log_metrics(metrics | each.numbers, step=each.step)


class _Logged(NamedTuple):
    """The values logged for a step.

    Attributes:
        row: of the table, which has its loss.
        step: under which it is logged.
        tensors: of one number each, on the device.
        numbers: more, which are on the host.
    """

    row: int
    step: int
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
