"""Reading training runs: a results.json, with a losses.csv and a metrics.csv if they are there, or
the metrics.csv of Lightning's CSVLogger alone."""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hoconv.dispatch.implementations import impl_label

CURVE_POINTS = 100  # about so many points make a loss curve; each is a mean over steps
NO_SETTING = ("seed", "resume", "logger")  # overrides in which runs of one group may differ
RESULTS = "results.json"
THROUGHPUT = ("samples_per_sec", "step_ms", "data_wait_fraction", "peak_memory_mb")


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        folder: in which it lies; the file itself where that is not a results.json.
        results: the contents of its results.json.
        losses: step -> loss, of the steps that were recorded; not finite where the loss was not.
        epoch_steps: training steps of an epoch; None where no file says so.
    """

    folder: Path
    results: dict[str, Any]
    losses: dict[int, float] = field(default_factory=dict)
    epoch_steps: float | None = None

    @property
    def overrides(self) -> dict[str, str]:
        return dict(text.split("=", 1) for text in self.results["overrides"] if "=" in text)

    @property
    def settings(self) -> dict[str, str]:
        """The overrides, model, data and implementation: name -> value."""
        named = {name: str(self.results.get(name, "")) for name in ("data", "model")}
        named["impl"] = impl_label(self.results["impl"])
        return {k: v for k, v in (self.overrides | named).items() if k not in NO_SETTING}

    @property
    def gpu(self) -> str | None:
        """The name of the GPU that it used; None of a run on a CPU."""
        on_cpu = "cpu" in (self.settings.get("trainer"), self.settings.get("trainer.accelerator"))
        return None if on_cpu else self.results.get("environment", {}).get("gpu")

    @property
    def dtype(self) -> str:
        """In which it computed most of its products."""
        mixed = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}
        return mixed.get(self.settings.get("trainer.precision", ""), "float32")

    def problems(self) -> list[str]:
        """Says what is wrong with it: why it did not finish, and what is not finite."""
        found = [str(self.results["error"])] if self.results.get("error") else []
        for name, value in self.results.get("metrics", {}).items():
            if not math.isfinite(float(value)):
                found.append(f"{name} is {value}")
        step = next((step for step, loss in self.losses.items() if not math.isfinite(loss)), None)
        if step is not None:
            found.append(f"the loss of step {step} is {self.losses[step]}")
        return found

    def curve(self) -> tuple[list[int], list[float]]:
        """Returns about `CURVE_POINTS` steps, and the mean loss from each to the next."""
        size = max(1, len(self.losses) // CURVE_POINTS)
        starts = range(0, len(self.losses), size)
        steps, losses = [*self.losses], [*self.losses.values()]
        return [steps[i] for i in starts], [statistics.fmean(losses[i : i + size]) for i in starts]


def read(path: Path) -> Run:
    """Reads the run in a folder, or of one file that has the contents of a results.json.

    Raises:
        OSError, ValueError: there is no such file, or it cannot be read.
    """
    folder = path if path.is_dir() else path.parent if path.name == RESULTS else None
    results = json.loads((folder / RESULTS if folder else path).read_text())
    if not isinstance(results, dict):
        raise ValueError(f"{path}: expected an object, got {type(results).__name__}")
    results = {"overrides": []} | results
    if folder is None:
        return Run(path, results)
    rows = map(_numbers, _rows(folder / "losses.csv"))
    losses = {int(row["step"]): row["loss"] for row in rows if {"step", "loss"} <= row.keys()}
    return Run(folder, results, losses, _epoch_steps(_rows(folder / "csv" / "metrics.csv")))


def read_metrics(path: Path) -> Run:
    """Reads the metrics.csv of a run that left no results.json.

    Lightning's CSVLogger writes ``<name>/version_<n>/metrics.csv``: the name stands for the
    implementation, and n for the seed.
    """
    rows = _rows(path)
    numbers = [_numbers(row) for row in rows]
    version = re.fullmatch(r"version_(\d+)", path.parent.name)
    named = path.parent.parent if version else path.parent
    throughput = {
        name: [row[column] for row in numbers if column in row]
        for name in THROUGHPUT
        for column in [f"throughput/{name}"]
    }
    last = {name: value for row in numbers for name, value in row.items()}
    loss = next((n for n in last if re.match(r"train.*loss(_step)?$", n)), None)
    results = {
        "impl": named.name,
        "model": "",
        "data": "",
        "seed": int(version[1]) if version else 0,
        "overrides": [],
        "status": "finished",
        "metrics": {name: value for name, value in last.items() if name.startswith("test")},
        "throughput": {k: statistics.fmean(v) if v else None for k, v in throughput.items()},
        "environment": {},
        "commit": None,
    }
    losses = {int(row["step"]): row[loss] for row in numbers if loss in row and "step" in row}
    return Run(path.parent, results, losses, _epoch_steps(rows))


def varied(settings: Sequence[dict[str, str]]) -> list[str]:
    """Returns the names of the settings that are not the same in all."""
    names = dict.fromkeys(name for each in settings for name in each)
    return [name for name in names if len({str(each.get(name)) for each in settings}) > 1]


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="", errors="replace") as file:
        return list(csv.DictReader(file))


def _numbers(row: Mapping[str, str]) -> dict[str, float]:
    numbers = {}
    for name, text in row.items():
        try:
            numbers[name] = float(text)
        except (TypeError, ValueError):
            continue
    return numbers


def _epoch_steps(rows: Iterable[Mapping[str, str]]) -> float | None:
    """Steps of an epoch: those that were counted when the first validation ended."""
    for numbers in map(_numbers, rows):
        if "epoch" in numbers and "step" in numbers and any(n.startswith("val") for n in numbers):
            steps = (numbers["step"] + 1) / (numbers["epoch"] + 1)
            return steps if math.isfinite(steps) else None
    return None
