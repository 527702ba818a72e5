"""What the processes of a run tell each other while they train.

Lightning's own reductions end with a barrier, at which the host waits for the GPU; the GPU then
waits for the host's next step.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor


class Reduced:
    """Numbers of all processes as one, on their way to the host; no process waits for them.

    All processes make one at the same step.

    Args:
        values: this process's, on its device; overwritten.
        how: the mean over the processes, or the largest.

    Attributes:
        arrived: whether :meth:`read` does not wait, as on a CPU.
    """

    def __init__(self, values: Tensor, how: Literal["mean", "max"]) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
            if how == "mean":
                values.div_(dist.get_world_size())
        self._values = values.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()
        self.arrived = self._copied is None

    def read(self) -> list[float]:
        """Returns the numbers, which may have to be waited for."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()
