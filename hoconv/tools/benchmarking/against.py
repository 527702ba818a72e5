"""Compares a record of ``hoconv benchmark`` with an earlier one: what became slower.

A process gives one number for a size, an implementation and a direction, the median of a call's
time over that of reading a buffer in the same turn, and the two records' numbers are compared by
the test of Mann and Whitney, which assumes nothing about their distribution. Its level is divided
by the number of comparisons: of all pairs of records of equal code, at most the share
`FALSE_ALARMS` finds anything slower, if the machine was equally busy for both.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.table import Table

from hoconv.tools.benchmarking.processes import WAYS
from hoconv.tools.commands import hardware

FALSE_ALARMS = 0.01
SLOWDOWN = 1.05  # new / old, which an interval has to exclude for code to count as not slower


class Change(NamedTuple):
    """The change of one implementation, at one size, in one direction.

    Attributes:
        ratio: of the new medians of the processes to the old ones; above 1, it is slower.
        low, high: the ratio's interval, of Hodges and Lehmann, at the level of the test.
    """

    size: Any
    contender: str
    way: str
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.low > 1:
            return "slower"
        if self.high < 1:
            return "faster"
        return "not slower" if self.high < SLOWDOWN else "unclear"


def earlier(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a record that a run can be compared with.

    Args:
        wanted: the run's operator, device, dtype, hardware and sizes.

    Raises:
        ValueError: it is no such record; says what differs.
    """
    try:
        record = json.loads(path.read_text())
        sizes = [*dict.fromkeys(row["size"] for row in record["rows"])]
        found = record | {"hardware": hardware(record), "sizes": sizes}
        rows = record.get("per_read", [])
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no record of hoconv benchmark") from error
    for fact, value in wanted.items():
        if found[fact] != value:
            raise ValueError(f"{path} has {fact} {found[fact]}, this run has {value}")
    needed = fewest_processes(len(WAYS) * len(rows))
    if processes(record) < needed:
        raise ValueError(
            f"{path} has times of {processes(record)} processes, a comparison takes {needed}; "
            f"measure it again with --processes {needed}"
        )
    return record


def processes(record: dict[str, Any]) -> int:
    """Returns how many processes a record has times of."""
    return max((len(row[way]) for row in record.get("per_read", []) for way in WAYS), default=0)


def fewest_processes(comparisons: int) -> int:
    """Returns of how many processes each record needs times, so that so many comparisons can find
    anything at all."""
    return next(n for n in itertools.count(1)
                if math.comb(2 * n, n) * FALSE_ALARMS >= max(1, comparisons))  # fmt: skip


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Compares what both records have."""
    before = {(row["size"], row["contender"]): row for row in old["per_read"]}
    pairs = [(row, before[key], way) for row in new["per_read"] for way in WAYS
             if (key := (row["size"], row["contender"])) in before]  # fmt: skip
    return [
        Change(row["size"], row["contender"], way,
               *_ratio(earlier[way], row[way], FALSE_ALARMS / len(pairs)))
        for row, earlier, way in pairs
    ]  # fmt: skip


def table(changes: Sequence[Change], old: dict[str, Any]) -> Table:
    """A table of the changes."""
    title = f"{old['operator']}, against {old['date']}\ncommit {old['environment']['commit']}"
    made = Table(title=title, box=SIMPLE)
    made.add_column("size", justify="right")
    for column in ("contender", "direction"):
        made.add_column(column)
    for column in ("new / old", "interval"):
        made.add_column(column, justify="right")
    made.add_column("verdict")
    for change in changes:
        style = "red" if change.verdict == "slower" else None
        interval = f"{change.low:.3f}-{change.high:.3f}"
        made.add_row(str(change.size), change.contender, change.way, f"{change.ratio:.3f}",
                     interval, change.verdict, style=style)  # fmt: skip
    return made


def _ratio(old: Sequence[float], new: Sequence[float], level: float) -> tuple[float, float, float]:
    """Returns the median of all ratios of a new to an old number, and its interval; each end is
    wrong in the share `level` of comparisons at most."""
    ratios = sorted(after / before for after in new for before in old)
    if not ratios:
        return math.nan, 0.0, math.inf
    outside, likely = 0, 1  # ratios beyond an end; of the orders of all numbers
    allowed = level * math.comb(len(old) + len(new), len(old))
    while likely <= allowed:
        outside += 1
        likely += _orders(len(old), len(new), outside)
    low, high = (ratios[outside - 1], ratios[-outside]) if outside else (0.0, math.inf)
    return statistics.median(ratios), low, high


@functools.cache
def _orders(old: int, new: int, inverted: int) -> int:
    """Returns in how many orders of so many old and new numbers there are so many pairs of a new
    number that is before an old one."""
    if inverted < 0:
        return 0
    if not old or not new:
        return int(inverted == 0)
    # The last number of all is an old one, which all new ones are before, or a new one.
    return _orders(old - 1, new, inverted - new) + _orders(old, new - 1, inverted)
