"""Calls the hooks of a training step that somebody overrides, and those at little cost.

Lightning looks up, names to its profiler and calls a dozen hooks in every step, most of which do
nothing. Where a step is one launch of a CUDA graph, that takes longer than the graph.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
from pytorch_lightning.loops import training_epoch_loop
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.trainer import call

# Hooks of a step that do nothing where nobody overrides them.
_EMPTY = ("on_train_batch_start", "on_train_batch_end")
_SIGNATURE = "is_param_in_hook_signature"
_HOOK = "_current_fx_name"  # where a module keeps the hook that runs, for self.log


class OverriddenHooks(pl.Callback):
    """While a model is trained, Lightning calls hooks as this module does.

    A trainer with a profiler, or with Lightning's debug log, calls all of them: both show them.
    """

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self._changed = ExitStack()
        selector, loop = trainer._data_connector._datahook_selector, training_epoch_loop
        for owner, name, replacement in (
            *((call, name, _unless_shown(getattr(call, name), ours)) for name, ours in _CALLS),
            # What these return is the same in every step.
            (selector, "get_instance", functools.cache(selector.get_instance)),
            (loop, _SIGNATURE, functools.cache(getattr(loop, _SIGNATURE))),
        ):
            self._changed.enter_context(patch.object(owner, name, replacement))

    def on_train_end(self, *_: Any) -> None:
        self._changed.close()

    def on_exception(self, *_: Any) -> None:
        if hasattr(self, "_changed"):
            self.on_train_end()


def _unless_shown(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `ours`, but for trainers that show their hooks: others may train meanwhile."""
    log = logging.getLogger(call.__name__)

    def call_hook(trainer: Any, hook_name: str, *args: Any, **options: Any) -> Any:
        shown = type(trainer.profiler) is not PassThroughProfiler or log.isEnabledFor(logging.DEBUG)
        found = original if shown else functools.partial(ours, original)
        return found(trainer, hook_name, *args, **options)

    return call_hook


def _call_callbacks(
    original: Callable[..., None], trainer: pl.Trainer, hook_name: str, *args: Any, **options: Any
) -> None:
    if hook_name not in _EMPTY or options:
        return original(trainer, hook_name, *args, **options)
    model = trainer.lightning_module
    attributes = vars(model)  # nn.Module looks through all of its own for each that is set
    before, attributes[_HOOK] = attributes[_HOOK], hook_name
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if _is_overridden(callback, hook_name, pl.Callback):
            getattr(callback, hook_name)(trainer, model, *args)
    attributes[_HOOK] = before
    return None


def _call_module(
    _: Callable[..., Any], trainer: pl.Trainer, hook_name: str, *args: Any, pl_module: Any = None,
    **options: Any,
) -> Any:  # fmt: skip
    model = pl_module or trainer.lightning_module
    if hook_name in _EMPTY and not _is_overridden(model, hook_name, pl.LightningModule):
        return None
    return _call_within(model, hook_name, getattr(model, hook_name), *args, **options)


def _call_strategy(
    _: Callable[..., Any], trainer: pl.Trainer, hook_name: str, *args: Any, **options: Any
) -> Any:
    hook = getattr(trainer.strategy, hook_name)
    return _call_within(trainer.lightning_module, hook_name, hook, *args, **options)


def _call_within(model: Any, hook_name: str, hook: Any, *args: Any, **options: Any) -> Any:
    if not callable(hook):
        return None
    attributes = vars(model)
    before, attributes[_HOOK] = attributes[_HOOK], hook_name
    result = hook(*args, **options)
    attributes[_HOOK] = before
    return result


def _is_overridden(owner: Any, hook_name: str, base: type) -> bool:
    return hook_name in vars(owner) or getattr(type(owner), hook_name) is not getattr(
        base, hook_name
    )


_CALLS = (
    ("_call_callback_hooks", _call_callbacks),
    ("_call_lightning_module_hook", _call_module),
    ("_call_strategy_hook", _call_strategy),
)
