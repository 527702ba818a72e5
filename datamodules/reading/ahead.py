"""Prepares what comes next while the present is worked on."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

# While a thread reads a file or waits for the GPU, another has Python's lock. With a third one, one
# always waits for it, and so does the thread that trains.
THREADS = 2
AHEAD = THREADS + 1  # batches that are prepared, or ready, before they are asked for

Made = tuple[Any, torch.cuda.Event | None]  # a batch, and when the GPU has it


def ahead(makers: Iterable[Callable[[], Any]], device: torch.device) -> Iterator[Any]:
    """Yields what each maker returns, in order; threads call the next ones beforehand.

    On a GPU they work in streams of their own, and the current stream waits for each batch. An
    error of a maker is raised here, when its batch is asked for.

    Args:
        makers: of batches, which are tuples of tensors and other values.
        device: where they are prepared.
    """
    pending: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(THREADS, "batches ahead", _choose_streams(device)) as pool:
        try:
            for make in makers:
                pending.append(pool.submit(_make, make, device))
                if len(pending) == AHEAD:
                    yield _receive(pending.popleft())
            while pending:
                yield _receive(pending.popleft())
        finally:
            for future in pending:
                future.cancel()


def _make(make: Callable[[], Any], device: torch.device) -> Made:
    batch = make()
    if not _is_gpu(device):
        return batch, None
    there = torch.cuda.Event()
    there.record()
    return batch, there


def _receive(future: Future[Made]) -> Any:
    """Returns a batch that the current stream waits for. The memory of the batch is not given to
    another before that stream is done with it."""
    batch, there = future.result()
    if there is not None:
        stream = torch.cuda.current_stream()
        stream.wait_event(there)
        for value in batch:
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(stream)
    return batch


def _choose_streams(device: torch.device) -> Callable[[], None]:
    """Returns what gives each thread its stream. They continue after what is queued now, such as
    copies of the data."""
    if not _is_gpu(device):
        return lambda: None
    queued = torch.cuda.Event()
    queued.record(torch.cuda.current_stream(device))
    streams = iter(_streams(device))

    def choose() -> None:
        stream = next(streams)
        stream.wait_event(queued)
        torch.cuda.set_stream(stream)

    return choose


@functools.cache  # memory that a stream has used is for that stream
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    # PyTorch gives out 32 streams of a priority in turns: with the priority of all others, one of
    # these could be that in which a graph is captured.
    return tuple(torch.cuda.Stream(device, priority=-1) for _ in range(THREADS))


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
