"""Cleaning up after a capture of a CUDA graph that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def failures_ended(device: torch.device, pool: Any) -> Iterator[None]:
    """Does what PyTorch leaves out where CUDA says at the end of a capture that it failed.

    The capture's stream would stay the current one. The allocator would keep all memory that
    several streams use. And up to PyTorch 2.11 each random operator would raise an error, since the
    generator would take itself for captured.

    Args:
        device: of the capture that is made within.
        pool: of its memory; after a failure no capture can use it again.
    """
    with torch.cuda.stream(torch.cuda.current_stream(device)):
        try:
            yield
        except BaseException:
            _end_capture(device, pool)
            raise


def _end_capture(device: torch.device, pool: Any) -> None:
    with suppress(RuntimeError):  # PyTorch has ended it: the error came from elsewhere
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(torch.cuda.graph_pool_handle(), capture_error_mode="relaxed")
        torch.zeros(1, device=device)  # PyTorch warns of a graph that holds nothing
        graph.capture_end()
