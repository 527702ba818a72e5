"""The end of a sweep: a table of its jobs, sweep.json, and their loss curves in sweep.png, means of
jobs that differ only in the seed; energy.png where multipliers' energies are known."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.table import Table

from hoconv.tools.report.groups import Group, group
from hoconv.tools.report.losses import draw
from hoconv.tools.report.runs import Run, read, varied
from hoconv.tools.tables import print_table
from training import console, disk
from training.configuration.checks import plain_errors
from training.configuration.direction import check_directions
from training.configuration.errors import MisconfigurationException
from training.results import energy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIGITS = 6  # significant, of a number in the table
COSTS = {  # of a sample of an approximate network: columns, and the names in results.json
    "multiplications": "multiplications", "of unknown energy": "unknown", "energy, pJ": "energy_pj",
}  # fmt: skip
MEASURED = {  # the columns of every sweep, and the names in results.json
    "ms per step": "step_ms", "samples/s": "samples_per_sec", "memory, MB": "peak_memory_mb",
}  # fmt: skip


class SweepTable(Callback):
    """A Hydra callback: prints, at the end of a sweep, a row for each job with what was varied.

    The process exits with 1 where a job did not finish, unless it was skipped; and before the first
    one where it is not known which way the objective improves.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        sweeper = config.hydra.sweeper
        try:
            with plain_errors():
                check_directions(config, sweeper)
            _require_same_direction(sweeper, config.direction)
        except MisconfigurationException as error:
            console.show_problem("Error", str(error))
            sys.exit(1)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        jobs = [_job(path) for path in sorted(folder.glob("[!.]*/"), key=_order)]
        if not jobs:
            return
        objective = str(config.objective)
        rows = [_row(number, job, objective) for number, job in enumerate(jobs)]
        names = [name for name in varied([row["overrides"] for row in rows]) if name != "resume"]
        best = _best(rows, objective, config.direction)
        print_table(console.stdout(), _table(rows, names, objective, best))
        disk.attempt(folder / "sweep.json", lambda: _write(rows, folder / "sweep.json"))
        groups = group(job for job in jobs if job.results["status"] == "finished")
        disk.attempt(folder / "sweep.png", lambda: _draw(groups, folder / "sweep.png"))
        tested = objective.replace("val/", "test/")
        points, left_out = _points(groups, tested)
        if points:
            chart = energy.draw(points, tested, config.direction == "maximize")
            disk.attempt(folder / "energy.png", lambda: _save(chart, folder / "energy.png"))
            if left_out:
                console.warn(f"energy.png leaves out {', '.join(left_out)}, where the energy of "
                             "more multiplications is unknown")  # fmt: skip
        disk.settle()
        console.stdout().print(f"{'sweep':<12}{folder}", soft_wrap=True, highlight=False)
        numbers: dict[tuple[str, str], list[int]] = {}
        for row in rows:
            if row["status"] != "finished":
                reason = row["error"] or row["status"]
                numbers.setdefault((row["status"], reason), []).append(row["number"])
        for (status, reason), of in numbers.items():
            which = f"Job{'s' if len(of) > 1 else ''} {', '.join(map(str, of))}"
            if status == "skipped":
                console.warn(f"{which} skipped: {reason}")
            else:
                console.show_problem(which, reason)
        if any(status != "skipped" for status, _ in numbers):
            sys.exit(1)


def _require_same_direction(sweeper: DictConfig, direction: str) -> None:
    """Raises where a search continues one of the other direction, which Optuna would keep."""
    if not sweeper.get("storage") or not sweeper.get("study_name"):
        return
    import optuna

    try:
        before = optuna.load_study(sweeper.study_name, sweeper.storage).direction.name.lower()
    except KeyError:  # a new search
        return
    if before != direction:
        raise MisconfigurationException(
            f"hydra.sweeper.storage: the search in {sweeper.storage} is to {before}, and this one "
            f"to {direction} its objective; begin another one"
        )


