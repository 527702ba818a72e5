"""Finding what a report is made of: files are told apart by what they hold, not by their names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hoconv.tools.report import runs
from hoconv.tools.report.runs import RESULTS, Run

SHARES = "shares.json"  # in the folder of a run that was made to measure its layers


@dataclass
class Found:
    """The contents of the files; `paths` says where each kind was found.

    Attributes:
        checks: of ``hoconv check``.
        kernels: of ``hoconv benchmark``: times of an operator on one device in one dtype.
        steps: times of a step of a network and of its layers.
        shares: the same in a training run; with the settings of that.
        runs: training runs.
        unreadable: path -> why.
    """

    checks: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    shares: list[tuple[dict[str, Any], dict[str, str]]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    paths: dict[str, list[str]] = field(default_factory=dict)


def find(paths: Iterable[Path]) -> Found:
    """Reads files, and all files in folders and their subfolders.

    Raises:
        FileNotFoundError: one of `paths` does not exist.
    """
    found = Found()
    files = {file.resolve(): file for each in paths for file in _files(each)}
    for _, path in sorted(files.items()):
        try:
            kind = _read(path, found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            found.unreadable[str(path)] = f"{type(error).__name__}: {error}"
            continue
        if kind:
            found.paths.setdefault(kind, []).append(str(path))
    return found


def _files(path: Path) -> Iterable[Path]:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.is_file():
        return [path]
    return [
        file
        for pattern in ("*.json", "metrics.csv")
        for file in path.rglob(pattern)
        if file.is_file() and not any(n.startswith(".") for n in file.relative_to(path).parts)
    ]


def _read(path: Path, found: Found) -> str | None:
    """Adds a file to what it is; returns the name of that, or None for what a report ignores."""
    if path.suffix == ".csv":
        if any((folder / RESULTS).exists() for folder in path.parents[:2]):
            return None  # part of that run
        found.runs.append(runs.read_metrics(path))
        return "runs"
    contents = json.loads(path.read_text())
    if not isinstance(contents, dict):
        return None
    kind = _kind(contents)
    if kind == "runs":
        if (path.parent / SHARES).exists():
            return None  # made to measure its layers, not to be compared
        found.runs.append(runs.read(path))
    elif kind == "shares":
        found.shares.append((contents, _settings(path.parent)))
    elif kind:
        getattr(found, kind).append(contents)
    return kind


def _settings(folder: Path) -> dict[str, str]:
    """Returns the settings of a run that was made to measure its layers: without a results.json,
    those of the runs that Lightning's CSVLogger keeps in the same folder."""
    if (folder / RESULTS).exists():
        return runs.read(folder).settings
    return {"impl": folder.name, "data": "", "model": ""}


def _kind(contents: dict[str, Any]) -> str | None:
    if {"impl", "seed", "status", "throughput"} <= contents.keys():
        return "runs"
    if {"operators", "step_ms", "launches"} <= contents.keys():
        return "shares"
    rows = contents.get("rows")
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict):
        return None
    if {"operator", "impl", "tolerance"} <= rows[0].keys():
        return "checks"
    if "contender" in rows[0] and {"operator", "axis"} <= contents.keys():
        return "kernels"
    return "steps" if "layers_share" in rows[0] else None
