"""Checking the configuration that a command line composed, before anything is made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from lightning_fabric.utilities import exceptions as of_lightning
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from datamodules.images import CacheError, DataNotFoundError
from training.configuration.direction import check_directions
from training.configuration.errors import MisconfigurationException

DATA_ERRORS = (
    CacheError,
    DataNotFoundError,
    MisconfigurationException,
    of_lightning.MisconfigurationException,  # of users' code
)

# Values that a command line often sets, and the least that they may be; null where it is allowed.
WHOLE_NUMBERS = {
    "seed": 0, "capture.verify_every_n_steps": 1, "data.batch_size": 1, "data.num_workers": 0,
    "step_checkpoints.every_n_steps": 1,
    "step_checkpoints.keep": 1, "trainer.accumulate_grad_batches": 1,
    "trainer.check_val_every_n_epoch": 1, "trainer.log_every_n_steps": 0, "trainer.max_epochs": -1,
    "trainer.max_steps": -1,
}  # fmt: skip
NUMBERS = {
    "approx.momentum": 0, "model.label_smoothing": 0, "model.learning_rate": 0,
    "model.weight_decay": 0, "trainer.gradient_clip_val": 0, "trainer.limit_test_batches": 0,
    "trainer.limit_train_batches": 0, "trainer.limit_val_batches": 0,
}  # fmt: skip
SEEDS = 2**32  # what NumPy takes are less
# What Python takes for true if it is another word than these.
FLAGS = (
    "approx.learn_scales", "approx.skip_first", "channels_last", "compile", "data.augment",
    "data.cache_images", "find_nan", "print_config", "tf32",
)  # fmt: skip
WORDS = {"direction": ("maximize", "minimize"), "unavailable": ("error", "skip")}
MAY_BE_NULL = (
    "approx.energies", "data.num_workers", "trainer.check_val_every_n_epoch",
    "trainer.gradient_clip_val", "trainer.max_epochs", "trainer.val_check_interval",
)  # fmt: skip


def check_config(config: DictConfig) -> None:
    """Resolves the whole configuration once, and checks its numbers and flags.

    Raises:
        MisconfigurationException: some value cannot be resolved, or is not what belongs there.
        CacheError, DataNotFoundError: the data that decides about one cannot be read.
    """
    with plain_errors():
        OmegaConf.to_container(config, resolve=True)
    for name, least in WHOLE_NUMBERS.items():
        _require(config, name, f"a whole number of at least {least}", _is_number(int, least))
    for name, least in NUMBERS.items():
        _require(config, name, f"a number of at least {least}", _is_number((int, float), least))
    _require(config, "seed", f"less than {SEEDS}", lambda seed: seed < SEEDS)
    is_number = _is_number((int, float), 0)
    interval = "trainer.val_check_interval"
    _require(config, interval, "a number above 0", lambda x: is_number(x) and x > 0)
    for name in ("approx", "checkpoint", "step_checkpoints"):
        _require(config, name, "its keys", OmegaConf.is_dict)
    energies = "null, or pJ of a multiplication by multiplier, such as {exact: 3.7}"
    _require(config, "approx.energies", energies, OmegaConf.is_dict)
    for name in FLAGS:
        _require(config, name, "true or false", lambda value: isinstance(value, bool))
    for name, words in WORDS.items():
        _require(config, name, " or ".join(words), words.__contains__)
    check_directions(config)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Raises what a resolver raised, in place of OmegaConf's error about it.

    Raises:
        MisconfigurationException: a value cannot be resolved.
        CacheError, DataNotFoundError: of data that was asked for an attribute.
    """
    try:
        yield
    except InterpolationResolutionError as error:
        cause: BaseException | None = error
        while isinstance(cause, InterpolationResolutionError):
            cause = cause.__context__
        if isinstance(cause, DATA_ERRORS):  # of data that was asked for an attribute
            raise cause from None
        reason = str(error.msg).splitlines()[0].split("raised while resolving interpolation: ")[-1]
        raise MisconfigurationException(f"{error.full_key}: {reason}") from error


def _is_number(kinds: Any, least: int) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, kinds) and not isinstance(x, bool) and x >= least


def _require(
    config: DictConfig, name: str, expected: str, is_allowed: Callable[[Any], bool]
) -> None:
    missing = object()
    value = OmegaConf.select(config, name, default=missing)
    if value is missing or (value is None and name in MAY_BE_NULL) or is_allowed(value):
        return
    raise MisconfigurationException(f"{name}: expected {expected}, got {value!r}")
