"""Runs random cases of the library and compares them with the fuzzer's own definitions.

A case depends on the seed and its number alone. It runs in a process that may crash, and is
described before it runs. The exit code is 1 if a result is wrong, or if nothing was compared. One
case again::

    python scripts/fuzz.py operators --operator dynamic_conv1d --impl cpp --seed 7 --case 1234

Writes ``fuzz_<command>_<device>.json``, with the implementations for ``cells``::

    command, date, environment, method, seed
    cases             the number of cases of each row
    rows              one for each operator, implementation and device, or for each implementation
                      and device of ``cells``
        kinds         kind of case -> verdict -> count
        bad           the cases that are wrong, crashed or hung: case, kind, what, verdict, why
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuzzing import exported, workers
from fuzzing.commands import cells, operators, sequences
from fuzzing.verdicts import BAD
from fuzzing.workers import Outcome
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hoconv.tools.commands import add_out_option, count, record, write_json
from hoconv.tools.tables import show

# Name -> module, and its line in the help. A module has METHOD; add_options; keys, which returns
# the keys of the cases; label, a part of the file's name; row, which names the row of a key; run,
# which runs the case of a key; and, where it differs, SECONDS, the most that a case may take.
COMMANDS = {
    "operators": (operators, "calls, gradients, transforms and export of the operators"),
    "cells": (cells, "recurrent cells drawn from the whole language"),
    "sequences": (sequences, "random operations on one layer, warm against cold"),
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parse(argv)
    print(f"seed {arguments.seed}")
    command = arguments.module
    keys = command.keys(arguments)
    rows: dict[str, dict[str, Any]] = {}
    reasons = set()
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as bar:
        for key, description, verdict in _outcomes(
            command, keys, Path(folder), arguments.jobs, bar
        ):
            head = command.row(key)
            row = rows.setdefault(str(head), head | {"kinds": {}, "bad": []})
            kind, _, what = description.partition(": ")
            of_kind = row["kinds"].setdefault(kind, collections.Counter())
            of_kind[verdict.kind] += 1
            if verdict.kind in BAD:
                row["bad"].append(
                    {"case": key.number, "kind": kind, "what": what, "verdict": verdict.kind,
                     "why": verdict.why}
                )  # fmt: skip
            # Printed at once; of reasons that differ only in numbers, the first one.
            reason = (str(head), re.sub(r"[-+\de.]*\d", "#", verdict.why))
            if arguments.case is not None or (verdict.kind in BAD and reason not in reasons):
                reasons.add(reason)
                print(f"{' '.join(head.values())} case {key.number}: {description}\n"
                      f"  {verdict.kind}: {verdict.why}", flush=True)  # fmt: skip
    bad = sum(len(row["bad"]) for row in rows.values())
    if arguments.case is None:
        _show(list(rows.values()))
        head = record("python scripts/fuzz.py", argv) | {
            "method": command.METHOD,
            "seed": arguments.seed,
        }
        write_json(
            arguments.out / f"fuzz_{command.label(arguments)}.json",
            head | {"cases": arguments.cases, "rows": [*rows.values()]},
        )
    print(f"{len(keys)} cases, {bad} wrong")
    return 1 if bad or not keys else 0


def _outcomes(command: Any, keys: list[Any], folder: Path, jobs: int, bar: Progress):
    """Yields the key, description and verdict of every case.

    Another process loads the programs that cases exported, and gives their verdicts.
    """
    saved: dict[str, Outcome] = {}
    task = bar.add_task("cases", total=len(keys))
    seconds = getattr(command, "SECONDS", workers.SECONDS)
    for outcome in workers.run(command.run, keys, folder, jobs, seconds):
        if outcome.verdict.kind == "exported":
            saved[outcome.verdict.why] = outcome
            continue
        bar.advance(task)
        yield outcome.task, outcome.description, outcome.verdict
    for outcome in workers.run(exported.judge, sorted(saved), folder, jobs):
        before = saved[outcome.task]
        bar.advance(task)
        yield before.task, before.description, outcome.verdict


def _show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        title = " ".join(value for value in row.values() if isinstance(value, str))
        table = Table("kind", *(columns := ("equal", "refused", *BAD)), title=title)
        for kind, verdicts in sorted(row["kinds"].items()):
            table.add_row(kind, *(str(verdicts[name] or "") for name in columns))
        show(table)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, description=module.METHOD, help=summary)
        module.add_options(command)
        command.add_argument("--cases", type=count, default=5000,
                             help="of each row of the record; default: 5000")  # fmt: skip
        command.add_argument(
            "--case", type=int, help="run this case only; print it and write no file"
        )
        command.add_argument("--seed", type=int, default=random.randrange(2**31),
                             help="default: a new one, printed")  # fmt: skip
        command.add_argument("--jobs", type=count, default=os.cpu_count(),
                             help="processes; default: as many as cores")  # fmt: skip
        add_out_option(command)
        command.set_defaults(module=module)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
