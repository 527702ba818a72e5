"""What keeps the steps of a fit from being captured, as far as it shows before the first step."""

from __future__ import annotations

import inspect
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.modules.module import (
    _has_any_global_hook,  # pyright: ignore[reportAttributeAccessIssue]
)
from torch.optim import LBFGS

HOOKS = (
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
)  # fmt: skip
MODEL_HOOKS = (
    *HOOKS, "backward", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad",
)  # fmt: skip


def find_obstacle(trainer: Any, model: pl.LightningModule, device_type: str) -> str | None:
    """Returns why no step of a fit can be captured, or None.

    Args:
        device_type: of the devices that capture.
    """
    device = trainer.strategy.root_device.type
    if device != device_type:
        return f"the run is on a {device.upper()}"
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        return f"the strategy is {type(trainer.strategy).__name__}"
    if not model.automatic_optimization:
        return "the model optimizes manually"
    if "dataloader_iter" in inspect.signature(model.training_step).parameters:
        return "training_step takes dataloader_iter"
    if torch.is_anomaly_enabled():
        return "PyTorch looks for anomalies"
    if not isinstance(trainer.profiler, PassThroughProfiler):
        return "a profiler is on"
    for callback in trainer.callbacks:
        for hook in HOOKS:
            if is_overridden(hook, callback, pl.Callback):
                return f"{type(callback).__name__} has {hook}"
    for hook in MODEL_HOOKS:
        if is_overridden(hook, model):
            return f"the model has {hook}"
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return "a module is compiled by torch.jit"
    if _has_any_global_hook():
        return "all modules have a hook"
    if (owner := _find_hooked(model)) is not None:
        return f"{owner} has a hook"
    return _find_obstacle_of_optimizer(trainer)


def _find_obstacle_of_optimizer(trainer: Any) -> str | None:
    (optimizer,) = trainer.optimizers
    kind = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        return "LBFGS runs a step several times"
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    if any(getattr(optimizer, each, None) for each in hooks):  # one that wraps another has none
        return f"{kind} has a hook"
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and not getattr(optimizer, "_step_supports_amp_scaling", False):
        return f"precision=16-mixed waits for the GPU unless {kind} is fused"
    return None


def _find_hooked(model: nn.Module) -> str | None:
    """Returns the name of what has a hook: a module or a parameter; None where nothing has one."""
    kinds = (
        "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    )  # fmt: skip
    for name, module in model.named_modules():
        if any(getattr(module, kind, None) for kind in kinds):
            return name or "the model"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # pyright: ignore
            return name
    return None
