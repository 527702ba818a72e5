"""Measuring the most memory that this process holds at once, of the host or of a GPU."""

from __future__ import annotations

from pathlib import Path

import torch
import torch._dynamo  # imported here, so that its memory does not count as a case's

LARGE = 256 << 20  # bytes, that no case needs beside copies of its tensors

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class MemoryUse:
    """The most memory held after construction, beyond what was held then.

    For a GPU it is the GPU's memory only: CUDA's libraries take host memory when they are loaded.
    It is 0 where Linux does not allow to reset the high-water mark.
    """

    def __init__(self, device: str) -> None:
        self._gpu = device == "cuda"
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        try:
            _RESET.write_text("5")  # resets the high-water mark to the memory held now
        except OSError:
            self._before = None
        else:
            self._before = _high_water()

    def most(self) -> int:
        """Returns bytes."""
        if self._gpu:
            return torch.cuda.max_memory_allocated() - (self._before or 0)
        return 0 if self._before is None else _high_water() - self._before


def _high_water() -> int:
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10
