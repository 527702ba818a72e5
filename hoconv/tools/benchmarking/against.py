"""Compares the implementations of an operator with those of another copy of its package, as one
before a change: what became slower.

Two processes, one for each copy, time the same calls in turn. What else the machine does slows both
down; the ratio of their times in the same turn hardly changes. But equal code takes other times in
another process, which holds its memory in other places. So each pair of times comes from a pair of
processes, forked from two, and the ratios of several pairs are judged by Wilcoxon's test of signed
ranks, whose level is divided by the number of comparisons. What a pair has of the two processes
that it is forked from stays: mostly up to a percent, and so much is no change; seldom more. What is
found slower is therefore compared once more, where two other processes begin for every pair, and is
slower if it is again.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE
from rich.table import Table

from hoconv.dispatch.declaration import Operator, Sample

WAYS = ("forward", "backward")
FALSE_ALARMS = 0.01  # the most runs with equal code that find anything slower
ALIKE = 1.01  # the ratio of times that equal code takes in two processes
SLOWDOWN = 1.05  # new / old, which an interval has to exclude for code to count as not slower
METHOD = (
    "Two processes, of this package and of the other, time the same calls in turn; on a GPU, with "
    "cold caches. ratios: for each pair of processes, the median over the turns of the least time "
    "new over that old; low, high: their interval by Wilcoxon's test of signed ranks. What was "
    "slower was compared once more, by pairs of processes that have none in common: it has the "
    "ratios of these."
)
_MORE_PAIRS = 2  # than the fewest with which the test finds anything
_TURNS, _FEWEST_TURNS = 15, 5
_SECONDS = 5.0  # of the turns of a pair, after which the fewest are enough
_WORKER = Path(__file__).with_name("worker.py")

Call = tuple[Any, str]  # size and implementation
Key = tuple[Any, str, str]  # and direction


class _FailedError(Exception):
    """A call of a copy failed; says which and why."""


class NoCopyError(ValueError):
    """A folder holds no copy of a package that can be used."""


class Change(NamedTuple):
    """The change of one implementation, at one size, in one direction.

    Attributes:
        ratio: of the new times to the old ones; above 1, it is slower.
        low, high: its interval, of Hodges and Lehmann, at the level of the test.
        ratios: of the pairs of processes.
    """

    size: Any
    contender: str
    way: str
    ratio: float
    low: float
    high: float
    ratios: list[float]

    @property
    def verdict(self) -> str:
        if self.low > ALIKE:
            return "slower"
        if self.high < 1 / ALIKE:
            return "faster"
        return "not slower" if self.high < SLOWDOWN else "unclear"


class Copy:
    """A process that times the calls of one copy of an operator's package.

    Args:
        folder: which holds the copy, itself or in its folder ``src``; None is this process's own.

    Raises:
        NoCopyError: there is no such copy in the folder.
    """

    def __init__(self, folder: Path | None, operator: Operator, device: str) -> None:
        own = [folder / "src", folder] if folder else []
        paths = [*(str(path.resolve()) for path in own), *filter(None, sys.path)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        self._folder, self._operator = folder, operator
        self.send("find", operator=operator.name, device=device, threads=torch.get_num_threads())

    def found(self) -> None:
        """Waits until the copy is there."""
        answer = self.answer()
        file = Path(answer.get("file", os.devnull)).resolve()
        if self._folder and not file.is_relative_to(self._folder.resolve()):
            package = self._operator.function.__module__.partition(".")[0]
            said = answer.get("error", f"{self._operator.name} would come from {file}")
            raise NoCopyError(
                f"{self._folder}: expected a checkout of the package {package}, as "
                f"`git worktree add FOLDER COMMIT` makes one, or a folder into which `pip install "
                f"--no-deps --target FOLDER` put it; {said}"
            )
        if "error" in answer:
            raise NoCopyError(answer["error"])

    def ask(self, what: str, **options: Any) -> dict[str, Any]:
        self.send(what, **options)
        return self.answer()

    def send(self, what: str, **options: Any) -> None:
        """Asks for something; :meth:`answer` waits for it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # which the answer says
            print(json.dumps({"do": what, **options}), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "its process ended"}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


Copies = tuple[Copy, Copy]  # the other package's and this one's


