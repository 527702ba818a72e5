"""The end of a sweep: one table of its jobs, sweep.json, and loss curves in sweep.png."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from matplotlib.figure import Figure
from omegaconf import DictConfig
from rich.table import Table

from hoconv.report.runs import Run, read, varied
from training import console, disk


class SweepTable(Callback):
    """A Hydra callback: prints, at the end of a sweep, a row for each job with what was varied.

    The process exits with 1 where a job did not finish.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        jobs = [_job(path) for path in sorted(folder.glob("[!.]*/"), key=_order)]
        if not jobs:
            return
        rows = [_row(number, job) for number, job in enumerate(jobs)]
        names = varied([row["overrides"] for row in rows])
        metrics = dict.fromkeys(name for row in rows for name in row if name.startswith("test/"))
        table = Table(*names, "status", title="Sweep")
        for column in (*metrics, "samples/s"):
            table.add_column(column, justify="right")
        for row in rows:
            values = [str(row["overrides"].get(name, "")) for name in names]
            measured = (_shown(row.get(name)) for name in (*metrics, "samples/s"))
            table.add_row(*values, row["status"], *measured)
        console.stdout().print(table)
        disk.attempt(folder / "sweep.json", lambda: _write(rows, folder / "sweep.json"))
        disk.attempt(folder / "sweep.png", lambda: _draw(jobs, names, rows, folder / "sweep.png"))
        disk.settle()
        console.stdout().print(f"{'sweep':<12}{folder}", soft_wrap=True, highlight=False)
        missed = [row for row in rows if row["status"] != "finished"]
        for row in missed:
            console.show_problem(f"Job {row['number']}", row["error"] or row["status"])
        if missed:
            sys.exit(1)


def _order(folder: Path) -> tuple[int, str]:
    """By the number that Hydra puts in front of the name."""
    digits = re.match(r"\d*", folder.name)
    return int(digits[0] or 0) if digits else 0, folder.name


def _job(folder: Path) -> Run:
    """Reads a job's folder; a job that cannot be read counts as not finished."""
    try:
        return read(folder)
    except (OSError, KeyError, TypeError, ValueError) as error:
        nothing = {"metrics": {}, "throughput": {"samples_per_sec": None}, "overrides": []}
        reason = f"{folder / 'results.json'} or losses.csv beside it cannot be read ({error})"
        return Run(folder, {**nothing, "status": "unknown", "error": reason})


def _row(number: int, job: Run) -> dict[str, Any]:
    metrics = job.results["metrics"].items()
    return {
        "number": number,
        "overrides": dict(t.split("=", 1) for t in job.results["overrides"] if "=" in t),
        "status": job.results["status"],
        "error": job.results.get("error"),
        **{name: value for name, value in metrics if name.startswith("test/")},
        "samples/s": job.results["throughput"]["samples_per_sec"],
    }


def _shown(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value or "")


def _draw(jobs: list[Run], names: list[str], rows: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    for job, row in zip(jobs, rows, strict=True):
        label = " ".join(str(row["overrides"].get(name, "")) for name in names)
        panel.plot(*job.curve(), label=label)
    panel.set(xlabel="step", ylabel="training loss", yscale="log")
    panel.legend(fontsize="small")
    with disk.replaced(path) as file:
        figure.savefig(file, format="png", dpi=150)


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    with disk.replaced(path) as file:
        file.write((json.dumps(rows, indent=2) + "\n").encode())
