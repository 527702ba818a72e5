"""Times a candidate by the judge's clock, with values that are new in every call.

A time is that of wall time between a request and private copies of its results, which a candidate
can neither shorten nor answer late. The worker stands still while the values are written. The
reference is timed alike, in a worker of its own, before there is a candidate and after it is gone,
so that none can slow it down. CUDA's events of one process cannot time the work of another.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch

from hoconv.dispatch.declaration import Sample
from hoconv.tools.judging.definition import Definition
from hoconv.tools.judging.exchange import Load
from hoconv.tools.judging.record import Asked, Ended
from hoconv.tools.judging.session import Starter
from hoconv.tools.judging.trial import Trial

_NEW, _AGAIN = 9, 5  # calls with new values, and with values of before
_COMPARED = 1 / 3  # of the timed calls, and the first
_SECONDS_OF_A_CALL = 600.0  # at most, of the reference
_SECONDS = 20.0  # after which no further call is timed
# The fastest call with values of before takes less than this share of the fastest with new ones,
# and so many seconds less.
_REMEMBERS, _NOTICED = 0.6, 3e-4
_ROUNDS = 3  # in all of which it does, if it remembers values


def time_candidate(trial: Trial, dtype: torch.dtype, compared: bool = True) -> dict[str, float]:
    """Times forward calls, and those with gradients where the candidate promises them.

    Returns:
        ``forward`` and ``both`` -> the median of the calls with new values, in milliseconds.
    """
    times = {}
    for what in ("forward", "both") if trial.gradients else ("forward",):
        rounds = [_time_calls(trial, dtype, what == "both", compared)]
        # What is remembered is so in every round; what else the machine does is not.
        while compared and _remembers(*rounds[-1]) and len(rounds) < _ROUNDS:
            rounds.append(_time_calls(trial, dtype, what == "both", compared))
        new, again = rounds[-1]
        if compared and _remembers(new, again):
            trial.find("remembers values", f"timed calls, {what}",
                       f"{1e3 * min(again):.3g} ms with values that it has seen, "
                       f"{1e3 * min(new):.3g} ms with new ones")  # fmt: skip
        times[what] = 1e3 * statistics.median(new)
    return times


def _remembers(new: list[float], again: list[float]) -> bool:
    after, before = min(again, default=math.inf), min(new)
    return after < _REMEMBERS * before and before - after > _NOTICED


def _time_calls(
    trial: Trial, dtype: torch.dtype, differentiated: bool, compared: bool
) -> tuple[list[float], list[float]]:
    """Returns the seconds of calls with new values, and of calls with values of before."""
    new: list[float] = []
    again: list[float] = []
    kept: list[tuple[Sample, Any]] = []
    order = [True] * (_NEW - 1) + [False] * _AGAIN
    trial.calls.random.shuffle(order)
    end = time.monotonic() + _SECONDS
    for fresh in [True, *order]:
        if time.monotonic() > end and new:
            return new, []
        torch.manual_seed(trial.calls.random.getrandbits(60))
        if fresh:
            sample = _sample(trial.definition, trial.worker.device, dtype)
            wanted = trial.calls.cotangent(sample) if differentiated else None
            kept = [*kept, (sample, wanted)][-2 if trial.calls.is_small(sample) else -1 :]
        sample, wanted = kept[-1 if fresh else trial.calls.random.randrange(len(kept))]
        wants = compared and (not new or trial.calls.random.random() < _COMPARED)
        reply = trial.ask(Asked("timed", dtype, sample, wanted), compared=wants, timed=True)
        if reply is None:
            raise Ended
        (new if fresh else again).append(reply.seconds)
    return new, again


def time_reference(
    definition: Definition, starter: Starter, device: str, dtype: torch.dtype, gradients: bool
) -> dict[str, float]:
    """Times the reference as a candidate, in a worker of its own that may read the definition."""
    worker = starter.start(device, ())
    try:
        load = Load("", definition.operator.name, definition.name, (), torch.get_num_threads(),
                    seed=definition.seed)  # fmt: skip
        if failure := worker.load(load, {}):
            raise RuntimeError(failure)
        trial = Trial(definition, worker, 0, gradients, _SECONDS_OF_A_CALL)
        return time_candidate(trial, dtype, compared=False)
    finally:
        worker.close()


def _sample(definition: Definition, device: str, dtype: torch.dtype) -> Sample:
    benchmark = definition.operator.benchmark
    return benchmark.sample(benchmark.sizes[0], torch.device(device), dtype)
