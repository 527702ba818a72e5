"""Measuring what is left in another process, where one has lost its device."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
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
