"""The most memory that this process has held at once, of a device's."""

from __future__ import annotations

from pathlib import Path

import torch
import torch._dynamo  # where PyTorch needs it first, its memory would be a case's

LARGE = 128 << 20  # bytes; no case has tensors of a hundredth of that

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class MemoryUse:
    """From here on, beyond what is held now. Nothing where Linux does not tell.

    Of a GPU its own: what CUDA's libraries take of the host's, when they are loaded, is no case's.
    """

    def __init__(self, device: str) -> None:
        self._gpu = device == "cuda"
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        try:
            _RESET.write_text("5")  # the high-water mark is what is held now
        except OSError:
            self._before = None
        else:
            self._before = _high_water()

    def most(self) -> int:
        """Bytes."""
        if self._gpu:
            return torch.cuda.max_memory_allocated() - (self._before or 0)
        return 0 if self._before is None else _high_water() - self._before


def _high_water() -> int:
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10
