"""Compares training runs: ``python scripts/compare.py RUN_OR_SWEEP...``.

Reads the results.json and losses.csv of every run in the folders, groups runs that differ only in
the seed, and compares each group with a baseline: one for all, or, of several cells or data sets,
the one that differs from it in one setting, as by ``--baseline impl=reference``. Writes::

    <name>.json
        command, method, baseline
        commit            of all runs; null where they are of several
        environments      hardware, torch and commit of the runs, each once
        groups            one for each set of settings:
            label, settings       the settings in which the groups differ
            baseline              the label of the group that it is compared with; "" of none
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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from wandb_report import ReportError, publish, require_online

from hoconv.tools.benchmarking.charts import save
from hoconv.tools.commands import add_out_option, record, write_json, write_text
from hoconv.tools.report import files, losses
from hoconv.tools.report.groups import ComparisonError, choose_baselines, compare, group
from hoconv.tools.report.table import Column, columns, metric_columns
from hoconv.tools.tables import show

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
    parser.add_argument(
        "--baseline", metavar="LABEL|SETTING=VALUE",
        help="the label of the group that all are compared with; or a setting and its value: each "
             "group is compared with the one that differs from it in this setting alone; default: "
             "impl reference, or the first group",
    )  # fmt: skip
    add_out_option(parser)
    parser.add_argument("--name", default="compare", help="of the files; default: %(default)s")
    parser.add_argument("--wandb", action="store_true",
                        help="publish table and chart as a report at Weights & Biases")  # fmt: skip
    arguments = parser.parse_args(argv)
    try:
        run(arguments, record("python scripts/compare.py", argv)["command"])
    except (ComparisonError, FileNotFoundError, ReportError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def run(arguments: argparse.Namespace, command: str) -> None:
    """Compares the runs; shows, writes and publishes the comparison."""
    found = files.find(arguments.folders)
    for unreadable, why in found.unreadable.items():
        print(f"Not compared: {unreadable} cannot be read: {why}", file=sys.stderr)
    groups = group(found.runs)
    baselines = choose_baselines(groups, arguments.baseline)
    same = all(each is baselines[0] for each in baselines)
    if arguments.wandb:
        require_online()
    compared = compare(groups, baselines, baselines[0].label if same else arguments.baseline)
    titles, cells = zip(*table(compared))
    rows = [*zip(*cells)]
    shown = Table(*titles[:2])
    for title in titles[2:]:
        shown.add_column(title, justify="right")
    for row in rows:
        shown.add_row(*row)
    show(shown)
    path = arguments.out / f"{arguments.name}.json"
    text = "".join(f"| {' | '.join(row)} |\n" for row in (titles, ["---"] * len(titles), *rows))
    write_json(path, {"command": command, "method": METHOD, **compared})
    write_text(path.with_suffix(".md"), text)
    title = "Training loss: mean, least and greatest over the seeds"
    save(losses.draw([each for each in groups if each.runs]), title, path.with_suffix(".png"))
    if arguments.wandb:
        print(publish(arguments.name, text, path.with_suffix(".png")))


def table(compared: dict[str, Any]) -> list[Column]:
    """Returns the comparison as columns, with a line for each group."""
    groups = compared["groups"]
    runs = [
        f"{each['runs']}"
        + (f", {len(each['unfinished'])} unfinished" if each["unfinished"] else "")
        for each in groups
    ]
    return [
        (" ".join(groups[0]["settings"]) or "impl", [each["label"] for each in groups]),
        ("runs", runs),
        *columns(groups, ("ms per step", "speed-up", "samples/s", "memory, MB")),
        *metric_columns(compared),
    ]


if __name__ == "__main__":
    sys.exit(main())
