"""Compares training runs: ``python scripts/compare.py RUN_OR_SWEEP...``.

Reads the results.json and losses.csv of every run in the folders, groups runs that differ only in
the seed, and compares each group with a baseline. Writes::

    <name>.json
        command, method, baseline
        environments      hardware, torch and commit of the runs, each once
        groups            one for each set of settings:
            label, settings       the settings in which the groups differ
            seeds, unfinished     seeds of finished runs; folders of runs that did not finish
            step_ms, samples_per_sec, peak_memory_mb, metrics
                                  mean and ci95, half a confidence interval, over the seeds
            speedup, differences  of the step, and of the metrics, from the baseline's run with
                                  the same seed: mean and ci95
    <name>.md             the same as a table
    <name>.png            training loss against steps and against time
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from charts import COLOURS, save
from common import add_out_option, console
from lightning_fabric.utilities.exceptions import MisconfigurationException
from matplotlib.figure import Figure
from rich.markdown import Markdown
from scipy.stats import t
from wandb_report import ReportError, publish, require_online

from hoconv.commands import record, write, write_json
from training.results.runs import Run, find, varied

METHOD = (
    "Mean over seeds and, of three or more, half of a 95% confidence interval by Student's t. "
    "Speed-up and differences are taken between runs with the same seed. Steps exclude "
    "validation and warm-up. Loss curves: mean over seeds, from the least to the greatest; time "
    "is the number of steps times the mean time of a step."
)
THROUGHPUT = ("step_ms", "samples_per_sec", "peak_memory_mb")
UNSET = "default"  # in the label of runs that do not set what others set
LEAST_SEEDS = 3  # the interval of two is thirteen times as wide as their difference
Estimate = dict[str, float | None]


@dataclass
class Group:
    """Runs that differ only in the seed."""

    label: str
    settings: dict[str, str]
    runs: dict[int, Run] = field(default_factory=dict)
    unfinished: list[Path] = field(default_factory=list)

    def throughput(self, name: str) -> dict[int, float]:
        values = {seed: run.results["throughput"][name] for seed, run in self.runs.items()}
        return {seed: value for seed, value in values.items() if value is not None}

    def metric(self, name: str) -> dict[int, float]:
        found = {seed: run.results["metrics"].get(name) for seed, run in self.runs.items()}
        return {seed: float(value) for seed, value in found.items() if value is not None}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_OR_SWEEP")
    parser.add_argument("--baseline", help="a label of the table; default: impl reference, or the "
                        "first group")  # fmt: skip
    add_out_option(parser)
    parser.add_argument("--name", default="compare", help="of the files; default: %(default)s")
    parser.add_argument("--wandb", action="store_true",
                        help="publish table and chart as a report at Weights & Biases")  # fmt: skip
    arguments = parser.parse_args(argv)
    try:
        run(arguments, record("scripts/compare.py", argv)["command"])
    except (MisconfigurationException, ReportError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def run(arguments: argparse.Namespace, command: str) -> None:
    """Compares the runs; shows, writes and publishes the comparison."""
    groups = group(find(arguments.folders))
    baseline = _baseline(groups, arguments.baseline)
    if arguments.wandb:
        require_online()
    compared = compare(groups, baseline)
    text = table(compared)
    console().print(Markdown(text))
    path = arguments.out / f"{arguments.name}.json"
    write_json(path, {"command": command, "method": METHOD, **compared})
    write(path.with_suffix(".md"), lambda partial: partial.write_text(text))
    write(path.with_suffix(".png"), functools.partial(_draw, groups))
    if arguments.wandb:
        print(publish(arguments.name, text, path.with_suffix(".png")))


def group(runs: Iterable[Run]) -> list[Group]:
    """Groups runs that differ only in the seed, in the order of their first runs.

    Raises:
        MisconfigurationException: there are no runs, or two of one group with the same seed.
    """
    runs = list(runs)
    if not runs:
        raise MisconfigurationException("there is no results.json in these folders")
    names = varied([run.settings for run in runs])
    groups: dict[tuple[str, ...], Group] = {}
    for run in runs:
        settings = {name: str(run.settings.get(name, "")) for name in names}
        label = " ".join(value or UNSET for value in settings.values()) or run.settings["impl"]
        found = groups.setdefault(tuple(settings.values()), Group(label, settings))
        if run.results["status"] != "finished":
            found.unfinished.append(run.folder)
        elif (seed := run.results["seed"]) in found.runs:
            raise MisconfigurationException(
                f"{found.runs[seed].folder} and {run.folder} have the same settings and the same "
                "seed; give only one of them"
            )
        else:
            found.runs[seed] = run
    return list(groups.values())


def compare(groups: list[Group], baseline: Group) -> dict[str, Any]:
    """Returns what the JSON says of the groups."""
    environments: dict[str, dict[str, Any]] = {}
    for run in (run for group in groups for run in group.runs.values()):
        known = {k: run.results["environment"].get(k) for k in ("cpu", "threads", "gpu", "torch")}
        known["commit"] = run.results["commit"]
        environments[str(known)] = known
    return {
        "baseline": baseline.label,
        "environments": list(environments.values()),
        "groups": [_compared(each, baseline) for each in groups],
    }


def _compared(each: Group, baseline: Group) -> dict[str, Any]:
    metrics = {
        name: each.metric(name)
        for name in dict.fromkeys(n for run in each.runs.values() for n in run.results["metrics"])
        if name.startswith("test/")
    }
    paired = functools.partial(_paired, baseline=baseline, each=each)
    return {
        "label": each.label,
        "settings": each.settings,
        "seeds": sorted(each.runs),
        "unfinished": [str(folder) for folder in each.unfinished],
        **{name: estimate(each.throughput(name).values()) for name in THROUGHPUT},
        "metrics": {name: estimate(values.values()) for name, values in metrics.items()},
        "speedup": paired(lambda g: g.throughput("step_ms"), lambda old, new: old / new),
        "differences": {
            name: paired(lambda g, name=name: g.metric(name), lambda old, new: new - old)
            for name in metrics
        },
    }


def _paired(
    values: Callable[[Group], dict[int, float]],
    of: Callable[[float, float], float],
    baseline: Group,
    each: Group,
) -> Estimate:
    old, new = values(baseline), values(each)
    return estimate(of(old[seed], new[seed]) for seed in sorted(old.keys() & new.keys()))


def estimate(values: Iterable[float]) -> Estimate:
    """Returns the mean and half of its 95% confidence interval, which takes `LEAST_SEEDS` values;
    None where values are too few."""
    values = list(values)
    if not values:
        return {"mean": None, "ci95": None}
    mean, n = statistics.fmean(values), len(values)
    if n < LEAST_SEEDS:
        return {"mean": mean, "ci95": None}
    return {
        "mean": mean,
        "ci95": float(t.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n),
    }


def _baseline(groups: list[Group], label: str | None) -> Group:
    for each in groups:
        if label == each.label or (label is None and "reference" in each.label.split()):
            return each
    if label is None:
        return groups[0]
    raise MisconfigurationException(
        f"--baseline: expected one of {[each.label for each in groups]}, got {label!r}"
    )


def table(compared: dict[str, Any]) -> str:
    """Returns the comparison as a table in Markdown."""
    groups = compared["groups"]
    metrics = list(dict.fromkeys(name for each in groups for name in each["metrics"]))
    columns = [" ".join(groups[0]["settings"]) or "impl", "runs", "ms a step", "speed-up"]
    columns += ["samples/s", "memory, MB"]
    for name in metrics:
        columns += [name, f"Δ vs {compared['baseline']}"]
    lines = [columns, ["---"] * len(columns)]
    for each in groups:
        runs = str(len(each["seeds"]))
        runs += f", {len(each['unfinished'])} unfinished" if each["unfinished"] else ""
        cells = [each["label"], runs, _shown(each["step_ms"]), _shown(each["speedup"], "{:.2f}")]
        cells += [
            _shown(each["samples_per_sec"], "{:,.0f}"),
            _shown(each["peak_memory_mb"], "{:,.0f}"),
        ]
        for name in metrics:
            cells.append(_shown(each["metrics"].get(name), "{:.4f}"))
            cells.append(_shown(each["differences"].get(name), "{:+.4f}"))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _shown(value: Estimate | None, form: str = "{:.3g}") -> str:
    if value is None or value["mean"] is None:
        return ""
    text = form.format(value["mean"])
    if value["ci95"] is None:
        return text
    return f"{text} ± {form.replace('+', '').format(value['ci95'])}"


def _draw(groups: list[Group], path: Path) -> None:
    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for colour, each in zip(COLOURS, (g for g in groups if g.runs), strict=False):
        curves = [run.curve() for run in each.runs.values()]
        steps = min((curve[0] for curve in curves), key=len)
        losses = list(zip(*(curve[1][: len(steps)] for curve in curves)))
        step_ms = estimate(each.throughput("step_ms").values())["mean"]
        for panel, scale in zip(panels, (1.0, step_ms and step_ms / 1000)):
            if scale is None:
                continue  # too short to be timed
            x = [scale * step for step in steps]
            panel.plot(x, [statistics.fmean(y) for y in losses], color=colour, label=each.label)
            panel.fill_between(x, list(map(min, losses)), list(map(max, losses)),
                               color=colour, alpha=0.2)  # fmt: skip
    panels[0].set(xlabel="step", ylabel="training loss", yscale="log")
    panels[1].set(xlabel="seconds of training")
    save(figure, "Training loss: mean, least and greatest over the seeds", path)


if __name__ == "__main__":
    sys.exit(main())
