"""Checking a command line and the configuration that it composes, before anything is made."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from datamodules.images import CacheError, DataNotFoundError
from training.configuration.moved import OVERRIDES

DATA_ERRORS = (CacheError, DataNotFoundError, MisconfigurationException)

# Values that a command line often sets, and the least that they may be; null where it is allowed.
WHOLE_NUMBERS = {
    "seed": 0, "data.batch_size": 1, "data.num_workers": 0, "step_checkpoints.every_n_steps": 1,
    "step_checkpoints.keep": 1, "trainer.accumulate_grad_batches": 1,
    "trainer.check_val_every_n_epoch": 1, "trainer.log_every_n_steps": 0, "trainer.max_epochs": -1,
    "trainer.max_steps": -1,
}  # fmt: skip
NUMBERS = (
    "model.label_smoothing", "model.learning_rate", "model.weight_decay",
    "trainer.gradient_clip_val", "trainer.limit_test_batches", "trainer.limit_train_batches",
    "trainer.limit_val_batches", "trainer.val_check_interval",
)  # fmt: skip
MAY_BE_NULL = (
    "data.num_workers", "trainer.check_val_every_n_epoch", "trainer.gradient_clip_val",
    "trainer.max_epochs", "trainer.val_check_interval",
)  # fmt: skip


def check_overrides(arguments: Iterable[str], conf: Path) -> None:
    """Checks the overrides of a command line.

    Args:
        conf: the folder of the configuration, which has a folder for each group.

    Raises:
        MisconfigurationException: one has a name of before, or chooses nothing of a group; the
            message says what to write instead.
    """
    for argument in arguments:
        name, _, value = argument.partition("=")
        name = name.lstrip("+~")
        if name in OVERRIDES:
            raise MisconfigurationException(f"{name}: its name is {OVERRIDES[name]} now")
        if value in ("", "null") and "=" in argument and (conf / name).is_dir():
            options = sorted(path.stem for path in (conf / name).glob("*.yaml"))
            fix = f"leave it out, or choose one of {', '.join(options)}"
            fix = f"write {name}=none" if "none" in options else fix
            raise MisconfigurationException(f"{name}: null is none of its options; {fix}")


def check_config(config: DictConfig) -> None:
    """Resolves the whole configuration once, and checks its numbers.

    Raises:
        MisconfigurationException: some value cannot be resolved, or is no number where one belongs.
        CacheError, DataNotFoundError: the data that decides about one cannot be read.
    """
    try:
        OmegaConf.to_container(config, resolve=True)
    except InterpolationResolutionError as error:
        cause: BaseException | None = error
        while isinstance(cause, InterpolationResolutionError):
            cause = cause.__context__
        if isinstance(cause, DATA_ERRORS):  # of data that was asked for an attribute
            raise cause from None
        reason = str(error.msg).splitlines()[0].split("raised while resolving interpolation: ")[-1]
        raise MisconfigurationException(f"{error.full_key}: {reason}") from error
    for name, least in WHOLE_NUMBERS.items():
        _require(config, name, f"a whole number of at least {least}", int, least)
    for name in NUMBERS:
        _require(config, name, "a number", (int, float))


def _require(
    config: DictConfig, name: str, expected: str, kinds: Any, least: int | None = None
) -> None:
    missing = object()
    value = OmegaConf.select(config, name, default=missing)
    if value is missing or (value is None and name in MAY_BE_NULL):
        return
    number = isinstance(value, kinds) and not isinstance(value, bool)
    if not number or (least is not None and value < least):  # pyright: ignore
        raise MisconfigurationException(f"{name}: expected {expected}, got {value!r}")
