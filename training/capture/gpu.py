"""Capturing on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hoconv import cuda_graphs


class Gpu:
    """A GPU on which steps are captured, with a stream and memory for it."""

    type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()  # graphs never run at the same time

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Runs on the stream of the captures: autograd keeps the streams of the first steps."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @contextmanager
    def capture(self) -> Iterator[Any]:
        """Captures what is launched, without running it; yields the graph."""
        graph, pool = torch.cuda.CUDAGraph(), self._pool
        # Other threads, a loader's, may use the GPU meanwhile.
        how = torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local")
        try:
            with cuda_graphs.failures_ended(self.device, pool), how:
                yield graph
        except BaseException:
            self._pool = torch.cuda.graph_pool_handle()
            raise

    def random_state(self) -> Tensor:
        """Returns the state of the GPU's generator."""
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device)
