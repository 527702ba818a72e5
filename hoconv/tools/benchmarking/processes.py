"""Work in processes of its own: what is left to measure where one has lost its device, and what is
compiled ahead."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from typing import Any


class Elsewhere:
    """Calls a function in a process of its own, one and the same for all calls.

    Args:
        function: of a module, and the first of its arguments; all can be pickled.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = functools.partial(function, *args)
        # A fork would have no device either.
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def __call__(self, *args: Any) -> Any:
        return self._pool.submit(self._call, *args).result()

    def close(self) -> None:
        """Ends the process, which frees what it has of the device's memory."""
        self._pool.shutdown()


def call_each(
    function: Callable[[Any], Any], arguments: Iterable[Any], at_once: int
) -> Iterator[None]:
    """Calls a function for each argument, in a process that may end by it; yields after each.

    Args:
        function: can be pickled. What it returns or raises is dropped.
        at_once: so many processes.
    """

    def call(argument: Any) -> None:
        elsewhere = Elsewhere(function)
        with suppress(Exception):
            elsewhere(argument)
        elsewhere.close()

    with ThreadPoolExecutor(at_once) as threads:
        yield from threads.map(call, arguments)
