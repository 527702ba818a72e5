"""Checks, before the first step, that a fit can train, validate and find what it monitors."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl

from training.callbacks.outcome.ending import reasons
from training.configuration.errors import MisconfigurationException

VALIDATED = 1  # batches, to see what a validation logs
TRAINING = "train/"  # begins the names of metrics that are logged while training


class Feasible(pl.Callback):
    """Stops before the first step where nothing is to be trained, where the validation has no
    batches, or where no validation will log what a checkpoint, another callback or the schedule
    monitors. To see what a validation logs, it validates a batch.

    Metrics under ``train/`` are not checked: they are logged while training.

    Args:
        configured: the callbacks by their keys in the configuration, for messages.

    Raises:
        MisconfigurationException: when the fit starts.
    """

    def __init__(self, configured: dict[str, pl.Callback]) -> None:
        self.configured = configured

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for limit in ("limit_train_batches", "max_epochs", "max_steps"):
            if stage == "fit" and getattr(trainer, limit) == 0:
                raise MisconfigurationException(
                    f"trainer.{limit}: expected more than 0, with which nothing is trained"
                )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        monitored = _monitored(trainer)
        if monitored and not trainer.enable_validation:
            _refuse(monitored, _why_no_validation(trainer))
        if monitored:
            trainer.num_sanity_val_steps = trainer.num_sanity_val_steps or VALIDATED

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _require_batches(trainer)
        logged = sorted(n for n in trainer.callback_metrics if not n.startswith(TRAINING))
        for name, metric in _monitored(trainer).items():
            if metric not in logged:
                raise MisconfigurationException(
                    f"{name}.monitor: no validation logs {metric!r}; {_instead(metric, logged)}"
                )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _require_batches(trainer)
        first, last = _first_validated(trainer), _last_trained(trainer)
        if first > last and (monitored := _monitored(trainer)):
            _refuse(
                monitored,
                f"the first validation would be after batch {first:g}, and the fit ends after "
                f"batch {last:g}; lower trainer.val_check_interval or "
                "trainer.check_val_every_n_epoch, or train longer",
            )


def require_trained(trainer: pl.Trainer) -> None:
    """Raises MisconfigurationException where a fit ended without a step: it has weights that nobody
    trained."""
    if trainer.global_step:
        return
    if trainer.num_training_batches == 0:
        raise MisconfigurationException(
            "data: the training loader has no batches; use a smaller data.batch_size, or "
            "drop_last=False in its loader"
        )
    why = "; ".join(reasons(trainer)) or "the fit made no step"
    raise MisconfigurationException(f"nothing was trained: {why}")


@contextlib.contextmanager
def explained(trainer: pl.Trainer) -> Iterator[None]:
    """Raises MisconfigurationException, in one line, for what Lightning says of the configuration
    by an error of Python's."""
    try:
        yield
    except ValueError as error:
        every, batches = trainer.val_check_interval, trainer.num_training_batches
        in_an_epoch = trainer.check_val_every_n_epoch is not None
        if in_an_epoch and isinstance(every, int) and every > batches:
            raise MisconfigurationException(
                f"trainer.val_check_interval: expected at most the {batches} training batches of "
                f"an epoch, got {every}; use trainer.limit_val_batches=0 for no validation, or "
                "trainer.check_val_every_n_epoch=null to count over epochs"
            ) from error
        raise
    except RuntimeError as error:
        if str(error).startswith("Early stopping conditioned on"):
            for name, metric in _monitored(trainer, training=True).items():
                if metric not in (logged := sorted(trainer.callback_metrics)):
                    raise MisconfigurationException(
                        f"{name}.monitor: nothing logs {metric!r}; {_instead(metric, logged)}"
                    ) from error
        raise


def _require_batches(trainer: pl.Trainer) -> None:
    if trainer.num_val_batches and not sum(trainer.num_val_batches):
        raise MisconfigurationException(
            "data: the validation loader has no batches; use a smaller data.batch_size or "
            "drop_last=False in its loader, or trainer.limit_val_batches=0 for no validation"
        )


def _why_no_validation(trainer: pl.Trainer) -> str:
    if trainer.limit_val_batches == 0:
        return "trainer.limit_val_batches is 0; set it to more"
    model, data = trainer.lightning_module, trainer.datamodule  # pyright: ignore
    if type(model).validation_step is pl.LightningModule.validation_step:
        return f"{type(model).__name__} has no validation_step; define it"
    return f"{type(data).__name__} has no val_dataloader; define it"


def _refuse(monitored: dict[str, str], reason: str) -> None:
    name, metric = next(iter(monitored.items()))
    raise MisconfigurationException(
        f"{name}.monitor: {metric!r} comes from a validation, and there is none: {reason}, or "
        f"monitor a metric under {TRAINING}"
    )


def _first_validated(trainer: pl.Trainer) -> float:
    """Returns after how many batches of the whole fit it validates first; 0 where nobody knows."""
    every: Any = trainer.val_check_batch
    batches, epochs = trainer.num_training_batches, trainer.check_val_every_n_epoch
    if every is None or batches == math.inf:  # counted in seconds; a loader of no known length
        return 0
    return every if epochs is None else (epochs - 1) * batches + min(every, batches)


def _last_trained(trainer: pl.Trainer) -> float:
    """Returns after how many batches of the whole fit it ends."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    return min(
        math.inf if epochs in (None, -1) else epochs * trainer.num_training_batches,
        math.inf if steps == -1 else steps * trainer.accumulate_grad_batches,
    )


def _monitored(trainer: Any, training: bool = False) -> dict[str, str]:
    """Returns what the schedule and each callback monitor, by their keys in the configuration; with
    `training` what is logged while training too."""
    (keys,) = (each.configured for each in trainer.callbacks if isinstance(each, Feasible))
    found: dict[str, Any] = {
        next((key for key, other in keys.items() if other is each), "checkpoint"): each.monitor
        for each in trainer.callbacks
        if getattr(each, "monitor", None) and getattr(each, "strict", True)
    }
    for schedule in trainer.lr_scheduler_configs:
        if schedule.reduce_on_plateau and schedule.strict:
            found["scheduler"] = schedule.monitor
    return {n: metric for n, metric in found.items() if training or not metric.startswith(TRAINING)}


def _instead(metric: str, logged: list[str]) -> str:
    close = difflib.get_close_matches(metric, logged, 1) or logged
    return f"use {'one of ' if len(close) > 1 else ''}{', '.join(close)}" if close else (
        "nothing is logged; log it with self.log"
    )  # fmt: skip
