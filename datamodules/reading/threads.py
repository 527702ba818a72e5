"""Reads files in threads: decoding them releases Python's global lock."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from torch.utils.data import Dataset

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class FileSet(Dataset[T_co]):
    """A data set whose items are read from files.

    A loader without workers reads the items of a batch in as many threads as PyTorch computes with
    in this process. A worker of a loader computes with one, and reads them in turn.
    """

    def __getitems__(self, items: Sequence[Any]) -> list[T_co]:
        """Returns items in their order; a loader asks for those of a batch at once."""
        threads = min(torch.get_num_threads(), len(items))
        if threads <= 1:
            return [self[item] for item in items]
        return list(_pool(threads, os.getpid()).map(self.__getitem__, items))


@functools.cache  # new threads take longer than they save: each allocates memory of its own
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Returns threads of a process; one that it forks has none of them."""
    return ThreadPoolExecutor(threads, "reading")


def in_threads(visit: Callable[[int], T], count: int, title: str) -> Iterator[T]:
    """Yields `visit` of 0, ..., count - 1, in order.

    Shows a bar in a terminal, a line elsewhere.
    """
    terminal = Console().is_terminal
    if not terminal:
        print(f"{title}: {count:,}", flush=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(visit, range(count))
        yield from track(results, title, total=count, disable=not terminal)
