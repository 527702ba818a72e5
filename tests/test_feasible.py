"""Fits that cannot train, validate or keep what they are to; and why a fit ended."""

from __future__ import annotations

import math
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from datamodules.digits import Digits
from models.tasks.classifier import Classifier

SHORT = ("debug=fast", "impl=reference", "trainer=cpu", "logger=none", "model.network.width=4")
BEST = ("checkpoint.monitor=val/loss", "checkpoint.mode=min")
STOPPING = ("callbacks=early_stopping", "trainer.max_epochs=5")


def no_batches(self: Any) -> DataLoader:
    data = TensorDataset(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long))
    return DataLoader(data, batch_size=4, drop_last=True)


def assert_refused(failed: Any, message: str) -> None:
    assert failed.exit_code == 1, failed.out
    (line,) = failed.err.splitlines()
    assert line.startswith(f"Error: {message}")
    assert failed.results["status"] == "failed"
    assert "test/loss" not in failed.results["metrics"]
    assert not list(failed.folder.glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("trainer.limit_train_batches=0",), "trainer.limit_train_batches: expected more than 0"),
        (("trainer.max_epochs=0",), "trainer.max_epochs: expected more than 0"),
        (("trainer.max_steps=0",), "trainer.max_steps: expected more than 0"),
        (
            (*BEST, "trainer.limit_val_batches=0"),
            "checkpoint.monitor: 'val/loss' comes from a validation, and there is none: "
            "trainer.limit_val_batches is 0; set it to more",
        ),
        (
            (*STOPPING, "trainer.limit_val_batches=0"),
            "callbacks.early_stopping.monitor: 'val/loss' comes from a validation, and there is",
        ),
        (
            ("scheduler=plateau", "trainer.limit_val_batches=0"),
            "scheduler.monitor: 'val/loss' comes from a validation, and there is none",
        ),
        (
            (*BEST, "trainer.check_val_every_n_epoch=5", "trainer.max_epochs=2"),
            "checkpoint.monitor: 'val/loss' comes from a validation, and there is none: the first "
            "validation would be after batch 20, and the fit ends after batch 8; lower trainer.val",
        ),
        (
            (*BEST, "trainer.check_val_every_n_epoch=null", "trainer.val_check_interval=9"),
            "checkpoint.monitor: 'val/loss' comes from a validation, and there is none: the first "
            "validation would be after batch 9, and the fit ends after batch 4",
        ),
        (
            (*BEST, "trainer.max_steps=3"),
            "checkpoint.monitor: 'val/loss' comes from a validation, and there is none: the first "
            "validation would be after batch 4, and the fit ends after batch 3",
        ),
        (
            ("trainer.val_check_interval=100",),
            "trainer.val_check_interval: expected at most the 4 training batches of an epoch, ",
        ),
        (("trainer.max_epochs=-1",), "scheduler: it needs the number of steps of the fit, "),
    ],
)
def test_a_fit_that_cannot_do_what_it_is_to_is_one_line(run, overrides, message):
    assert_refused(run(*SHORT, *overrides), message)


@pytest.mark.filterwarnings("ignore:Total length of .* across ranks is zero")
@pytest.mark.parametrize(
    ("loader", "overrides", "message"),
    [
        ("train_dataloader", (), "data: the training loader has no batches; use a smaller data.ba"),
        ("val_dataloader", (), "data: the validation loader has no batches; use a smaller data.ba"),
        ("val_dataloader", BEST, "data: the validation loader has no batches; "),
    ],
)
def test_a_loader_of_no_batches_is_one_line(run, monkeypatch, loader, overrides, message):
    monkeypatch.setattr(Digits, loader, no_batches)
    assert_refused(run(*SHORT, *overrides), message)


