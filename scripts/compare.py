"""Compares training runs: ``python scripts/compare.py RUN_OR_SWEEP...``.

Reads the results.json and losses.csv of every run in the folders, groups runs that differ only in
the seed, and compares each group with a baseline. Writes::

    <name>.json
        command, method, baseline
        environments      hardware, torch and commit of the runs, each once
        groups            one for each set of settings:
            label, settings       the settings in which the groups differ
            seeds, runs           seeds of finished runs, and how many runs these are
            unfinished            folders of runs that did not finish
            step_ms, samples_per_sec, data_wait_fraction, peak_memory_mb, metrics
                                  mean; ci95, half a confidence interval; n, of how many seeds
            speedup, differences  of the step, and of the metrics, from the baseline's runs with
                                  the same seed: the same
    <name>.md             the same as a table
    <name>.png            training loss against steps and against time
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table
from wandb_report import ReportError, publish, require_online

from hoconv.benchmarking.charts import COLOURS, save
from hoconv.commands import add_out_option, record, write_json, write_text
from hoconv.report.estimates import Estimate, estimate
from hoconv.report.groups import ComparisonError, Group, choose_baseline, compare, group
from hoconv.report.runs import find
from hoconv.report.verdict import shown
from hoconv.tables import show

METHOD = (
    "Mean over seeds and, of three or more, half of a 95% confidence interval by Student's t; "
    "several runs of one seed count as one, their mean. Speed-up and differences are taken between "
    "runs with the same seed. Steps exclude validation and warm-up. Loss curves: mean over runs, "
    "from the least to the greatest; time is the number of steps times the mean time of a step."
)


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
        run(arguments, record("python scripts/compare.py", argv)["command"])
    except (ComparisonError, ReportError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def run(arguments: argparse.Namespace, command: str) -> None:
    """Compares the runs; shows, writes and publishes the comparison."""
    groups = group(find(arguments.folders))
    baseline = choose_baseline(groups, arguments.baseline)
    if arguments.wandb:
        require_online()
    compared = compare(groups, baseline)
    columns, *rows = lines(compared)
    shown = Table(*columns[:2])
    for name in columns[2:]:
        shown.add_column(name, justify="right")
    for cells in rows:
        shown.add_row(*cells)
    show(shown)
    text = markdown(columns, rows)
    path = arguments.out / f"{arguments.name}.json"
    write_json(path, {"command": command, "method": METHOD, **compared})
    write_text(path.with_suffix(".md"), text)
    _draw(groups, path.with_suffix(".png"))
    if arguments.wandb:
        print(publish(arguments.name, text, path.with_suffix(".png")))


def lines(compared: dict[str, Any]) -> list[list[str]]:
    """Returns the comparison as the cells of a table: the headings, then a line for each group."""
    groups = compared["groups"]
    metrics = list(dict.fromkeys(name for each in groups for name in each["metrics"]))
    columns = [" ".join(groups[0]["settings"]) or "impl", "runs", "ms a step", "speed-up"]
    columns += ["samples/s", "memory, MB"]
    for name in metrics:
        columns += [name, f"Δ vs {compared['baseline']}"]
    found = [columns]
    for each in groups:
        runs = str(each["runs"])
        runs += f", {len(each['unfinished'])} unfinished" if each["unfinished"] else ""
        cells = [each["label"], runs, _shown(each["step_ms"]), _shown(each["speedup"], "{:.2f}")]
        cells += [
            _shown(each["samples_per_sec"], "{:,.0f}"),
            _shown(each["peak_memory_mb"], "{:,.0f}"),
        ]
        for name in metrics:
            cells.append(_shown(each["metrics"].get(name), "{:.4f}"))
            cells.append(_shown(each["differences"].get(name), "{:+.4f}"))
        found.append(cells)
    return found


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    written = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in written) + "\n"


def _shown(value: Estimate | None, form: str | None = None) -> str:
    return "" if value is None else shown(value, form)


def _draw(groups: list[Group], path: Path) -> None:
    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for colour, each in zip(COLOURS, (g for g in groups if g.runs), strict=False):
        curves = [run.curve() for run in each.finished()]
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
