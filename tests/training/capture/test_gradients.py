"""Gradients from one step to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.training.capture.support import (
    BATCH,
    FEATURES,
    Plain,
    Ran,
    batches,
    check_captured,
)


class OfNetwork(Plain):
    """Only the network's parameters are the optimizer's."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.network.parameters(), lr=2**-4)


class Dual(OfNetwork):
    """Trains a parameter by itself, every few steps, and sets its gradient to None."""

    def __init__(self) -> None:
        super().__init__()
        self.dual = nn.Parameter(torch.ones(()))

    def loss(self, batch: Any) -> Tensor:
        first: Any = self.network[0].weight
        return super().loss(batch) + self.dual * (first.pow(2).sum() - 1)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 5 == 4 and self.dual.grad is not None:
            self.dual += 2**-8 * self.dual.grad
            self.dual.grad = None


def test_of_a_parameter_outside_the_optimizer(fit: Callable[..., Ran]) -> None:
    check_captured(fit, Dual, max_epochs=3)


def test_parameters_that_no_step_reads_may_come_and_go(fit: Callable[..., Ran]) -> None:
    class Growing(OfNetwork):
        def __init__(self) -> None:
            super().__init__()
            self.probes = nn.ModuleList()
            self.first = nn.Module()
            self.first.probe = nn.Parameter(torch.zeros(()))

        def on_train_epoch_start(self) -> None:
            self.probes.append(nn.Linear(FEATURES, 1, device=self.device))
            if self.current_epoch == 1:
                del self.first.probe

    check_captured(fit, Growing, data=batches([BATCH] * 7 + [4]), max_epochs=4)
