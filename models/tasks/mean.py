"""The exact mean over batches with different numbers of terms, on one or several devices."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor


class Mean(NamedTuple):
    """A mean as a sum and a count, so that the means of several processes combine exactly.

    Attributes:
        total: the sum of the terms, scalar.
        count: the number of terms, scalar int64.
    """

    total: Tensor
    count: Tensor

    def value(self) -> Tensor:
        """Returns the mean of this process's terms; 0 where it has none."""
        return self.total / self.count.clamp(min=1)

    def share(self) -> Tensor:
        """Returns this process's total divided by the mean count of all processes.

        Averaged over all processes, this is the mean of all terms. DDP and FSDP average the
        gradients of the processes, and so get the gradient of that mean.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return self.value()
        count = self.count.clone()
        dist.all_reduce(count)
        return self.total * (dist.get_world_size() / count.clamp(min=1))
