"""Graphs are compared with eager steps again and again: what froze is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl

from tests.training.capture.support import (
    BATCH,
    STEPS,
    Plain,
    Ran,
    Scheduled,
    batches,
    check_captured,
)
from training.capture.steps import TRIALS, WARMUP_STEPS, CaptureError

weights = {"loss": 1.0}  # what a step should not read


class Global(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * weights["loss"]


class Changes(pl.Callback):
    """Changes the weight after a step, and writes a checkpoint before and after it."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in (1, self.step + 1):
            trainer.save_checkpoint(self.folder / f"step_{trainer.global_step}.ckpt")
        if trainer.global_step == self.step:
            weights["loss"] = 0.5


def test_a_global_that_changes_stops_the_run(
    fit: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(weights, "loss", 1.0)
    first = WARMUP_STEPS + TRIALS
    with pytest.raises(CaptureError) as error:
        fit(
            Global, verify=5, callbacks=[Changes(tmp_path, first + 2)], default_root_dir=tmp_path,
            data=batches([BATCH] * 3 * STEPS),
        )  # fmt: skip
    message = str(error.value)
    assert message.startswith(
        f"step {first + 6}: a captured step differs from an eager one by 1 in"
    )
    assert f"has changed since step {first}, after which all steps may be wrong" in message
    assert f"Checkpoints written since: step_{first + 3}.ckpt. Use" in message


@pytest.mark.parametrize("model", [Plain, Scheduled])
def test_comparing_changes_nothing(fit: Callable[..., Ran], model: type[Plain]) -> None:
    ran = check_captured(fit, model, verify=2, accumulate_grad_batches=2, max_epochs=3)
    assert ran.capture.eager_steps["to compare"] > TRIALS * ran.capture.captures
