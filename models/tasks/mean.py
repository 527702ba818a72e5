"""Losses that are means over what a batch happens to hold, and over several such batches."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor


class Mean(NamedTuple):
    """The sum of terms and their number, which makes the mean of several means one of all terms.

    Attributes:
        total: scalar.
        count: scalar int64.
    """

    total: Tensor
    count: Tensor

    def value(self) -> Tensor:
        """0 where there is nothing."""
        return self.total / self.count.clamp(min=1)

    def share(self) -> Tensor:
        """What this process has of the mean over all of them, times their number.

        DDP and FSDP take the mean of the gradients, which then is the gradient of that mean.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return self.value()
        count = self.count.clone()
        dist.all_reduce(count)
        return self.total * (dist.get_world_size() / count.clamp(min=1))
