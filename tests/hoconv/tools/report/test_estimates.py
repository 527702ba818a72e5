"""The arithmetic of a report, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from hoconv.tools.report.estimates import amdahl, differences, estimate, holds, ratios


def test_the_interval_is_that_of_students_t() -> None:
    # 2, 4 and 6: mean 4, deviation 2; t is 4.303 for two degrees of freedom.
    found = estimate([2.0, 4.0, 6.0])
    assert found["mean"] == 4
    assert found["ci95"] == pytest.approx(4.3027 * 2 / math.sqrt(3), rel=1e-4)
    # 1, 2, 3 and 6: deviation 2.1602; t is 3.182 for three.
    found = estimate([1.0, 2.0, 3.0, 6.0])
    assert found["ci95"] == pytest.approx(3.1824 * 2.1602 / 2, rel=1e-4)


def test_too_few_values_have_no_interval() -> None:
    assert estimate([]) == {"mean": None, "ci95": None, "n": 0}
    assert estimate([7.0]) == {"mean": 7.0, "ci95": None, "n": 1}
    assert estimate([7.0, 8.0]) == {"mean": 7.5, "ci95": None, "n": 2}


def test_values_of_one_seed_belong_together() -> None:
    old, new = {0: 10.0, 1: 20.0, 2: 30.0}, {2: 10.0, 0: 5.0, 9: 1.0}
    assert ratios(old, new) == [2.0, 3.0]
    assert differences(old, new) == [-5.0, -20.0]
    # Paired by seed the ratios agree exactly, whatever seeds differ by among themselves.
    old, new = {0: 1.0, 1: 100.0, 2: 9.0}, {0: 0.5, 1: 50.0, 2: 4.5}
    assert estimate(ratios(old, new)) == {"mean": 2.0, "ci95": 0.0, "n": 3}


@pytest.mark.parametrize(
    ("share", "speedup", "step"),
    [
        (0.5, 2.0, 4 / 3),  # half of the step takes half of its time: 1 / (0.5 + 0.25)
        (0.75, 4.0, 1 / (0.25 + 0.1875)),
        (0.8, math.inf, 5.0),  # the limit
        (0.8, 1.0, 1.0),
        (0.0, 10.0, 1.0),
        (1.0, 3.0, 3.0),
        (1.0, math.inf, math.inf),
        (0.5, 0.5, 1 / 1.5),  # a slower operator
    ],
)
def test_amdahl(share: float, speedup: float, step: float) -> None:
    assert amdahl(share, speedup) == pytest.approx(step)


def test_whether_an_interval_holds_a_number() -> None:
    value = {"mean": 2.0, "ci95": 0.5, "n": 3}
    assert [holds(value, x) for x in (1.4, 1.5, 2.5, 2.6)] == [False, True, True, False]  # pyright: ignore
    assert holds(estimate([2.0]), 2.0) is None
