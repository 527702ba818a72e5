"""The fit whose steps are captured: what a step reads and writes."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

from training.capture.gpu import Gpu
from training.capture.optimizer import CapturedOptimizer
from training.lightning_loop import Run

copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class Fit:
    """The state that the steps of a fit use, with one optimizer on a device that captures.

    Attributes:
        trainer, model, gpu: as given.
        run_eagerly: does a step as Lightning does.
        progress: Lightning's counters of the optimizer.
        device: that trains.
        distributed: whether DistributedDataParallel runs the model, in a single process too.
        optimizer: of the fit.
        parameters: of the optimizer, then others of the model; found by :meth:`describe`.
        zeroed: how many of them the step begins without a gradient.
    """

    def __init__(
        self, trainer: pl.Trainer, model: pl.LightningModule, run_eagerly: Run, gpu: Gpu
    ) -> None:
        self.trainer: Any = trainer
        self.model = model
        self.run_eagerly = run_eagerly
        self.progress = self.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
        self.gpu = gpu
        self.device = trainer.strategy.root_device
        self.distributed = isinstance(trainer.strategy, DDPStrategy)
        self.optimizer = CapturedOptimizer(trainer.optimizers[0], self.device)
        self.parameters: list[Tensor] = []
        self.zeroed = 0

    def describe(self, first: bool) -> tuple[Any, ...]:
        """Returns what a graph depends on beside the batch: which modules train, which parameters
        and buffers there are, where, which parameters require a gradient and which have one, but
        for those that the step begins without; and the optimizer's options.

        Finds the parameters.

        Args:
            first: whether the step sets the gradients of the optimizer's parameters to None.
        """
        found: list[Any] = []
        of_model: list[Any] = []
        modules: list[Any] = [self.model]
        while modules:  # in every step: sooner than by named_modules and named_parameters
            module = modules.pop()
            found.append(module.training)
            of_model += module._parameters.values()
            found += [_place(b) for b in module._buffers.values() if b is not None]
            modules += [child for child in module._modules.values() if child is not None]
        groups = [group["params"] for group in self.optimizer.optimizer.param_groups]
        optimized = [p for group in groups for p in group]
        known = {*map(id, optimized)}
        others = [p for p in of_model if p is not None and id(p) not in known]
        self.parameters, self.zeroed = [*optimized, *others], len(optimized) if first else 0
        found += [(_place(p), p.requires_grad) for p in self.parameters]
        found += [p.grad is not None for p in self.parameters[self.zeroed :]]
        state = self.optimizer.optimizer.state  # loaded, it is another
        return *found, *map(len, groups), id(state), *self.optimizer.options()

    def state(self) -> dict[str, Tensor]:
        """Returns all tensors that a step may write, but gradients, by name."""
        scaler = vars(getattr(self.trainer.precision_plugin, "scaler", None) or object)
        return {
            **dict(self.model.named_parameters()),
            **dict(self.model.named_buffers()),
            **self.optimizer.state(),
            **{f"scaler.{name}": v for name, v in scaler.items() if isinstance(v, Tensor)},
        }

    def agree(self, decision: bool) -> bool:
        """Returns whether the decision is true in all processes."""
        return self.trainer.strategy.reduce_boolean_decision(decision, all=True)


def _place(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)


def set_gradients(parameters: list[Tensor], gradients: list[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients):
        if parameter.grad is not gradient:
            parameter.grad = gradient