@pytest.mark.filterwarnings("ignore:Total length of .* across ranks is zero")
def test_a_test_of_no_batches_is_said(run, monkeypatch):
    trained = run(*SHORT, "trainer.limit_test_batches=0")
    assert trained.exit_code == 0
    assert "not tested: trainer.limit_test_batches is 0" in trained.err
    (path,) = trained.folder.glob("checkpoints/*")
    test = ("mode=test", f"ckpt={path}", *SHORT[1:4])
    assert_refused_test(run(*test, "trainer.limit_test_batches=0"), "trainer.limit_test_batches is")
    monkeypatch.setattr(Digits, "test_dataloader", no_batches)
    assert_refused_test(run(*test), "the test loader has no batches; use a smaller data.batch_size")
    trained = run(*SHORT)
    assert trained.exit_code == 0
    assert "not tested: the test loader has no batches" in trained.err


def assert_refused_test(failed: Any, message: str) -> None:
    assert failed.exit_code == 1
    assert failed.err.splitlines()[-1].startswith(f"Error: mode=test: {message}")


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_step_without_a_loss_trains_nothing(run, monkeypatch):
    monkeypatch.setattr(Classifier, "training_step", lambda *_: None)
    failed = run(*SHORT)
    assert failed.exit_code == 1
    assert "Error: nothing was trained: training_step returned no loss" in failed.err


