"""Tables and charts of the measurements of scripts/benchmarks/library/recurrent.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from hoconv.tools.benchmarking.charts import COLOURS, grid, save
from hoconv.tools.commands import hardware

PHASES = {"forward": "forward", "forward_backward": "forward and backward"}


def latency_table(measured: dict[str, Any]) -> Table:
    found = Table("", title=f"seconds of a call, {hardware(measured)}", box=SIMPLE)
    states = measured["seconds"]
    for state in states:
        found.add_column(state, justify="right")
    for call in next(iter(states.values())):
        found.add_row(call, *(f"{times[call]:.3g}" for times in states.values()))
    return found


def table(measured: dict[str, Any]) -> Table:
    title = f"recurrent, {measured['section']}, {hardware(measured)}"
    names = [*"TBH", *(name for name in ("heads", "keys") if name in measured["rows"][0])]
    columns = "cell", ", ".join(names), "layers", "precision", "contender"
    found = Table(*columns, title=title, box=SIMPLE)
    for phase in ("forward", "both"):
        for column in (f"{phase}\nms", "baseline\n/ this"):
            found.add_column(column, justify="right")
    cold = next((row["cold"] for row in measured["rows"] if row["cold"]), {})
    for phase in cold:
        found.add_column(f"cold\n{phase}\nms", justify="right")
    found.add_column("extra\nMiB", justify="right")
    for row in measured["rows"]:
        sizes = ", ".join(str(row[name]) for name in names)
        cells = [row["cell"], sizes, str(row["layers"]), row["precision"], row["contender"]]
        for phase in PHASES:
            cells += [
                f"{row[phase]['median_ms']:.4g}" if row[phase] else "",
                f"{row['speed_up'][phase]:.2f}" if row["speed_up"] else "",
            ]
        cells += [f"{row['cold'][phase]['median_ms']:.4g}" if row["cold"] else "" for phase in cold]
        extra = row["extra_memory_bytes"]
        found.add_row(*cells, "" if extra is None else f"{extra / 2**20:.3g}")
        if row["error"]:
            found.add_row("", "", "", "", f"[red]{row['error']}")
    for mean in measured["geometric_means"]:
        means = [part for phase in PHASES for part in ("", f"{mean[phase]:.2f}")]
        found.add_row(mean["cell"], "mean", "", mean["precision"], mean["contender"], *means)
    return found


def draw_library(measured: dict[str, Any], path: Path) -> None:
    """Draws the speed-up of our layers over PyTorch's, at every shape."""
    rows = [row for row in measured["rows"] if row["contender"] == "ours" and row["speed_up"]]
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    shapes = list(dict.fromkeys((row["T"], row["B"], row["H"]) for row in rows))
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    figure, panels = grid(len(cells), len(PHASES))
    for cell, line in zip(cells, panels, strict=True):
        for panel, (phase, title) in zip(line, PHASES.items(), strict=True):
            for i, precision in enumerate(precisions):
                points = {shapes.index((row["T"], row["B"], row["H"])): row["speed_up"][phase]
                          for row in rows if (row["cell"], row["precision"]) == (cell, precision)
                          }  # fmt: skip
                at = [x + (i - (len(precisions) - 1) / 2) * 0.25 for x in points]
                panel.bar(at, [*points.values()], 0.25, label=precision, color=COLOURS[i + 1])
            panel.axhline(1, color="k", linestyle="--", label="PyTorch")
            panel.set_xticks(range(len(shapes)), labels=["\n".join(map(str, s)) for s in shapes])
            panel.set_title(f"{cell}: {title}")
        line[0].set_ylabel("time of PyTorch's layer / ours")
    for panel in panels[-1]:
        panel.set_xlabel("T, B, H")
    save(figure, _title(measured), path)


def draw_ladder(measured: dict[str, Any], path: Path) -> None:
    """Draws the times of every schedule, a panel for each number of layers."""
    rows = [row for row in measured["rows"] if not row["error"]]
    layers = list(dict.fromkeys(row["layers"] for row in rows))
    figure, panels = grid(1, len(layers))
    for count, panel in zip(layers, panels[0], strict=True):
        here = {row["contender"]: row for row in rows if row["layers"] == count}
        for i, (phase, title) in enumerate(PHASES.items()):
            at = [x + (i - 0.5) * 0.4 for x in range(len(here))]
            bars = panel.bar(at, [row[phase]["median_ms"] for row in here.values()], 0.4,
                             label=title, color=COLOURS[i + 1])  # fmt: skip
            panel.bar_label(bars, fmt="{:.3g}", fontsize=8)
        panel.set_xticks(range(len(here)), labels=[*here])
        panel.set(yscale="log", title=f"{count} layer{'s' * (count > 1)}")
    panels[0][0].set_ylabel("time of a call, ms")
    save(figure, _title(measured), path)


def _title(measured: dict[str, Any]) -> str:
    return f"recurrent: {hardware(measured)}, torch {measured['environment']['torch']}"
