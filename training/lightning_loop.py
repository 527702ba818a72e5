"""The private parts of Lightning's training loop that we use; nothing elsewhere uses any.

Lightning offers no public hook around a whole training step, none to log in the name of one, and no
way to leave out what its loop does in every step of several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

Logged = tuple[str, Any, dict[str, Any]]  # name, value and options of a call of self.log
Run = Callable[[Any, int, dict[str, Any]], dict[str, Any]]


def replace_steps(trainer: pl.Trainer, run: Run) -> Run:
    """Lets `run` do the training steps of a fit with automatic optimization: zero_grad, forward,
    backward and the optimizer together. Returns what does one as Lightning does.

    Args:
        run: is given the optimizer, the index of the batch and the arguments of ``training_step``;
            returns the detached loss and what else ``training_step`` returned.
    """
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    run_eagerly, loop.run = loop.run, run
    return run_eagerly


def restore_steps(trainer: pl.Trainer) -> None:
    """Lets Lightning do the training steps again."""
    vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop("run", None)


class LoggedKindError(TypeError):
    """A step logs a value that cannot be logged again."""


@contextmanager
def recorded(model: pl.LightningModule, also_log: bool = False) -> Iterator[list[Logged]]:
    """Yields what ``training_step`` logs within, each tensor as it is then: the step may change it.

    Args:
        also_log: whether Lightning gets it, too.

    Raises:
        LoggedKindError: by the step: it logs something else than a tensor or a number.
    """
    logged: list[Logged] = []
    log, own = model.log, "log" in vars(model)

    def record(name: str, value: Any, *args: Any, **options: Any) -> None:
        if args or not isinstance(value, Tensor | float | int):
            kind = "with positional options" if args else f"as a {type(value).__name__}"
            raise LoggedKindError(f"training_step logs {name!r} {kind}")
        copied = value.detach().clone() if isinstance(value, Tensor) else value
        logged.append((name, copied, options))
        if also_log:
            log(name, value, **options)

    model.log = record
    try:
        yield logged
    finally:
        del model.log
        if own:
            model.log = log


def log_of_training_step(model: pl.LightningModule, logged: Iterable[Logged]) -> None:
    """Logs names, values and options as ``training_step`` does: its averages go on."""
    before, model._current_fx_name = model._current_fx_name, "training_step"
    for name, value, options in logged:
        model.log(name, value, **options)
    model._current_fx_name = before


def ask_less_often_for_sigterm(trainer: pl.Trainer) -> None:
    """Leaves out that several processes broadcast in every step whether one received SIGTERM, and
    wait for the GPU to say so; :class:`~training.checkpoints.StepCheckpoints` asks at intervals."""
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = lambda: None


def count_logged_steps(trainer: pl.Trainer) -> int:
    """Returns the step under which loggers get what is logged."""
    loop: Any = trainer.fit_loop.epoch_loop
    return loop._batches_that_stepped


def set_logged_steps(trainer: pl.Trainer, count: int) -> None:
    """Sets it: resuming, Lightning counts the last step again in some places where a run may have
    stopped."""
    loop: Any = trainer.fit_loop.epoch_loop
    loop._batches_that_stepped = count


def is_last_of_step(trainer: pl.Trainer) -> bool:
    """Returns whether the optimizer steps after the batch that is being trained on."""
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    accumulated = ready % trainer.accumulate_grad_batches == 0  # pyright: ignore
    return accumulated or trainer.is_last_batch or ready >= trainer.num_training_batches
