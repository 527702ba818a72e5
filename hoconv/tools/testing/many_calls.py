"""Calls at once, and what a process holds after many calls: for code that is trusted and code that
is not."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import random  # by name, as the next: a candidate may replace what is in modules
from time import sleep
from typing import TypeVar

_SWITCHES = 1e-5  # seconds after which Python lets another thread run
_PAUSES = 1 / 16  # of the calls and returns of functions in such threads
_READINGS, _FEWEST = 40, 9  # of memory, about; and those that show anything
# Bytes by which memory grows in the last half of many calls, and in each half of these, if it does
# not stop. What an allocator keeps, and what is made once, it has by then.
_GROWS, _IN_EACH = 1 << 20, 1 << 18

T = TypeVar("T")


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Calls functions at once, the first in this thread and each other in one of its own; returns
    their results, or raises what one of them did."""
    ready = threading.Barrier(len(calls))

    def begin(call: Callable[[], T]) -> T:
        ready.wait()
        profiler = sys.getprofile()
        sys.setprofile(_pause_at_random)
        try:
            return call()
        finally:
            sys.setprofile(profiler)

    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCHES)
    try:
        with ThreadPoolExecutor(len(calls)) as pool:
            others = [pool.submit(begin, call) for call in calls[1:]]
            return [begin(calls[0]), *(other.result() for other in others)]
    finally:
        sys.setswitchinterval(before)


def _pause_at_random(*_: object) -> None:
    """Lets other threads run: on a busy machine, calls that take less than their share of a core
    would otherwise follow one another."""
    if random() < _PAUSES:
        sleep(_SWITCHES)


def private_memory(process: int) -> int:
    """Returns the bytes of memory that a process holds and shares with no file; none if it has
    ended."""
    try:
        resident, shared = Path(f"/proc/{process}/statm").read_text().split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def growth(
    call: Callable[[int], bool], held: Callable[[], int], times: int, seconds: float
) -> tuple[int, int]:
    """Makes many calls, and looks whether memory grows without end.

    Args:
        call: makes so many calls; returns whether to go on.
        held: returns the bytes that are held now.
        times, seconds: of the calls, whichever is over first.

    Returns:
        By how many bytes memory grew in the last half of the calls, or 0 where that may have been
        for once; and how many calls there were.
    """
    began, made, batch, readings = time.monotonic(), 0, 1, [held()]
    while made < times and (passed := time.monotonic() - began) < seconds:
        if made:
            batch = min(-(-times // _READINGS), int(made * seconds / (_READINGS * passed)) or 1)
        if not call(batch):
            return 0, made
        made += batch
        readings.append(held())
    middle, later = (readings[quarters * (len(readings) - 1) // 4] for quarters in (2, 3))
    grown, in_each = readings[-1] - middle, min(later - middle, readings[-1] - later)
    ends = len(readings) < _FEWEST or grown < _GROWS or in_each < _IN_EACH
    return 0 if ends else grown, made
