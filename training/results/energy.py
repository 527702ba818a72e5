"""A chart of a metric of the test against the energy of a sample's multiplications."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Point(NamedTuple):
    """Runs that differ only in the seed.

    Attributes:
        label: of what they have in common.
        energy: of all multiplications of a sample but `unknown`, in pJ.
        unknown: how many multiplications have an unknown energy.
        scores: the metric of each.
    """

    label: str
    energy: float
    unknown: int
    scores: Sequence[float]


def comparable(points: Sequence[Point]) -> list[Point]:
    """Returns those whose energies leave out the fewest multiplications: only these are energies of
    the same."""
    least = min((point.unknown for point in points), default=0)
    return [point for point in points if point.unknown == least]


def draw(points: Sequence[Point], metric: str, rises: bool) -> Figure:
    """Draws the mean of each, from the least to the greatest score, and a line through those of
    which none is better at less energy.

    Args:
        points: comparable ones.
        metric: its name.
        rises: whether more of it is better.
    """
    from matplotlib.ticker import EngFormatter

    from hoconv.tools.benchmarking.charts import COLOURS, grid

    figure, ((panel,),) = grid(1, 1)
    front: list[tuple[float, float]] = []
    energies = [point.energy for point in points]
    middle = (min(energies) + max(energies)) / 2
    for point in sorted(points, key=lambda point: point.energy):
        joules, mean = point.energy * 1e-12, statistics.fmean(point.scores)
        span = [[mean - min(point.scores)], [max(point.scores) - mean]]
        panel.errorbar([joules], [mean], span, fmt="o", color=COLOURS[5], capsize=3)
        side = "right" if point.energy > middle else "left"  # inside the panel
        label = panel.annotate(
            point.label, (joules, mean), (-4 if side == "right" else 4, 4), fontsize=8, ha=side,
            textcoords="offset points",
        )  # fmt: skip
        label.set_in_layout(False)  # a long one would leave no room for the panel
        if not front or (mean > front[-1][1] if rises else mean < front[-1][1]):
            front.append((joules, mean))
    panel.plot(*zip(*front), color=COLOURS[0], drawstyle="steps-post", zorder=0)
    left_out = f"\nwithout {points[0].unknown:,} of unknown energy" if points[0].unknown else ""
    panel.set(xlabel=f"energy of the multiplications of a sample{left_out}", ylabel=metric)
    panel.xaxis.set_major_formatter(EngFormatter(unit="J"))
    panel.margins(0.15)
    panel.grid(color="0.85")
    return figure
