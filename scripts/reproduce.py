"""Runs the commands of reproduce.yaml, which made the figures of README and docs, one by one.

If a command fails or exceeds its limit, the others still run, and a table at the end shows it.
Measurements write docs/results/. The results.json of a training run is copied there under the
command's name. The output of a command is also written to a file in --logs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from common import RESULTS, ROOT
from rich.table import Table

from hoconv.tools.tables import console


@dataclass
class Step:
    """A command, the minutes that it may take, and the number of GPUs that it needs; the records
    that it writes, and the files and folders that these measure."""

    command: str
    minutes: float
    gpus: int = 0
    records: Sequence[str] = ()
    measures: Sequence[str] = ()


# Those of this environment, which need not be on the path.
PROGRAMS = {"python": [sys.executable], "hoconv": [sys.executable, "-m", "hoconv.tools.cli"]}
STEPS = {
    name: Step(**step)
    for name, step in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if arguments.list:
        console().print(_listed())
        return 0
    if arguments.stale:
        console().print(_stale())
        return 0
    done = Table("name", "minutes", "result")
    for name in arguments.names:
        begin = time.perf_counter()
        try:
            result = run(name, STEPS[name], arguments.logs)
        except KeyboardInterrupt:
            result = "interrupted"
        done.add_row(name, f"{(time.perf_counter() - begin) / 60:.1f}", result)
        if result == "interrupted":
            break
    console().print(done)
    return int(any(result != "done" for result in done.columns[2].cells))


def run(name: str, step: Step, logs: Path) -> str:
    """Runs a command to its end or limit; returns "done", or why it was not done."""
    program, *rest = shlex.split(step.command)
    if step.gpus > torch.cuda.device_count():
        return f"not run: needs {step.gpus} GPUs, there are {torch.cuda.device_count()}"
    own = PROGRAMS.get(program)
    if not (own or shutil.which(program)):
        return f"not run: {program} was not found"
    command = [
        *(own or [program]),
        *(sys.executable if word == "python" else word for word in rest),
    ]
    if trains := rest[0] == "train.py":
        command.append(f"hydra.run.dir={(logs / name).resolve()}")
    print(f"\n== {name}: {step.command}", flush=True)
    logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * step.minutes
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    ) as process:  # fmt: skip

        def end() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the processes that it started, too

        limit = threading.Timer(60 * step.minutes, end)
        limit.start()
        try:
            with (logs / f"{name}.log").open("w") as log:
                for line in process.stdout or ():
                    print(line, end="", flush=True)
                    log.write(line)
            code = process.wait()
        finally:
            limit.cancel()
            end()
    if code != 0 and time.monotonic() >= deadline:
        return f"stopped after {step.minutes:g} minutes"
    if code != 0:
        return f"failed with exit code {code}"
    if trains:
        shutil.copy(logs / name / "results.json", RESULTS / f"{name}.json")
    return "done"


def _listed() -> Table:
    table = Table("name", "GPUs", "at most", "command")
    for name, step in STEPS.items():
        table.add_row(name, str(step.gpus or ""), f"{step.minutes:g} min", step.command)
    return table


def _stale() -> Table:
    table = Table("name", "record", "why it is to be measured again")
    for name, step in STEPS.items():
        for record in step.records:
            if why := find_change(RESULTS / f"{record}.json", step.measures):
                table.add_row(name, record, why)
    return table


def find_change(record: Path, measured: Sequence[str]) -> str | None:
    """Returns why a record may not be what its command measures today; None where it is.

    Args:
        measured: files and folders that the record measures.
    """
    if not record.exists():
        return "there is none"
    contents = json.loads(record.read_text())
    commit, *dirty = (
        contents.get("commit") or contents.get("environment", {}).get("commit") or ""
    ).split("-")
    if not commit:
        return "it names no commit"
    if dirty:
        return "its sources had changes that no commit has"
    later = subprocess.run(
        ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *measured],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if later.returncode:
        return f"there is no commit {commit[:10]}"
    count = int(later.stdout)
    return f"{count} later commits change {', '.join(measured)}" if count else None


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(STEPS), metavar="name",
                        help="default: all of them, in the order of --list")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="show the commands and run none")
    parser.add_argument("--stale", action="store_true",
                        help="show the records that are older than what they measure; run "
                             "nothing")  # fmt: skip
    parser.add_argument("--logs", type=Path, default=ROOT / "outputs" / "reproduce",
                        help="folder; default: outputs/reproduce")  # fmt: skip
    arguments = parser.parse_args(argv)
    for name in arguments.names:
        if name not in STEPS:
            parser.error(f"name: expected some of {', '.join(STEPS)}, got {name!r}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
