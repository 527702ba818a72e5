"""Measuring in other processes: implementations again, in one process after the other, and what is
left to measure where a process has lost its device.

Equal code takes other times in another process, which holds its memory in other places, and while
others use the machine; more turns in one process do not show by how much. So a process is one
sample. It gives the time of a call over that of reading a large buffer in the same turn, which is
slowed down by what else the machine does as well.
"""

from __future__ import annotations

import functools
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from hoconv.dispatch.declaration import Operator, find, operators
from hoconv.tools.benchmarking.measurement import (
    FLUSH_BYTES,
    REPEATS,
    Contender,
    Timed,
    flush_caches,
    memory_limit,
    take_turns,
    temporarily,
    time_apart,
)

WAYS = ("forward", "backward")


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


def per_read(
    processes: int,
    operator: Operator,
    measured: dict[str, Any],
    dtype: torch.dtype,
    grid: bool,
    sizes: Sequence[int] | None,
) -> Iterator[list[dict[str, Any]]]:
    """Times the implementations of a record, without the reference, in each of so many processes.

    Args:
        grid, sizes: of the calls, as for :meth:`Benchmark.calls`.

    Yields:
        After each process, a row for each size and implementation: ``size``, ``contender``, and
        under ``forward`` and ``backward`` a number for each process in which it did not fail.

    Raises:
        concurrent.futures.process.BrokenProcessPool: a process was ended, as by a kernel.
    """
    impls = dict.fromkeys(row["contender"] for row in measured["rows"] if not row["error"])
    impls = [impl for impl in impls if impl in operator.implementations and impl != "reference"]
    call = operator.name, impls, measured["device"], dtype, grid, sizes
    rows: dict[tuple[Any, str], dict[str, Any]] = {}
    context = multiprocessing.get_context("spawn")  # a fork would keep the places of the memory
    for _ in range(processes):
        with ProcessPoolExecutor(1, context) as pool:
            for key, medians in pool.submit(_measure, *call).result().items():
                size, impl = key
                empty = {"size": size, "contender": impl, **{way: [] for way in WAYS}}
                for way in WAYS:
                    rows.setdefault(key, empty)[way].append(medians[way])
        yield [*rows.values()]


def _measure(
    name: str,
    impls: Sequence[str],
    device_type: str,
    dtype: torch.dtype,
    grid: bool,
    sizes: Sequence[int] | None,
) -> dict[tuple[Any, str], dict[str, float]]:
    """Returns (size, implementation) -> direction -> the median over the turns of this process."""
    operators()  # imports the package that declares it
    operator, device = find(name), torch.device(device_type)
    buffer = torch.rand(FLUSH_BYTES // 4, device=device)

    def turn(contender: Contender, timed: Timed) -> dict[str, float]:
        _, read = timed(lambda: flush_caches(buffer))
        return time_apart(contender, timed) | {"read": read}

    medians = {}
    with memory_limit(device_type), temporarily(torch.backends.cudnn, allow_tf32=False):
        for size, make in operator.benchmark.calls(grid, sizes).items():
            sample = make(device, dtype)
            contenders = [
                Contender(impl, functools.partial(operator.function, impl=impl), sample)
                for impl in impls
            ]
            take_turns(contenders, turn, device, REPEATS[device_type], lambda _: None)
            for contender in contenders:
                if not contender.error:
                    times = contender.times_ms
                    medians[size, contender.name] = {
                        way: statistics.median(map(float.__truediv__, times[way], times["read"]))
                        for way in WAYS
                    }
    return medians
