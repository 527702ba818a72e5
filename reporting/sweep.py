"""What a sweep ends with: one table of its jobs, sweep.json, and their loss curves in sweep.png."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from reporting import console

METRIC = "test/accuracy"
CURVE_POINTS = 100  # of a loss curve: each the mean of as many steps as it takes


class SweepTable(Callback):
    """A hook of Hydra: at the end of a sweep, a row for each job with what was varied."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        jobs = [_job(path.parent) for path in folder.glob("*/results.json")]
        jobs.sort(key=lambda job: job["number"])
        if not jobs:
            return
        names = dict.fromkeys(name for job in jobs for name in job["overrides"])
        varied = [
            name for name in names if len({str(job["overrides"].get(name)) for job in jobs}) > 1
        ]
        table = Table(*varied, "status", title="Sweep")
        for column in (METRIC, "samples/s"):
            table.add_column(column, justify="right")
        for job in jobs:
            values = [str(job["overrides"].get(name, "")) for name in varied]
            table.add_row(*values, job["status"], *map(_shown, (job[METRIC], job["samples/s"])))
        console.stdout().print(table)
        rows = [{name: job[name] for name in job if name != "losses"} for job in jobs]
        (folder / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n")
        _draw(jobs, varied, folder / "sweep.png")
        console.stdout().print(f"{'sweep':<12}{folder}", soft_wrap=True, highlight=False)


def _job(folder: Path) -> dict[str, Any]:
    results = json.loads((folder / "results.json").read_text())
    hydra = OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra
    overrides = dict(text.split("=", 1) for text in hydra.overrides.task if "=" in text)
    losses = []
    if (folder / "losses.csv").exists():
        with (folder / "losses.csv").open() as file:
            losses = [float(row["loss"]) for row in csv.DictReader(file)]
    return {
        "number": hydra.job.num,
        "overrides": overrides,
        "status": results["status"],
        METRIC: results["metrics"].get(METRIC),
        "samples/s": results["throughput"]["samples_per_sec"],
        "losses": losses,
    }


def _shown(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value or "")


def _draw(jobs: list[dict[str, Any]], varied: list[str], path: Path) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    for job in jobs:
        losses = job["losses"]
        step = max(1, len(losses) // CURVE_POINTS)
        groups = [losses[i : i + step] for i in range(0, len(losses), step)]
        label = " ".join(str(job["overrides"].get(name, "")) for name in varied)
        panel.plot([step * i for i in range(len(groups))], [sum(g) / len(g) for g in groups],
                   label=label)  # fmt: skip
    panel.set(xlabel="step", ylabel="training loss", yscale="log")
    panel.legend(fontsize="small")
    figure.savefig(path, dpi=150)
