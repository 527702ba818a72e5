"""The exact mean over batches with different numbers of terms, on one or several devices."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric


class Mean(NamedTuple):
    """A mean as a sum and a count, so that the means of several processes combine exactly.

    Attributes:
        total: the sum of the terms, scalar.
        count: the number of terms, scalar int64.
    """

    total: Tensor
    count: Tensor

    def value(self) -> Tensor:
        """Returns the mean of this process's terms; NaN where it has none."""
        return _divide(self.total, self.count)

    def share(self) -> Tensor:
        """Returns this process's total divided by the mean count of all processes: what a training
        step minimises. It is finite where there are no terms.

        Averaged over all processes, this is the mean of all terms. DDP and FSDP average the
        gradients of the processes, and so get the gradient of that mean.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return self.total / self.count.clamp(min=1)
        count = self.count.clone()
        dist.all_reduce(count)
        return self.total * (dist.get_world_size() / count.clamp(min=1))


class EpochMean(Metric):
    """The mean of all terms of an epoch, of all processes; NaN where there are none."""

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, mean: Mean) -> None:
        self.total = self.total + mean.total.detach()
        self.count = self.count + mean.count

    def compute(self) -> Tensor:
        return _divide(self.total, self.count)


def _divide(total: Tensor, count: Tensor) -> Tensor:
    """Returns NaN over nothing, also where a total has parts that are not counted."""
    return total.masked_fill(count == 0, torch.nan) / count.clamp(min=1)
