"""Whose code runs between two steps, and may change what graphs froze."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import (
    LambdaCallback,
    WeightAveraging,
)
from torch import Tensor

from hoconv.lightning import Throughput
from tests.training.capture.support import (
    BATCH,
    CHANGED_AT,
    STEPS,
    Plain,
    Ran,
    Scheduled,
    batches,
    check_captured,
    same,
)
from training.capture import steps as capture
from training.capture.between import find_unknown
from training.capture.steps import CapturedSteps


class Scaled(Plain):
    scale = 1.0

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.network(inputs) * self.scale, labels)


class Halves:
    """Halves the scale of a model, once, when it is called so many times."""

    def __init__(self) -> None:
        self.model: Any = None
        self.calls = 0

    def __call__(self, value: Any = None) -> Any:
        self.calls += 1
        if self.calls == CHANGED_AT:
            self.model.scale = 0.5
        return value


def _of_a_callback(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    class Changes(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            halves()

    options["callbacks"] = [Changes()]
    return Scaled


def _of_a_lambda_callback(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    options["callbacks"] = [LambdaCallback(on_train_batch_end=lambda *_: halves())]
    return Scaled


def _of_a_partial_function(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    def change(_: str, *args: Any) -> None:
        halves()

    options["callbacks"] = [LambdaCallback(on_train_batch_end=functools.partial(change, "a"))]
    return Scaled


def _of_a_generator(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    options["data"] = itertools.islice((halves(each) for each in batches([BATCH] * STEPS)), STEPS)
    return Scaled


def _of_an_iterated_function(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    left = batches([BATCH] * STEPS)
    options["data"] = iter(lambda: halves(left.pop(0)) if left else None, None)
    return Scaled


def _that_a_callback_is_given(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    def count(batch: Any) -> int:  # not called for steps that capture
        halves.calls = halves.model.trainer.global_step - 1
        return halves(BATCH)

    options["callbacks"] = [Throughput(warmup_steps=0, batch_size_fn=count)]
    return Scaled


def _of_a_derived_callback(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    class Changes(WeightAveraging):
        def should_update(self, *_: Any, **__: Any) -> bool:
            return bool(halves())

    options["callbacks"] = [Changes()]
    return Scaled


def _of_the_model(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    class Changes(Scaled):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return halves(batch)

    return Changes


def _of_a_data_set(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    class Changes(torch.utils.data.Dataset[Any]):
        items = batches([BATCH] * STEPS)

        def __len__(self) -> int:
            return len(self.items)

        def __getitem__(self, index: int) -> Any:
            return halves(self.items[index])

    options["data"] = torch.utils.data.Subset(Changes(), range(STEPS))
    return Scaled


def _of_a_schedule(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    class Changes(Scaled):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            first = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, 1)
            second = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: halves(1.0))
            schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [2])
            return {
                "optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }  # fmt: skip

    return Changes


def _of_a_validation(halves: Halves, options: dict[str, Any]) -> type[pl.LightningModule]:
    class Changes(Scaled):
        def validation_step(self, *_: Any) -> None:
            halves.calls = CHANGED_AT - 1
            halves()

    options |= {
        "val_check_interval": CHANGED_AT, "validation": batches([BATCH]), "num_sanity_val_steps": 0,
    }  # fmt: skip
    return Changes


OWNERS = (
    _of_a_callback, _of_a_lambda_callback, _of_a_partial_function, _that_a_callback_is_given,
    _of_a_derived_callback, _of_the_model, _of_a_data_set, _of_a_generator,
    _of_an_iterated_function, _of_a_schedule, _of_a_validation,
)  # fmt: skip


@pytest.mark.parametrize("owner", OWNERS)
def test_what_any_code_changes_between_two_steps_counts(
    fit: Callable[..., Ran], owner: Callable[..., Any]
) -> None:
    def run(mode: str) -> Ran:
        halves, options = Halves(), {}
        kind = owner(halves, options)

        class Known(kind):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__()
                halves.model = self

        return fit(Known, mode, **options)

    captured, eager = run("auto"), run("off")
    assert captured.capture.captures == 2
    assert same(captured, eager)


def known(callback: pl.Callback) -> pl.Callback:
    """Lets a callback be as one of ours, whose code is not looked at."""
    type(callback).__module__ = CapturedSteps.__module__
    return callback


@pytest.mark.parametrize("weights_only", [False, True])
def test_what_a_checkpoint_changes_counts_from_the_next_step(
    fit: Callable[..., Ran], tmp_path: Path, weights_only: bool
) -> None:
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == CHANGED_AT:
                trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only)

    class Changes(Scaled):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.scale = 0.5

    captured, eager = (fit(Changes, mode, callbacks=[known(Saves())]) for mode in ("auto", "off"))
    assert captured.capture.captures == 2
    assert same(captured, eager)


def test_attributes_are_compared_now_and_then_where_all_code_is_known(
    fit: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changes(pl.Callback):  # as another thread does, at any time
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == CHANGED_AT:
                pl_module.scale = 0.5

    for every, captures in ((STEPS, 1), (CHANGED_AT + 1, 2)):
        monkeypatch.setattr(capture, "COMPARE_EVERY", every)
        assert fit(Scaled, callbacks=[known(Changes())]).capture.captures == captures


def test_code_that_is_not_known_has_a_name(
    fit: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str | None, None] = {}

    def find(*args: Any) -> str | None:
        unknown = find_unknown(*args)
        found[unknown] = None
        return unknown

    monkeypatch.setattr(capture, "find_unknown", find)
    check_captured(fit, Plain)
    check_captured(fit, Scheduled)
    assert [*found] == [None, "Scheduled.configure_optimizers.<locals>.<lambda>"]
