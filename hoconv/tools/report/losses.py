"""Loss curves of groups of runs, and a chart of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hoconv.tools.report.groups import Group

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curve(each: Group) -> dict[str, Any]:
    """Returns the training loss: mean, least and greatest over the runs; None where not finite."""
    curves = [run.curve() for run in each.finished() if run.losses]
    times = each.throughput("step_ms").values()
    step_ms = statistics.fmean(times) if times else None
    steps = min((steps for steps, _ in curves), key=len, default=[])
    points = []
    for i, step in enumerate(steps):
        values = [losses[i] for _, losses in curves]
        finite = all(map(math.isfinite, values))
        points.append({
            "step": step,
            "seconds": None if step_ms is None else step * step_ms / 1000,
            "mean": statistics.fmean(values) if finite else None,
            "low": min(values) if finite else None,
            "high": max(values) if finite else None,
        })  # fmt: skip
    return {"label": each.label, "points": points}


def draw(groups: Sequence[Group]) -> Figure:
    """Draws the training loss of groups against steps and against time."""
    from matplotlib.figure import Figure

    from hoconv.tools.benchmarking.charts import COLOURS

    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for i, each in enumerate(groups):
        found = curve(each)
        for panel, against in zip(panels, ("step", "seconds")):
            rows = [[row[key] for key in (against, "mean", "low", "high")]
                    for row in found["points"] if row[against] is not None]  # fmt: skip
            if rows:
                x, mean, *band = ([math.nan if v is None else v for v in column]
                                  for column in zip(*rows))  # fmt: skip
                colour = COLOURS[i % len(COLOURS)]
                panel.plot(x, mean, color=colour, label=each.label)
                panel.fill_between(x, *band, color=colour, alpha=0.2)
    panels[0].set(xlabel="step", ylabel="training loss", yscale="log")
    panels[1].set(xlabel="seconds of training")
    return figure
