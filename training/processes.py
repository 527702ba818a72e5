"""Messages among the processes of a run while they train.

Lightning's own reductions end with a barrier, at which the host waits for the GPU; the GPU then
waits for the host's next step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = 1.0  # seconds from one exchange to the next, where numbers come from a GPU


class Exchange:
    """Reduces numbers of all processes to one of each kind, on their way to the host.

    A GPU's numbers are on their way until the next exchange, so that no step waits for them, and
    there is one about once a second: it takes the host as long as several steps of a small model.
    Processes do it at the same steps: they agree on how many steps a second has.

    Args:
        how: the mean over the processes, or the largest.
        every: an exchange can be due every so many steps.
        device: that trains.
        step: with which it begins.
    """

    def __init__(
        self, how: Literal["mean", "max"], every: int, device: torch.device, step: int = 0
    ) -> None:
        self._how = how
        self._every = every
        self._device = device
        self._several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._sent: deque[_Sent] = deque()
        self._last = step  # of the last exchange
        self._begun = time.perf_counter()  # when that was
        self._distance = every  # steps from one exchange to the next

    @property
    def newest(self) -> int:
        """Returns how many exchanges are to be left on their way: the newest of a GPU, none of a
        CPU."""
        return int(self._device.type == "cuda")

    def due(self, step: int) -> bool:
        """Returns whether there is an exchange after this step, in all processes."""
        if self._device.type != "cuda":
            return step % self._every == 0
        if self._several:
            return step % self._every == 0 and step >= self._last + self._distance
        return time.perf_counter() >= self._begun + PATIENCE

    def send(self, step: int, values: Tensor, about: Any = None) -> None:
        """Begins an exchange.

        Args:
            step: after which it is.
            values: (n,) floating point, on the device.
            about: is returned with the numbers.
        """
        now = time.perf_counter()
        seconds_a_step = (now - self._begun) / max(1, step - self._last)
        self._last, self._begun = step, now
        if self._several:
            values = torch.cat((values, values.new_full((1,), seconds_a_step)))
            dist.all_reduce(values, dist.ReduceOp.MAX if self._how == "max" else dist.ReduceOp.SUM)
            if self._how == "mean":
                values.div_(dist.get_world_size())
        copied = None
        values = values.to("cpu", non_blocking=True)
        if self._device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        self._sent.append(_Sent(values, copied, about))

    def read(self, left: int = 0) -> Iterator[tuple[list[float], Any]]:
        """Yields the numbers of exchanges, which may have to be waited for, and what they are
        about; but leaves some of the newest."""
        while len(self._sent) > left:
            sent = self._sent.popleft()
            if sent.copied is not None:
                sent.copied.synchronize()
            values = sent.values.tolist()
            if self._several:
                seconds = self._every * values.pop()
                self._distance = self._every * max(1, int(PATIENCE / max(seconds, 1e-9)))
            yield values, sent.about


class _Sent(NamedTuple):
    """Numbers on their way to the host.

    Attributes:
        values: (n,), on the host.
        copied: a mark in the GPU's queue behind the copy; None where nothing is to be waited for.
        about: what they are.
    """

    values: Tensor
    copied: torch.cuda.Event | None
    about: Any
