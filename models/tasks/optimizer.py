"""The base of all models: an optimizer, a learning-rate schedule, and means over epochs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.utils import instantiate
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.plugins import MixedPrecision
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from hoconv.ops.approx.layers.learned_scale import LearnedScale
from models.arguments import require_share
from models.metrics.mean import EpochMean, Mean

MONITORED = "val/loss"  # by a schedule that follows a metric


def make(described: Any) -> Any:
    """Returns what a ``_target_`` and its arguments make; what is no description, as it is.

    A model of a run is given the network itself; ``load_from_checkpoint`` gives the description
    that the checkpoint holds.
    """
    return instantiate(described) if isinstance(described, Mapping) else described


class Optimized(pl.LightningModule):
    """A model with an optimizer and a schedule of its learning rate.

    Attributes:
        capturable: that training steps may be CUDA graphs: they depend on the batch, parameters,
            buffers and the optimizer's state alone.
        means: those that `log_mean` logs, by name: ``val/loss`` and ``test/loss``; a task may add
            others.

    Args:
        learning_rate: the highest of the schedule.
        weight_decay: of the optimizer.
        optimizer, scheduler: see :func:`configure`; or their descriptions.
    """

    capturable = True

    def __init__(
        self,
        learning_rate: float,
        weight_decay: float,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., LRScheduler],
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.optimizer = make(optimizer)
        self.scheduler = make(scheduler)
        self.means = nn.ModuleDict({f"{stage}/loss": EpochMean() for stage in ("val", "test")})

    def log_mean(self, name: str, mean: Mean, **options: Any) -> None:
        """Adds a batch's terms to the mean over an epoch, and logs that; `options` are of `log`."""
        metric: Any = self.means[name]
        metric.update(mean)
        self.log(name, metric, batch_size=1, **options)  # of which the metric makes no use

    def configure_optimizers(self) -> Any:
        return configure(
            self, self.optimizer, self.scheduler, self.learning_rate, self.weight_decay
        )


def configure(
    model: pl.LightningModule,
    optimizer: Callable[..., torch.optim.Optimizer],
    scheduler: Callable[..., LRScheduler],
    learning_rate: float,
    weight_decay: float,
) -> Any:
    """Returns what ``configure_optimizers`` returns.

    Args:
        optimizer: called with the model's parameters, ``lr=`` and ``weight_decay=``. On a GPU it is
            also told ``fused=True``, if it has that argument: one kernel updates all parameters.
        scheduler: called with the optimizer, and with ``total_steps=``, the steps of the fit, if it
            has that argument. It steps after every step; ReduceLROnPlateau after every epoch.
        learning_rate: the highest of the schedule.
        weight_decay: as the optimizer defines it; of all parameters but learned scales.

    Raises:
        MisconfigurationException: the optimizer or the scheduler refuses a value.
    """
    trainer: Any = model.trainer
    # Lightning does not clip the gradients of fused optimizers in mixed precision.
    clips = isinstance(trainer.precision_plugin, MixedPrecision) and trainer.gradient_clip_val
    fused = trainer.strategy.root_device.type == "cuda" and not clips
    options: dict[str, Any] = {"fused": True} if fused and _takes(optimizer, "fused") else {}
    options |= {"lr": learning_rate, "weight_decay": weight_decay}
    made = _make("optimizer", optimizer, _groups(model), **options)
    length = {}
    if _takes(scheduler, "total_steps"):
        steps = trainer.estimated_stepping_batches
        if not 0 <= steps < math.inf:
            raise MisconfigurationException(
                "scheduler: it needs the number of steps of the fit, which is not known; set "
                "trainer.max_steps, or use scheduler=constant"
            )
        length["total_steps"] = max(1, int(steps))  # none: a fit without batches says so itself
    schedule = _make("scheduler", scheduler, made, **length)
    if isinstance(schedule, ReduceLROnPlateau):
        when = {"interval": "epoch", "monitor": MONITORED}
    else:
        when = {"interval": "step"}
    return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, **when}}


def _groups(model: nn.Module) -> Any:
    """Returns a model's parameters as an optimizer takes them. Learned scales are a group without
    decay, which would shrink them."""
    scales = [p for m in model.modules() if isinstance(m, LearnedScale) for p in m.parameters()]
    if not scales:
        return model.parameters()
    learned = {*scales}
    others = [p for p in model.parameters() if p not in learned]
    return [{"params": others}, {"params": scales, "weight_decay": 0.0}]


def _make(name: str, of: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return of(*args, **options)
    except ValueError as error:
        raise MisconfigurationException(f"{name}: {error}") from error


def warmup_cosine(
    optimizer: torch.optim.Optimizer, total_steps: int, warmup_fraction: float = 0.1
) -> LambdaLR:
    """Makes a schedule that rises linearly for a fraction of the steps, then falls to zero as a
    cosine."""
    require_share("warmup_fraction", warmup_fraction)
    warmup = max(1, round(warmup_fraction * total_steps))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))

    return LambdaLR(optimizer, factor)


def _takes(function: Callable[..., Any], argument: str) -> bool:
    return argument in inspect.signature(function).parameters
