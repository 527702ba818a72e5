"""The fit whose steps are captured: what a step reads and writes."""

from __future__ import annotations

import itertools
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

from training.capture.attributes import Attributes, attributes_of
from training.capture.frozen import read_attributes
from training.capture.gpu import Gpu
from training.capture.optimizer import CapturedOptimizer

foreach_copy_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class Fit:
    """What the steps of a fit use, with one optimizer on a device that captures.

    Args:
        run_step: the `run` of Lightning's loop, which runs a step.
        gpu: which captures.

    Attributes:
        trainer, model, device, gpu, run_step: as given.
        loop: Lightning's, of automatic optimization.
        distributed: whether DistributedDataParallel runs the model, in a single process too.
        optimizer: of the fit.
        parameters: those that may have gradients, and other leaves that the model has.
        kept: those of them whose gradients no step sets to None: others than the optimizer's.
    """

    def __init__(
        self, trainer: pl.Trainer, model: pl.LightningModule, run_step: Any, gpu: Gpu
    ) -> None:
        self.trainer: Any = trainer
        self.model: Any = model
        self.run_step = run_step
        self.gpu = gpu
        self.device = trainer.strategy.root_device
        self.loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        self.distributed = isinstance(trainer.strategy, DDPStrategy)
        self.optimizer = CapturedOptimizer(trainer.optimizers[0], self.device)
        self.prepare()

    def prepare(self) -> None:
        """Prepares the optimizer for a capture, and finds the parameters: new ones may be there."""
        self.optimizer.prepare()
        # An optimizer may have been given more than the model has.
        trained = dict.fromkeys(self.optimizer.parameters)
        leaves = [t for t in self.attributes().tensors() if t.requires_grad and t.is_leaf]
        self.parameters = list(dict.fromkeys((*trained, *self.model.parameters(), *leaves)))
        self.kept = [p for p in self.parameters if p not in trained and p.requires_grad]

    def gradients(self) -> list[Tensor | None]:
        """Returns those of all parameters."""
        return [p.grad for p in self.parameters]

    def attributes(self) -> Attributes:
        """Returns those of the model and of the optimizer."""
        attributes = attributes_of(self.model, self.device)
        self.optimizer.add_options(attributes)
        self.optimizer.add_state(attributes)
        return attributes.finish()

    def read(self, reads: set[tuple[int, str]]) -> Attributes:
        """Returns those of the model that were read."""
        return read_attributes(self.model, self.device, reads)

    def state(self) -> list[Tensor]:
        """Returns all tensors that a step may write, but gradients."""
        scaler = vars(getattr(self.trainer.precision_plugin, "scaler", None) or object)
        found = [
            *self.attributes().tensors(),
            *(value for value in scaler.values() if isinstance(value, Tensor)),
        ]
        return list({id(tensor): tensor for tensor in found}.values())

    @torch.no_grad()
    def restore(
        self,
        state: list[Tensor],
        values: list[Tensor],
        random_state: Tensor,
        gradients: list[Tensor | None],
    ) -> None:
        """Sets tensors, the GPU's generator and the gradients to what they were."""
        # Only what has changed: the rest may be memory that cannot be written to.
        changed = [not torch.equal(*pair) for pair in zip(state, values, strict=True)]
        if any(changed):
            written = list(itertools.compress(state, changed))
            foreach_copy_(written, list(itertools.compress(values, changed)))
        self.gpu.set_random_state(random_state)
        set_gradients(self.parameters, gradients)

    def agree(self, decision: bool) -> bool:
        """Whether the decision is true in all processes."""
        return self.trainer.strategy.reduce_boolean_decision(decision, all=True)


def set_gradients(parameters: list[Tensor], gradients: list[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is not gradient:
            parameter.grad = gradient
