"""What a sweep ends with: one table of its jobs, sweep.json, and their loss curves in sweep.png."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from reporting import console
from reporting.runs import Run, read, varied


class SweepTable(Callback):
    """A hook of Hydra: at the end of a sweep, a row for each job with what was varied.

    The process exits with 1 where a job did not finish.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        jobs = {_number(path.parent): read(path.parent) for path in folder.glob("*/results.json")}
        jobs = dict(sorted(jobs.items()))
        if not jobs:
            return
        rows = [_row(number, job) for number, job in jobs.items()]
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
        (folder / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n")
        _draw(list(jobs.values()), names, rows, folder / "sweep.png")
        console.stdout().print(f"{'sweep':<12}{folder}", soft_wrap=True, highlight=False)
        missed = [row for row in rows if row["status"] != "finished"]
        for row in missed:
            console.show_problem(f"Job {row['number']}", row["error"] or row["status"])
        if missed:
            sys.exit(1)


def _number(folder: Path) -> int:
    return OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra.job.num


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
    figure.savefig(path, dpi=150)
