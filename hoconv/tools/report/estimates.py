"""Means over seeds with their confidence intervals, ratios of runs that belong together, Amdahl."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import TypedDict

CONFIDENCE = 0.95
LEAST_VALUES = 3  # of an interval: that of two values is thirteen times as wide as they differ


class Estimate(TypedDict):
    """A mean; half of its confidence interval, None of too few values; and of how many values."""

    mean: float | None
    ci95: float | None
    n: int


def estimate(values: Iterable[float]) -> Estimate:
    """Returns the mean of independent values, and half of its interval by Student's t, which takes
    `LEAST_VALUES`."""
    from scipy.stats import t  # a second to import, which a run that only reads need not pay

    values = list(values)
    n = len(values)
    if not n:
        return {"mean": None, "ci95": None, "n": 0}
    mean = statistics.fmean(values)
    if n < LEAST_VALUES:
        return {"mean": mean, "ci95": None, "n": n}
    quantile = float(t.ppf((1 + CONFIDENCE) / 2, n - 1))
    return {"mean": mean, "ci95": quantile * statistics.stdev(values) / math.sqrt(n), "n": n}


def ratios(old: Mapping[int, float], new: Mapping[int, float]) -> list[float]:
    """Returns old / new for each key, a seed, that both have: how many times as fast `new` is."""
    return [old[seed] / new[seed] for seed in sorted(old.keys() & new.keys()) if new[seed] > 0]


def differences(old: Mapping[int, float], new: Mapping[int, float]) -> list[float]:
    """Returns new - old for each key, a seed, that both have."""
    return [new[seed] - old[seed] for seed in sorted(old.keys() & new.keys())]


def amdahl(share: float, speedup: float) -> float:
    """Returns how many times as fast a step gets if a part of it gets `speedup` times as fast.

    Args:
        share: of the part in the step's time, 0 ... 1.
        speedup: of the part; ``math.inf`` gives the limit.
    """
    left = 1 - share + share / speedup
    return 1 / left if left > 0 else math.inf


def holds(value: Estimate, wanted: float) -> bool | None:
    """Returns whether an interval holds a number; None where there is no interval."""
    if value["mean"] is None or value["ci95"] is None:
        return None
    return abs(wanted - value["mean"]) <= value["ci95"]


def shown(value: Estimate, form: str | None = None) -> str:
    """A mean, and half of its interval where there is one, to the same digit.

    Args:
        form: of the mean; by default, three digits.
    """
    mean, half = value["mean"], value["ci95"]
    if mean is None:
        return ""
    if form is None:
        digits = 2 - math.floor(math.log10(abs(mean))) if mean else 0
        form = f"{{:,.{max(0, digits)}f}}"
    text = form.format(mean)
    return text if half is None else f"{text} ± {form.replace('+', '').format(half)}"
