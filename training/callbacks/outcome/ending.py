"""The reason why a fit ended before its last epoch."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping, Timer
from pytorch_lightning.callbacks.early_stopping import EarlyStoppingReason


def why_ended(trainer: pl.Trainer) -> str | None:
    """Returns after which step a fit ended, and why; None where that was the last one of all
    epochs."""
    progress: Any = trainer.fit_loop.epoch_progress.current
    epochs: Any = trainer.max_epochs
    whole = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    unlimited = epochs in (None, -1)
    if not unlimited and progress.processed >= epochs and whole:
        return None
    epoch = f"epoch {progress.processed - 1}" + ("" if unlimited else f"/{epochs - 1}")
    why = "; ".join(reasons(trainer)) or "a hook of the model or of the data ended it"
    return f"ended after step {trainer.global_step}, in {epoch}: {why}"


def reasons(trainer: pl.Trainer) -> list[str]:
    """Returns what ended a fit, as far as it is known."""
    if trainer.should_stop:
        said = [reason for each in _callbacks(trainer) if (reason := _said_by(each))]
        return said or ["a callback or the model set trainer.should_stop"]
    if 0 <= trainer.max_steps <= trainer.global_step:
        return [f"trainer.max_steps={trainer.max_steps} is reached"]
    return []


def _callbacks(trainer: pl.Trainer) -> list[Any]:
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def _said_by(callback: Any) -> str | None:
    """Returns why a callback ended a fit; None where it did not."""
    if isinstance(callback, EarlyStopping):
        limits = {"min": ("below", "above"), "max": ("above", "below")}[callback.mode]
        why = {
            EarlyStoppingReason.NON_FINITE_METRIC: "is not finite",
            EarlyStoppingReason.PATIENCE_EXHAUSTED: (
                f"did not improve for {callback.wait_count} validations"
            ),
            EarlyStoppingReason.STOPPING_THRESHOLD: f"is {limits[0]} {callback.stopping_threshold}",
            EarlyStoppingReason.DIVERGENCE_THRESHOLD: (
                f"is {limits[1]} {callback.divergence_threshold}"
            ),
        }.get(callback.stopping_reason)
        best = f"the best was {float(callback.best_score):.6g}"
        return why and f"early stopping: {callback.monitor} {why}; {best}"
    if isinstance(callback, Timer):
        left = callback.time_remaining()
        if left is not None and left <= 0:
            return "the time is over (trainer.max_time, or a Timer)"
    return None
