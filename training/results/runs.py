"""Reading the runs in folders."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.implementations import label

CURVE_POINTS = 100  # about so many points make a loss curve; each is a mean over steps
NO_SETTING = ("seed", "resume", "logger")  # overrides in which runs of one group may differ


@dataclass(frozen=True)
class Run:
    """A run: the contents of its results.json, and the loss of every step."""

    folder: Path
    results: dict[str, Any]
    losses: list[float]

    @property
    def settings(self) -> dict[str, str]:
        """The overrides, model, data and implementation: name -> value."""
        overrides = dict(text.split("=", 1) for text in self.results["overrides"] if "=" in text)
        named = {name: self.results[name] for name in ("data", "model")}
        named["impl"] = label(self.results["impl"])
        return {k: v for k, v in (overrides | named).items() if k not in NO_SETTING}

    def curve(self) -> tuple[list[int], list[float]]:
        """Returns about `CURVE_POINTS` steps, and the mean loss from each to the next."""
        size = max(1, len(self.losses) // CURVE_POINTS)
        groups = [self.losses[i : i + size] for i in range(0, len(self.losses), size)]
        return [size * i + 1 for i in range(len(groups))], [statistics.fmean(g) for g in groups]


def read(folder: Path) -> Run:
    """Reads the run in a folder.

    Raises:
        FileNotFoundError: the folder has no results.json.
    """
    results = json.loads((folder / "results.json").read_text())
    losses = []
    if (folder / "losses.csv").exists():
        with (folder / "losses.csv").open() as file:
            losses = [float(row["loss"]) for row in csv.DictReader(file)]
    return Run(folder, {"overrides": []} | results, losses)


def find(folders: Iterable[Path]) -> list[Run]:
    """Reads all runs in folders and their subfolders, in the order of their paths."""
    paths = {path.parent for folder in folders for path in folder.rglob("results.json")}
    return [read(path) for path in sorted(paths)]


def varied(settings: Sequence[dict[str, str]]) -> list[str]:
    """Returns the names of the settings that are not the same in all."""
    names = dict.fromkeys(name for each in settings for name in each)
    return [name for name in names if len({str(each.get(name)) for each in settings}) > 1]
