"""Writes what an operator's kernels buy as one HTML page and its JSON: ``hoconv report OPERATOR``.

It reads what other commands left: the JSON of ``hoconv check`` and of ``hoconv benchmark``, and the
folders of training runs: results.json, or metrics.csv of Lightning's CSVLogger.
Folders are searched; files are told apart by what they hold. What is missing, the page says.

Writes::

    report_<operator>.html
    report_<operator>.json
        command, date, operator, method
        sources           kind of file -> paths
        verdict           headline, tone, reasons, next
        correctness       rows of the checks
        kernels           the benchmarks' JSON, each with a summary of its largest size
        training          null without runs:
            baseline, settings, environments
            groups        one for each set of settings: estimates over seeds, parts of the step
            predictions   of each group against the baseline: Amdahl's law and the measurement
            noise         what two runs of the same code differ by
            curves        the training loss
        missing           what is not there, and how to get it
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hoconv.tools.commands import write_text
from hoconv.tools.report import files
from hoconv.tools.report.contents import NothingFoundError, join
from hoconv.tools.report.groups import ComparisonError
from hoconv.tools.report.page import PageError, as_json, render, require_packages


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="hoconv report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Any name: what is reported may be a package's that is not installed here.
    parser.add_argument("--operator", metavar="OPERATOR", help="if it is not the first argument")
    parser.add_argument("paths", nargs="*", metavar="[OPERATOR] [PATH ...]",
                        help="the operator; files, and folders to be searched; default: this "
                             "folder")  # fmt: skip
    parser.add_argument("--baseline", help="the label of the runs that others are compared with; "
                        "default: impl reference, or the first")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(), help="folder; default: this one")
    arguments = parser.parse_args(argv)
    operator, paths = arguments.operator, arguments.paths
    if operator is None and not paths:
        parser.error("OPERATOR: expected the name of an operator, got none")
    if operator is None:
        operator, *paths = paths
    try:
        make(operator, [*map(Path, paths)] or [Path()], arguments.out, arguments.baseline,
             shlex.join(["hoconv", "report", *argv]))  # fmt: skip
    except (ComparisonError, OSError, NothingFoundError, PageError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def make(
    operator: str,
    paths: Sequence[Path],
    out: Path,
    baseline: str | None,
    command: str,
) -> Path:
    """Writes a report; returns the path of its page.

    Args:
        paths: files, and folders to be searched.
        out: the folder of the report.
        baseline: the label of the runs that others are compared with.
        command: what the report says it was made by.

    Raises:
        ComparisonError, OSError, NothingFoundError, PageError: why there is no report.
    """
    require_packages()
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    joined = join(files.find(paths), operator, baseline)
    contents: dict[str, Any] = {"command": command, "date": date, **joined}
    page = out / f"report_{re.sub(r'[^A-Za-z0-9_.-]', '_', operator)}.html"
    html, text = render(contents), as_json(contents)
    write_text(page.with_suffix(".json"), text)
    write_text(page, html)
    print(contents["verdict"]["headline"])
    return page