def compare(
    folder: Path,
    operator: Operator,
    device: str,
    impls: Sequence[str],
    calls: Mapping[Any, Callable[[], Sample]],
    track: Callable[[Sequence[int]], Iterable[int]],
) -> tuple[list[Change], dict[Call, str]]:
    """Compares implementations with those of another copy.

    Args:
        folder: which holds it.
        calls: size -> what makes the call.
        track: shows progress while something is iterated.

    Returns:
        The changes, and which calls cannot be compared, with the reason.

    Raises:
        NoCopyError: the folder has no copy of the package.
    """
    with tempfile.TemporaryDirectory() as scratch:
        paths = {size: Path(scratch, str(i)) for i, size in enumerate(calls)}
        for size, make in calls.items():
            sample = make()
            torch.save(([*sample.args], dict(sample.kwargs)), paths[size])

        @contextmanager
        def start() -> Iterator[Copies]:
            copies = Copy(folder, operator, device), Copy(None, operator, device)
            try:
                for copy in copies:
                    copy.found()
                yield copies
            finally:
                for copy in copies:
                    copy.close()

        with start() as copies:
            wanted = [*itertools.product(calls, impls)]
            found, errors = _measure(lambda: nullcontext(copies), wanted, paths, track)
        slower = {key: change for key, change in found.items() if change.verdict == "slower"}
        if slower:
            wanted = [*dict.fromkeys(key[:2] for key in slower)]
            again, more = _measure(start, wanted, paths, track)
            errors |= more
            found |= {key: change for key, change in again.items() if key in slower}
    return [change for key, change in found.items() if key[:2] not in errors], errors


def _measure(
    start: Callable[[], AbstractContextManager[Copies]],
    wanted: Sequence[Call],
    paths: Mapping[Any, Path],
    track: Callable[[Sequence[int]], Iterable[int]],
) -> tuple[dict[Key, Change], dict[Call, str]]:
    """Compares calls by pairs of processes, each forked from those that `start` gives."""
    ratios: dict[Key, list[float]] = {}
    errors: dict[Call, str] = {}
    for _ in track(range(pairs(len(WAYS) * len(wanted)))):
        with start() as copies:
            for size, impl in (call for call in wanted if call not in errors):
                try:
                    found = pair_ratios(copies, str(paths[size]), impl)
                except _FailedError as error:
                    errors[size, impl] = str(error)
                    continue
                for way, ratio in found.items():
                    ratios.setdefault((size, impl, way), []).append(ratio)
    judged = {key: found for key, found in ratios.items() if key[:2] not in errors}
    return {
        key: Change(*key, *interval(found, FALSE_ALARMS / len(judged)), found)
        for key, found in judged.items()
    }, errors


def pair_ratios(copies: Copies, path: str, impl: str) -> dict[str, float]:
    """Returns the median over the turns of new / old for each direction.

    Raises:
        _FailedError: one of them cannot be timed.
    """

    def ask(what: str, **options: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = [{}, {}]
        for i in random.sample((0, 1), 2):  # one after the other: neither disturbs the other
            answers[i] = copies[i].ask(what, **options)
            if "error" in answers[i]:
                raise _FailedError(f"{('the older', 'this')[i]} package: {answers[i]['error']}")
        return answers

    turns: dict[str, list[float]] = {}
    for copy in copies:
        copy.ask("begin")
    try:
        made = ask("call", path=path, impl=impl, apart=random.random())
        calls = min(answer["calls"] for answer in made)
        end = time.monotonic() + _SECONDS
        for done in range(_TURNS):
            if done >= _FEWEST_TURNS and time.monotonic() > end:
                break
            old, new = ask("turn", calls=calls)
            for way in (each for each in WAYS if each in old and each in new):
                turns.setdefault(way, []).append(new[way] / old[way])
    finally:
        for copy in copies:
            copy.ask("end")
    return {way: statistics.median(found) for way, found in turns.items()}


def pairs(comparisons: int) -> int:
    """Returns how many pairs of processes so many comparisons take."""
    return _MORE_PAIRS + math.ceil(math.log2(max(1, comparisons) / FALSE_ALARMS))


def interval(ratios: Sequence[float], level: float) -> tuple[float, float, float]:
    """Returns the ratio of pairs, and its interval; each end is wrong in the share `level` of
    comparisons at most."""
    logs = [math.log(ratio) for ratio in ratios]
    means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(logs, 2))
    # Of all subsets of the ranks, how many have each sum.
    sums = [1] + [0] * len(means)
    for rank in range(1, len(logs) + 1):
        sums = [n + (sums[total - rank] if total >= rank else 0) for total, n in enumerate(sums)]
    outside, likely = 0, sums[0]  # means beyond an end; subsets with such a sum
    while likely <= level * 2 ** len(logs):
        outside += 1
        likely += sums[outside]
    ratio = math.exp(statistics.median(means))
    if not outside:
        return ratio, 0.0, math.inf
    return ratio, math.exp(means[outside - 1]), math.exp(means[-outside])


def table(changes: Sequence[Change], operator: str, folder: Path) -> Table:
    """A table of the changes."""
    made = Table(title=f"{operator}, against {folder}", box=SIMPLE)
    made.add_column("size", justify="right")
    for column in ("contender", "direction"):
        made.add_column(column)
    for column in ("new / old", "interval"):
        made.add_column(column, justify="right")
    made.add_column("verdict")
    for change in changes:
        style = "red" if change.verdict == "slower" else None
        bounds = f"{change.low:.3f}-{change.high:.3f}"
        made.add_row(str(change.size), change.contender, change.way, f"{change.ratio:.3f}",
                     bounds, change.verdict, style=style)  # fmt: skip
    return made
