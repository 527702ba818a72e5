"""Whose code runs between two training steps.

To compare what graphs froze with what it is now takes the host longer than a launch. From one step
to the next only code that this module does not know could have changed it: that of a user's
callback, hook, data set or schedule.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import pytorch_lightning as pl
from torch import Tensor, nn

# Packages whose code, between two steps, changes nothing of a model.
KNOWN = {
    "_thread", "builtins", "collections", "functools", "lightning",
    "lightning_fabric", "multiprocessing", "numpy", "operator", "pathlib", "pytorch_lightning",
    "queue", "random", "threading", "torch", "torchmetrics", "torchvision", "weakref",
    "datamodules", "hoconv", "models", "training",
}  # fmt: skip
HOOKS = ("on_train_batch_start", "on_train_batch_end")
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
MODEL_HOOKS = (*HOOKS, *BATCH_HOOKS, "lr_scheduler_step", "on_save_checkpoint", "state_dict")
MAX_DEPTH = 16  # of containers: one deeper counts as unknown
MAX_OBJECTS = 1000  # within loaders and schedules: what has more counts as unknown


def find_unknown(trainer: Any, model: pl.LightningModule) -> str | None:
    """Returns the name of what runs code between two steps that is not known, or None."""
    owners: list[tuple[Any, type, tuple[str, ...]]] = [(model, pl.LightningModule, MODEL_HOOKS)]
    owners += [(callback, pl.Callback, HOOKS) for callback in trainer.callbacks]
    if trainer.datamodule is not None:
        owners.append((trainer.datamodule, pl.LightningDataModule, BATCH_HOOKS))
    for owner, base, hooks in owners:
        overridden = [
            hook
            for hook in hooks
            if hook in vars(owner) or getattr(type(owner), hook) is not getattr(base, hook)
        ]
        # What it is given may be called from them: a function that counts samples, say.
        codes = (type(owner), *map(_code_of, _callables(vars(owner)))) if overridden else ()
        if not all(map(_is_known, codes)):
            return f"{type(owner).__name__}.{overridden[0]}"
    loop = trainer.fit_loop.epoch_loop
    for part in (trainer, loop, trainer.strategy, trainer.precision_plugin, *trainer.loggers):
        if not _is_known(type(part)):
            return type(part).__name__
    loaders = trainer.fit_loop._combined_loader.flattened
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    seen = {id(trainer), id(model), *map(id, trainer.optimizers)}
    return _find_unknown_within([*loaders, *schedules], seen)


def _callables(value: Any, depth: int = 0) -> Iterator[Any]:
    """What can be called, but modules, in a container or in one of those that it holds."""
    if depth > MAX_DEPTH:
        yield value
        return
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple | set | frozenset | deque):
        if callable(value) and not isinstance(value, nn.Module):
            yield value
        return
    if not _PLAIN.issuperset(map(type, value)):  # of thousands of losses, say
        for each in value:
            yield from _callables(each, depth + 1)


def _find_unknown_within(values: list[Any], seen: set[int]) -> str | None:
    """The name of an object or a function, within values, whose code is not known; or None."""
    count = 0
    while values:
        value = values.pop()
        if isinstance(value, _DATA) or id(value) in seen:
            continue
        seen.add(id(value))
        count += 1
        code = _code_of(value)
        if not _is_known(code) or count > MAX_OBJECTS:
            return code.__qualname__
        if not isinstance(value, type):
            values += _parts(value)
    return None


def _parts(value: Any) -> list[Any]:
    """What an object, a container or a function holds."""
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or ()]
    parts = list(getattr(value, "__dict__", {}).values())
    if hasattr(value, "func"):  # of functools.partial
        parts += [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        parts += value
    return parts


def _code_of(value: Any) -> Any:
    """The function or class whose code runs when a value is used."""
    while True:  # around another function
        if isinstance(value, types.MethodType):
            value = value.__func__
        elif isinstance(value, functools.partial):
            value = value.func
        elif hasattr(value, "__wrapped__") and not isinstance(value, type):
            value = value.__wrapped__
        else:
            break
    return value if isinstance(value, type | types.FunctionType) else type(value)


def _is_known(code: Any) -> bool:
    if code in _CALLING:
        return False
    return (code.__module__ or "").split(".")[0] in KNOWN


class _ByIndex:
    def __getitem__(self, index: int) -> Any:
        raise IndexError


# What calls functions of which nothing shows.
_CALLING = (
    types.GeneratorType, filter, map, zip, enumerate, reversed, type(iter(int, 1)),
    type(iter(_ByIndex())),
)  # fmt: skip
_DATA = (int, float, complex, str, bytes, type(None), Tensor)
_PLAIN = {*_DATA, bool}