def _best(rows: list[dict[str, Any]], objective: str, direction: str) -> int | None:
    """The number of the finished job with the best value of the objective; None where fewer than
    two have one, which is a number."""
    found = {
        row["number"]: row[objective]
        for row in rows
        if row["status"] == "finished" and isinstance(row.get(objective), float)
    }
    found = {number: value for number, value in found.items() if math.isfinite(value)}
    if len(found) < 2:
        return None
    return (min if direction == "minimize" else max)(found, key=lambda number: found[number])


def _table(rows: list[dict[str, Any]], names: list[str], objective: str, best: int | None) -> Table:
    metrics = dict.fromkeys(name for row in rows for name in row if name.startswith("test/"))
    if any(objective in row for row in rows):
        metrics = {objective: None} | metrics
    costs = [name for name in COSTS if any(row.get(name) for row in rows)]
    measured = (*metrics, *costs, *MEASURED)
    headings = _headings(names)
    table = Table("job", *headings, "status", title=f"Sweep (* the best {objective})")
    for column in measured:
        table.add_column(column, justify="right")
    for row in rows:
        mark = "*" if row["number"] == best else ""
        values = [_shorter(str(row["overrides"].get(name, ""))) for name in names]
        unknown = {name: "unknown" for name in costs if name in row and row[name] is None}
        shown = (unknown.get(name, _shown(row.get(name))) for name in measured)
        style = "bold" if mark else ""
        table.add_row(f"{row['number']}{mark}", *values, row["status"], *shown, style=style)
    return table


def _headings(names: list[str]) -> list[str]:
    """The last parts of names, where they differ; else the names."""
    last = [name.rpartition(".")[2] for name in names]
    return [name if last.count(end) > 1 else end for name, end in zip(names, last)]


def _points(groups: list[Group], metric: str) -> tuple[list[energy.Point], list[str]]:
    """Returns groups of jobs whose energy is known, and the same part of it; and the labels of the
    others."""
    found, labels = [], []
    for each in groups:
        scores = [*each.metric(metric).values()]
        cost = next((run.results.get("cost") for run in each.finished()), None)
        if not scores or not cost:
            continue
        labels.append(" ".join(Path(value).name for value in each.settings.values()) or each.label)
        if cost["energy_pj"] is not None:
            found.append(energy.Point(labels[-1], cost["energy_pj"], cost["unknown"], scores))
    shown = energy.comparable(found)
    return shown, [label for label in labels if label not in {point.label for point in shown}]


def _order(folder: Path) -> tuple[int, str]:
    """By the number that Hydra puts in front of the name."""
    digits = re.match(r"\d*", folder.name)
    return int(digits[0] or 0) if digits else 0, folder.name


def _job(folder: Path) -> Run:
    """Reads a job's folder; a job that cannot be read counts as not finished."""
    try:
        return read(folder)
    except (OSError, KeyError, TypeError, ValueError) as error:
        nothing = {"metrics": {}, "throughput": {}, "overrides": []}
        reason = f"{folder / 'results.json'} or losses.csv beside it cannot be read ({error})"
        return Run(folder, {**nothing, "status": "unknown", "error": reason})


def _row(number: int, job: Run, objective: str) -> dict[str, Any]:
    metrics = job.results["metrics"].items()
    throughput = job.results["throughput"]
    cost = job.results.get("cost", {})
    return {
        "number": number,
        "overrides": job.overrides,
        "status": job.results["status"],
        "error": job.results.get("error"),
        **{name: value for name, value in metrics if name.startswith("test/") or name == objective},
        **{heading: cost[name] for heading, name in COSTS.items() if cost},
        **{heading: throughput.get(name) for heading, name in MEASURED.items()},
    }


def _shown(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value or "")


def _shorter(text: str) -> str:
    """A number that a search drew has 17 digits."""
    try:
        return min(text, f"{float(text):.{DIGITS}g}", key=len) if "." in text else text
    except ValueError:
        return text


def _draw(groups: list[Group], path: Path) -> None:
    figure = draw(groups)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize="small")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    with disk.replaced(path) as file:
        figure.savefig(file, format="png", dpi=150)


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    with disk.replaced(path) as file:
        file.write((json.dumps(rows, indent=2) + "\n").encode())
