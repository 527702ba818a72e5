"""Prepares what comes next while the present is worked on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

AHEAD = 2  # batches that are ready before they are asked for


class _Item(NamedTuple):
    """A batch, and when the GPU has it; or an error; or neither, after the last batch."""

    batch: Any = None
    there: torch.cuda.Event | None = None
    error: BaseException | None = None


def ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yields the same batches, which a thread prepares, up to `AHEAD` of them beforehand.

    On a GPU the thread works in a stream of its own, and the current stream waits for each batch.
    An error of the thread is raised here, when its batch is asked for.

    Args:
        batches: tuples of tensors and other values.
        device: where they are prepared.
    """
    items: queue.Queue[_Item] = queue.Queue(AHEAD)
    stopped = threading.Event()
    stream = None
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))  # which may still copy the data

    def prepare() -> None:
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                for batch in batches:
                    items.put(_Item(batch, _record(stream)))
                    if stopped.is_set():
                        return
            items.put(_Item())
        except BaseException as error:
            items.put(_Item(error=error))

    thread = threading.Thread(target=prepare, name="batches ahead", daemon=True)
    thread.start()
    try:
        while (item := items.get()).batch is not None:
            if item.there is not None:
                _hand_over(item.batch, item.there, torch.cuda.current_stream(device))
            yield item.batch
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        with suppress(queue.Empty):
            items.get_nowait()  # the thread may wait for room
        thread.join()


def _record(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    if stream is None:
        return None
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _hand_over(batch: Iterable[Any], there: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
    """Lets a stream use a batch once it is there. The memory of the batch is not given to another
    before that stream is done with it."""
    stream.wait_event(there)
    for value in batch:
        if isinstance(value, Tensor) and value.is_cuda:
            value.record_stream(stream)
