"""Reasons not to capture the steps of a fit, as far as they show before a step."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import StochasticWeightAveraging
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import LBFGS

# Hooks within a step: a replay would leave out what they do on the host.
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
    if torch.is_anomaly_enabled():
        return "PyTorch looks for anomalies"
    if not isinstance(trainer.profiler, PassThroughProfiler):
        return "a profiler is on"
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            return "StochasticWeightAveraging trains without gradients at times"
        for hook in HOOKS:
            if is_overridden(hook, callback, pl.Callback):
                return f"{type(callback).__name__} has {hook}"
    for hook in MODEL_HOOKS:
        if is_overridden(hook, model):
            return f"the model has {hook}"
    for name, module in model.named_modules():
        if _has_hooks(module):
            return f"{name or 'the model'} has a hook"
    (optimizer,) = trainer.optimizers
    if isinstance(optimizer, LBFGS):
        return "LBFGS runs a step several times"
    fused = all(group.get("fused") for group in optimizer.param_groups)
    if getattr(trainer.precision_plugin, "scaler", None) is not None and not fused:
        return f"precision=16-mixed waits for the GPU unless {type(optimizer).__name__} is fused"
    return None


def find_unfit(tensors: list[Tensor], device: torch.device) -> str | None:
    """Returns what a graph cannot have in its batch, or None."""
    for tensor in tensors:
        if tensor.device != device:
            return f"a tensor of the batch is on {tensor.device}"
        if type(tensor) is not Tensor:
            return f"a tensor of the batch is a {type(tensor).__name__}"
        if tensor.requires_grad:
            return "a tensor of the batch requires a gradient"
    if len({*map(id, tensors)}) < len(tensors):
        return "the batch has a tensor twice"
    return None


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
