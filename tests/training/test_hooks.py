"""Hooks of a training step are called as Lightning calls them, but for those that do nothing."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loops import training_epoch_loop
from pytorch_lightning.profilers import SimpleProfiler
from pytorch_lightning.trainer import call
from torch import Tensor

from training.callbacks.hooks import OverriddenHooks

REPLACED = [
    (call, "_call_callback_hooks"),
    (call, "_call_lightning_module_hook"),
    (call, "_call_strategy_hook"),
    (training_epoch_loop, "is_param_in_hook_signature"),
]


class Module(pl.LightningModule):
    """Writes down which hooks are called, and under which name each logs."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.calls = calls

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls.append(("step", batch_idx, self._current_fx_name))
        loss = self.layer(batch).sum()
        self.log("loss", loss)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.calls.append(("module start", batch_idx, self._current_fx_name))
        return -1 if self.global_step == 5 else None

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("transferred", self._current_fx_name))
        return 2 * batch

    def train_dataloader(self) -> Any:
        data: Any = torch.arange(12.0).view(6, 2)
        return torch.utils.data.DataLoader(data, batch_size=2)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watcher(pl.Callback):
    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name = name
        self.calls = calls

    @property
    def state_key(self) -> str:
        return self.name

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any
    ) -> None:
        self.calls.append((self.name, rest[-1], pl_module._current_fx_name))
        pl_module.log(self.name, float(rest[-1]))


class Failing(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise RuntimeError("on purpose")


def fit(*callbacks: pl.Callback, calls: list[Any], **options: Any) -> tuple[pl.Trainer, Module]:
    torch.manual_seed(0)
    module = Module(calls)
    replaced: Any = Watcher("replaced", calls)
    # Of this object alone.
    replaced.on_train_batch_start = lambda *arguments: calls.append(("instance", arguments[-1]))
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, Watcher("first", calls), replaced, pl.Callback()], **options,
    )  # fmt: skip
    trainer.fit(module)
    return trainer, module


def test_every_hook_is_called_as_by_lightning() -> None:
    expected: list[Any] = []
    found: list[Any] = []
    exact, of_exact = fit(calls=expected)
    ours, of_ours = fit(OverriddenHooks(), calls=found)
    assert found == expected
    assert ours.global_step == exact.global_step == 5  # the step that -1 left out
    assert ours.callback_metrics.keys() == exact.callback_metrics.keys()
    torch.testing.assert_close(dict(ours.callback_metrics), dict(exact.callback_metrics))
    torch.testing.assert_close(of_ours.state_dict(), of_exact.state_dict(), rtol=0, atol=0)
    assert ours.optimizers[0].param_groups[0]["lr"] == exact.optimizers[0].param_groups[0]["lr"]


class During(pl.Callback):
    """Looks while training which functions are Lightning's own."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.own = [getattr(owner, name).__module__ for owner, name in REPLACED]


def test_what_was_replaced_is_put_back() -> None:
    before = [getattr(owner, name) for owner, name in REPLACED]
    during = During()
    fit(OverriddenHooks(), during, calls=[])
    assert "training.callbacks.hooks" in during.own
    assert [getattr(owner, name) for owner, name in REPLACED] == before
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(OverriddenHooks(), Failing(), calls=[])
    assert [getattr(owner, name) for owner, name in REPLACED] == before


def test_a_profiler_sees_every_hook() -> None:
    profiler = SimpleProfiler()
    fit(OverriddenHooks(), calls=[], profiler=profiler)
    assert profiler.recorded_durations["[Callback]Callback.on_train_batch_start"]


class Nested(pl.Callback):
    """Trains another model, with a profiler, in the middle of a training."""

    def on_train_epoch_end(self, *_: Any) -> None:
        self.profiler = SimpleProfiler()
        fit(calls=[], profiler=self.profiler)


def test_a_profiler_sees_every_hook_of_a_training_within_another() -> None:
    nested = Nested()
    fit(OverriddenHooks(), nested, calls=[])
    assert nested.profiler.recorded_durations["[Callback]Callback.on_train_batch_start"]
