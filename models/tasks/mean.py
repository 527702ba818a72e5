"""Means over batches with different numbers of terms, on one or several devices."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor


class Mean(NamedTuple):
    """A mean as the sum of its terms and their number, so that several combine exactly.

    Attributes:
        total: scalar.
        count: scalar int64.
    """

    total: Tensor
    count: Tensor

    def value(self) -> Tensor:
        """The mean of this process's terms; 0 where there are none."""
        return self.total / self.count.clamp(min=1)

    def share(self) -> Tensor:
        """This process's total over the mean number of terms a process.

        The mean of it over all processes is the mean of all terms. DDP and FSDP take the mean of
        the processes' gradients, which then is the gradient of that mean.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return self.value()
        count = self.count.clone()
        dist.all_reduce(count)
        return self.total * (dist.get_world_size() / count.clamp(min=1))
