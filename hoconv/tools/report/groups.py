"""Runs that differ only in the seed, and how they compare with those of a baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hoconv.tools.report.estimates import Estimate, differences, estimate, ratios
from hoconv.tools.report.runs import THROUGHPUT, Run, varied

UNSET = "default"  # in the label of runs that do not set what others set
Values = dict[int, float]  # seed -> value


class ComparisonError(Exception):
    """Why runs cannot be compared, and what to do."""


@dataclass
class Group:
    """Runs that differ only in the seed; those of one seed, in the order of their folders."""

    label: str
    settings: dict[str, str]
    runs: dict[int, list[Run]] = field(default_factory=dict)
    unfinished: list[Run] = field(default_factory=list)

    def finished(self) -> list[Run]:
        return [run for runs in self.runs.values() for run in runs]

    def captured(self) -> bool:
        """Returns whether the steps of all finished runs were CUDA graphs."""
        runs = self.finished()
        return bool(runs) and all(r.results.get("capture", {}).get("replays", 0) > 0 for r in runs)

    def throughput(self, name: str) -> Values:
        """Returns the mean over the runs of each seed of what results.json calls `name`."""
        return self._means("throughput", name)

    def metric(self, name: str) -> Values:
        return self._means("metrics", name)

    def metrics(self) -> list[str]:
        """Returns the names of the metrics of the test."""
        names = dict.fromkeys(n for run in self.finished() for n in run.results["metrics"])
        return [name for name in names if name.startswith("test")]

    def again(self) -> list[tuple[int, float]]:
        """Returns, of each seed with several runs, how many times as fast each was as the first."""
        found = []
        for seed, runs in sorted(self.runs.items()):
            first, *others = [_number(run.results["throughput"].get("step_ms")) for run in runs]
            found += [(seed, first / other) for other in others if first and other]
        return found

    def _means(self, kind: str, name: str) -> Values:
        found = {}
        for seed, runs in sorted(self.runs.items()):
            values = [_number(run.results.get(kind, {}).get(name)) for run in runs]
            measured = [value for value in values if value is not None]
            if measured:
                found[seed] = math.fsum(measured) / len(measured)
        return found


def _number(value: Any) -> float | None:
    """A finite number; None for what was not measured, and for the text that stands for NaN."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def group(runs: Iterable[Run]) -> list[Group]:
    """Groups runs that differ only in the seed, in the order of their first runs."""
    runs = list(runs)
    names = varied([run.settings for run in runs])
    groups: dict[tuple[str, ...], Group] = {}
    for run in runs:
        settings = {name: str(run.settings.get(name, "")) for name in names}
        label = " ".join(value or UNSET for value in settings.values()) or run.settings["impl"]
        found = groups.setdefault(tuple(settings.values()), Group(label, settings))
        if run.results["status"] == "finished":
            found.runs.setdefault(run.results["seed"], []).append(run)
        else:
            found.unfinished.append(run)
    return list(groups.values())


def choose_baseline(groups: list[Group], label: str | None) -> Group:
    """Returns the group with this label; by default that of ``reference``, else the first.

    Raises:
        ComparisonError: no group has the label, or there is no group.
    """
    if not groups:
        raise ComparisonError("there is no results.json in these folders")
    for each in groups:
        if label == each.label or (label is None and "reference" in each.label.split()):
            return each
    if label is None:
        return groups[0]
    raise ComparisonError(
        f"--baseline: expected one of {[each.label for each in groups]}, got {label!r}"
    )


def choose_baselines(groups: list[Group], name: str | None) -> list[Group]:
    """Returns what each group is compared with: the same group for all, or one that differs from it
    in one setting alone; a group without runs where there is none.

    Args:
        name: a label, or ``setting=value``; see :func:`choose_baseline` for the default.

    Raises:
        ComparisonError: no group has the label or the setting, or there is no group.
    """
    setting, _, value = (name or "").partition("=")
    is_label = any(name == each.label for each in groups)
    if is_label or not any(each.settings.get(setting) == value for each in groups):
        return [choose_baseline(groups, name)] * len(groups)
    by_settings = {tuple(each.settings.items()): each for each in groups}
    wanted = [{**each.settings, setting: value} for each in groups]
    missing = Group("", {})
    return [by_settings.get(tuple(settings.items()), missing) for settings in wanted]


def compare(groups: list[Group], baselines: list[Group], name: str) -> dict[str, Any]:
    """Returns what JSON records say of the groups.

    ``speedup`` is that of a step, and ``differences`` are those of the test's metrics, between the
    runs of the baseline and of the group with the same seed.

    Args:
        baselines: of each group, what it is compared with.
        name: what the record calls them.
    """
    environments: dict[str, dict[str, Any]] = {}
    for run in (run for each in groups for run in each.finished()):
        environment = run.results.get("environment", {})
        known = {k: environment.get(k) for k in ("cpu", "threads", "torch")} | {"gpu": run.gpu}
        known["commit"] = run.results.get("commit")
        environments[str(known)] = known
    commits = {known["commit"] for known in environments.values()}
    return {
        "commit": commits.pop() if len(commits) == 1 else None,
        "baseline": name,
        "environments": list(environments.values()),
        "groups": [_compared(*pair) for pair in zip(groups, baselines, strict=True)],
    }


def _compared(each: Group, baseline: Group) -> dict[str, Any]:
    metrics: dict[str, Estimate] = {}
    lost: dict[str, Estimate] = {}
    for name in each.metrics():
        values = each.metric(name)
        metrics[name] = estimate(values.values())
        lost[name] = estimate(differences(baseline.metric(name), values))
    return {
        "label": each.label,
        "settings": each.settings,
        "baseline": baseline.label,
        "seeds": sorted(each.runs),
        "runs": len(each.finished()),
        "unfinished": [str(run.folder) for run in each.unfinished],
        **{name: estimate(each.throughput(name).values()) for name in THROUGHPUT},
        "metrics": metrics,
        "speedup": estimate(ratios(baseline.throughput("step_ms"), each.throughput("step_ms"))),
        "differences": lost,
    }
