"""Columns of tables: a title, and a cell for each group of runs that are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hoconv.tools.report.estimates import shown

Column = tuple[str, list[str]]


def _share(part: str) -> Callable[[dict[str, Any]], str]:
    def cell(group: dict[str, Any]) -> str:
        share = (group["parts"] or {"shares": {}})["shares"].get(part)
        return "" if share is None else f"{share:.1%}"

    return cell


CELLS: dict[str, Callable[[dict[str, Any]], str]] = {
    "ms per step": lambda group: shown(group["step_ms"]),
    "speed-up": lambda group: shown(group["speedup"], "{:.2f}"),
    "operator": _share("operator"),
    "other": _share("other"),
    "not divided": _share("undivided"),
    "waits for the host": _share("idle"),
    "waits for data": _share("wait"),
    "samples/s": lambda group: shown(group["samples_per_sec"], "{:,.0f}"),
    "epoch, s": lambda group: shown(group["epoch_s"]),
    "memory, MB": lambda group: shown(group["peak_memory_mb"], "{:,.0f}"),
    "GPU busy, at most": lambda group: (
        "" if group["gpu_busy"] is None else f"{group['gpu_busy']:.0%}"
    ),
    "launches a step": lambda group: (
        "1 (CUDA graph)" if group["captured"] else f"{group['launches'] or ''}"
    ),
}


def columns(groups: Sequence[dict[str, Any]], titles: Sequence[str]) -> list[Column]:
    """Returns those of the columns that hold anything."""
    found = [(title, [CELLS[title](group) for group in groups]) for title in titles]
    return [(title, cells) for title, cells in found if any(cells)]


def metric_columns(compared: dict[str, Any]) -> list[Column]:
    """Returns two columns for each metric: the metric, and what it differs from the baseline by."""
    groups = compared["groups"]
    found = []
    for name in metrics(compared):
        values, changes = (
            ["" if (value := group[key].get(name)) is None else shown(value, form)
             for group in groups]
            for key, form in (("metrics", "{:.4f}"), ("differences", "{:+.4f}"))
        )  # fmt: skip
        of_others = [
            "" if group["label"] == group["baseline"] else change
            for group, change in zip(groups, changes, strict=True)
        ]
        found += [(name, values), (f"Δ vs {compared['baseline']}", of_others)]
    return found


def metrics(compared: dict[str, Any]) -> list[str]:
    """Returns the names of the metrics that any group has."""
    return [*dict.fromkeys(name for group in compared["groups"] for name in group["metrics"])]