def test_a_lazy_layer_is_one_line(run, monkeypatch):
    init = Classifier.__init__

    def lazy(self: Classifier, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.head = nn.LazyLinear(3)

    monkeypatch.setattr(Classifier, "__init__", lazy)
    assert_refused(run(*SHORT), "model: head.weight has no shape before a forward pass; give its ")


# What is monitored but never comes, and the weights that are kept then.


def test_a_metric_of_the_training_that_nobody_logs_is_one_line(run):
    stopping = "callbacks.early_stopping."
    failed = run(*SHORT, *STOPPING, f"{stopping}monitor=train/los", f"{stopping}mode=min")
    assert failed.exit_code == 1
    assert failed.err.splitlines() == [
        "Error: callbacks.early_stopping.monitor: nothing logs 'train/los'; use train/loss"
    ]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ("checkpoint.monitor=train/x", "checkpoint.mode=min", "trainer.limit_val_batches=0"),
            "checkpoint.monitor: 'train/x' was not logged, but train/loss",
        ),
        (("+checkpoint.every_n_epochs=5",), "checkpoint: none was due before the fit ended"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")
def test_where_no_checkpoint_was_due_the_last_weights_are_kept(run, overrides, reason):
    done = run(*SHORT, *overrides)
    assert done.exit_code == 0, done.err
    note = f"{reason}; the weights of the last step are kept and tested"
    assert done.results["notes"] == [note]
    assert f"Warning: {note}" in done.err
    (path,) = done.folder.glob("checkpoints/*")
    assert path.name == "epoch_0.ckpt"
    assert f"checkpoint  {path}" in done.out
    tested = run("mode=test", f"ckpt={path}", *SHORT[1:4], "trainer.limit_test_batches=2")
    name = "test/loss"
    assert tested.results["metrics"][name] == done.results["metrics"][name]


def test_no_checkpoint_is_kept_where_none_is_wanted(run):
    done = run(*SHORT, "+checkpoint.save_top_k=0")
    assert done.exit_code == 0
    assert "the weights of the last step are tested: checkpoint.save_top_k=0 keeps no" in done.err


# Losses of validations that are no numbers.


def spoil(monkeypatch: pytest.MonkeyPatch, values: list[float], name: str = "val/loss") -> None:
    """Lets the validation of each epoch, and the test, log these values."""
    log = Classifier.log

    def logged(self: Classifier, key: str, value: Any, **options: Any) -> None:
        if key == name:
            value = torch.tensor(values[min(self.current_epoch, len(values) - 1)])
            value = torch.tensor(1.0) if self.trainer.sanity_checking else value
        log(self, key, value, **options)

    monkeypatch.setattr(Classifier, "log", logged)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_validation_loss_that_is_no_number_is_said_once_and_never_the_best(run, monkeypatch, bad):
    spoil(monkeypatch, [bad, 2.0, bad, 3.0])
    done = run(*SHORT, *BEST, "trainer.max_epochs=4", "logger=csv")
    assert done.exit_code == 0, done.err
    assert done.err.splitlines() == [
        f"Warning: val/loss is {bad} in the validation of epoch 0; it is never the best"
    ]
    note = f"val/loss was {bad} in the validation of epoch 0, and 1 more times"
    assert done.results["notes"] == [note]
    assert f"note        {note}" in done.out
    assert [path.name for path in done.folder.glob("checkpoints/*")] == ["epoch_1.ckpt"]


def test_the_last_weights_are_kept_where_every_validation_is_nan(run, monkeypatch):
    spoil(monkeypatch, [math.nan])
    done = run(*SHORT, *BEST, "trainer.max_epochs=2")
    assert done.exit_code == 0, done.err
    assert [path.name for path in done.folder.glob("checkpoints/*")] == ["epoch_1.ckpt"]
    assert any("'val/loss' was never a finite number" in note for note in done.results["notes"])


def test_a_test_loss_that_is_nan_is_said(run, monkeypatch):
    spoil(monkeypatch, [math.nan], "test/loss")
    done = run(*SHORT)
    assert done.results["notes"] == ["test/loss was nan in the test"]
    (path,) = done.folder.glob("checkpoints/*")
    tested = run("mode=test", f"ckpt={path}", *SHORT[1:4])
    assert tested.results["notes"] == ["test/loss was nan in the test"]


def test_another_metric_may_have_nothing_to_count(run, monkeypatch):
    spoil(monkeypatch, [math.nan], "val/accuracy")
    done = run(*SHORT)
    assert done.err == ""
    assert "notes" not in done.results


# Why a fit ended before its last epoch.


class Stop(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = True


@pytest.mark.parametrize(
    ("values", "overrides", "reason"),
    [
        (
            [0.5, 0.25, 1.0],
            (*STOPPING, "callbacks.early_stopping.patience=2"),
            "16, in epoch 3/4: early stopping: val/loss did not improve for 2 validations; "
            "the best was 0.25",
        ),
        (
            [0.5, math.nan],
            STOPPING,
            "8, in epoch 1/4: early stopping: val/loss is not finite; the best was 0.5",
        ),
        (
            [0.5, 0.125],
            (*STOPPING, "callbacks.early_stopping.stopping_threshold=0.2"),
            "8, in epoch 1/4: early stopping: val/loss is below 0.2; the best was 0.5",
        ),
        (
            [0.5],
            ("trainer.max_steps=6", "trainer.max_epochs=5"),
            "6, in epoch 1/4: trainer.max_steps=6 is reached",
        ),
        (
            [0.5],
            ("trainer.max_steps=6", "trainer.max_epochs=2"),
            "6, in epoch 1/1: trainer.max_steps=6 is reached",
        ),
        (
            [0.5],
            ("+trainer.max_time={milliseconds: 1}", "trainer.max_epochs=5"),
            "1, in epoch 0/4: the time is over (trainer.max_time, or a Timer)",
        ),
        (
            [0.5],
            (f"+callbacks.stop._target_={__name__}.Stop", "trainer.max_epochs=5"),
            "4, in epoch 0/4: a callback or the model set trainer.should_stop",
        ),
    ],
    ids=["patience", "nan", "threshold", "steps", "steps of the last epoch", "time", "callback"],
)
def test_a_fit_that_ends_early_says_why(run, monkeypatch, values, overrides, reason):
    spoil(monkeypatch, values)
    done = run(*SHORT, *overrides)
    assert done.exit_code == 0, done.err
    note = f"the fit ended after step {reason}"
    assert done.results["status"] == "finished"
    assert note in done.results["notes"]
    assert f"The {note[4:]}" in done.out
    assert f"note        {note}" in done.out


def test_a_fit_that_may_not_begin_says_why(run):
    failed = run(*SHORT, "+trainer.max_time=00:00:00:00")
    assert_refused(failed, "nothing was trained: the time is over (trainer.max_time, or a Timer)")


def test_a_fit_of_all_its_epochs_has_nothing_to_say(run):
    done = run(*SHORT, "trainer.max_epochs=2", "callbacks=early_stopping")
    assert "notes" not in done.results
    assert "ended after" not in done.out
