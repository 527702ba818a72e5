"""Drawing charts: a line for each contender against the size, on logarithmic axes, and maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from hoconv.files import replaced
from hoconv.tools.benchmarking.measurement import OUT_OF_MEMORY
from hoconv.tools.commands import hardware

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = (
    "#777777", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#F0E442"
)  # fmt: skip
MARKERS = "os^Dv*PX"


def grid(rows: int, columns: int) -> tuple[Figure, Any]:
    """Makes a figure; returns it and an array of its panels, by row and column."""
    figure = Figure(figsize=(5.5 * columns, 1 + 4 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, sharey=True, squeeze=False)


def lines(
    panel: Axes,
    rows: Sequence[dict[str, Any]],
    value: Callable[[dict[str, Any]], Any],
) -> None:
    """Draws a line for each contender: `value` of its rows against their size, where not None."""
    for i, contender in enumerate(dict.fromkeys(row["contender"] for row in rows)):
        points = {row["size"]: value(row) for row in rows
                  if row["contender"] == contender and value(row) is not None}  # fmt: skip
        panel.plot([*points], [*points.values()], label=contender,
                   color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)])  # fmt: skip


def sizes_axis(panel: Axes, rows: Sequence[dict[str, Any]], label: str) -> None:
    """Makes both axes logarithmic, with a tick at every size of the rows."""
    sizes = sorted({row["size"] for row in rows})
    panel.set(xscale="log", yscale="log", xlabel=label)
    panel.set_xticks(sizes, labels=[str(size) for size in sizes])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter("{x:g}")
    panel.grid(which="major", color="0.85")
    panel.tick_params(labelleft=True)


def save(figure: Figure, title: str, path: Path, columns: int = 6) -> None:
    """Adds the title and one legend for all panels, in `columns` columns; writes a PNG, and
    prints its path."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(title)
    with replaced(path) as file:
        figure.savefig(file, format="png", dpi=150)
    print(path)


def draw(measured: dict[str, Any], path: Path) -> None:
    """Draws what ``hoconv benchmark`` measured against the size, forward and backward, as a PNG."""
    rows = measured["rows"]
    figure, panels = grid(1, 2)
    for panel, direction in zip(panels[0], ("forward", "backward"), strict=True):
        lines(panel, rows, lambda row, key=direction: row[key] and row[key]["median_ms"])
        floors = {row["size"]: row[direction]["floor_ms"] for row in rows if row[direction]}
        panel.plot([*floors], [*floors.values()], "k.--", label="floor")
        panel.set_title(direction)
        sizes_axis(panel, rows, measured["axis"])
    panels[0][0].set_ylabel("time of a call, ms")
    versions = f"{measured['dtype']}, torch {measured['environment']['torch']}"
    save(figure, f"{measured['operator']}: {hardware(measured)}, {versions}", path)


def draw_map(measured: dict[str, Any], path: Path) -> None:
    """Draws what ``hoconv benchmark --grid`` measured: for every call the share of the floor that
    the last contender reaches, and how many times as fast as the first it is, as a PNG. Where there
    is no time it says why: not timed, wrong, or failed."""
    rows = measured["rows"]
    last = rows[-1]["contender"]  # the first is not timed for every call
    first = next((row["contender"] for row in rows if row["contender"] != last), last)
    directions = "forward", "backward"
    found = {(row["size"], row["contender"]): row for row in rows}
    calls = [*dict.fromkeys(row["size"] for row in rows)]
    shares: list[list[float | str]] = []
    ratios: list[list[float | str]] = []
    for call in calls:
        own, peer = found[call, last], found.get((call, first), {"error": "not timed"})
        no_share = _no_time(own)
        no_ratio = no_share or _no_time(peer)
        shares.append([no_share or own[way]["share_of_floor"] for way in directions])
        ratios.append([
            no_ratio or peer[way]["median_ms"] / own[way]["median_ms"] for way in directions
        ])  # fmt: skip
    figure = Figure(figsize=(9, 1.5 + 0.26 * len(calls)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _fill(left, shares, "{:.0%}", "share of the floor", "YlGn", Normalize(0, 1))
    faster = f"times as fast as\n{first}"
    _fill(right, ratios, "{:.2g}", faster, "RdYlGn", LogNorm(0.1, 10))
    left.set_yticks(range(len(calls)), labels=calls)
    versions = f"{measured['dtype']}, torch {measured['environment']['torch']}"
    figure.suptitle(f"{measured['operator']}, {last}: {hardware(measured)}, {versions}")
    with replaced(path) as file:
        figure.savefig(file, format="png", dpi=150)
    print(path)


def _no_time(row: dict[str, Any]) -> str:
    """Returns, in a word or two, why a row has no times; "" where it has."""
    error = row["error"] or ""
    known = (why for why in ("wrong", OUT_OF_MEMORY, "not timed") if error.startswith(why))
    return next(known, error and "failed")


def _fill(
    panel: Axes, values: list[list[float | str]], text: str, title: str, colours: str,
    scale: Normalize,
) -> None:  # fmt: skip
    numbers = [[math.nan if isinstance(value, str) else value for value in row] for row in values]
    panel.imshow(numbers, cmap=colours, norm=scale, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            label = value if isinstance(value, str) else text.format(value)
            panel.text(x, y, label, ha="center", va="center", fontsize=8)
    panel.set_title(title)
    panel.set_xticks((0, 1), labels=("forward", "backward"))
