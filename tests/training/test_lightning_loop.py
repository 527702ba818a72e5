"""Lightning's loop is as training/lightning_loop.py takes it to be."""

from __future__ import annotations

import inspect
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loops import training_epoch_loop
from torch import Tensor

from training import lightning_loop


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("mean", batch.mean(), on_epoch=True)
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Replaced(pl.Callback):
    """Runs every other step itself: it logs, and counts as Lightning does."""

    def __init__(self) -> None:
        self.last: list[bool] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.trainer, self.model = trainer, pl_module
        self.run_eagerly = lightning_loop.replace_steps(trainer, self.run)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        lightning_loop.restore_steps(trainer)

    def run(self, optimizer: Any, batch_idx: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        self.last.append(lightning_loop.is_last_of_step(self.trainer))
        if batch_idx % 2:
            mean = kwargs["batch"].mean()
            lightning_loop.log_of_training_step(self.model, [("mean", mean, {"on_epoch": True})])
            return {"loss": torch.zeros(())}
        return self.run_eagerly(optimizer, batch_idx, kwargs)


def test_steps_are_replaced_logged_and_counted() -> None:
    data: Any = torch.arange(10.0).view(5, 1, 2)
    replaced = Replaced()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2,
        callbacks=[replaced],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=None))
    assert replaced.last == [False, True, False, True, True]
    # One average over the steps of both kinds.
    assert float(trainer.callback_metrics["mean_epoch"]) == data.mean()
    # Only the last step is Lightning's own and steps the optimizer.
    assert trainer.global_step == 1
    loop: Any = trainer.fit_loop.epoch_loop
    assert "run" not in vars(loop.automatic_optimization)
    assert lightning_loop.count_logged_steps(trainer) == 3


def test_lightning_asks_for_sigterm_where_we_leave_it_out() -> None:
    loop = training_epoch_loop._TrainingEpochLoop
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(loop.advance)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    lightning_loop.ask_less_often_for_sigterm(trainer)
    assert "_broadcast_sigterm_tensor" in vars(trainer.fit_loop.epoch_loop)
