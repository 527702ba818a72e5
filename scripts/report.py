"""Trains with several implementations in turn and writes what that buys as a page:
``python scripts/report.py experiment=mnist_cnn impl=reference,cpp,cuda seed=0,1,2``.

The arguments are train.py's overrides; `impl` and `seed` take several values. For each seed, one
run of each implementation, and one more of the first, the baseline: A B C A. So a machine that gets
slower or faster meanwhile is seen, and what two runs of the same code differ by. Before them, a
short run of each implementation measures how much of a step each operator takes. Each operator of
the model is checked against its definition. Every run is a process of its own. Writes into the
folder ``--out``::

    check.json                the JSON of `hoconv check`
    shares/<impl>/            the short runs
    runs/<number>_seed<seed>_<impl>/
    report_<operator>.html, report_<operator>.json

Ctrl-C ends it; the same command goes on with what is missing. A run is kept if it finished and no
source file is newer. JSON of `hoconv benchmark` in the folder, or given by --with, becomes part of
the page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import runpy
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common import ROOT
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from rich.console import Console
from wandb_report import ReportError, log_page

from hoconv.dispatch.declaration import operators
from hoconv.dispatch.implementations import impl_label
from hoconv.tools import check
from hoconv.tools.report.command import make
from hoconv.tools.report.contents import NothingFoundError
from hoconv.tools.report.files import SHARES
from hoconv.tools.report.groups import ComparisonError
from hoconv.tools.report.page import PageError, require_packages

LOG = "train.out"  # what a run prints, in its folder
SOURCES = ("hoconv", "csrc", "conf", "datamodules", "models", "training")
SHORT = ("capture=off", "logger=none", "trainer.limit_val_batches=1",
         "trainer.limit_test_batches=1")  # fmt: skip
INTERRUPTED = 130


class Job(NamedTuple):
    """A run of train.py.

    Attributes:
        folder: of the run.
        overrides: of the configuration.
        name: what the terminal calls it.
        proof: the file that a run of this kind leaves when it is done.
        config_dir: a folder with more of the configuration.
    """

    folder: Path
    overrides: list[str]
    name: str
    proof: str = "results.json"
    config_dir: Path | None = None


class PlanError(Exception):
    """Why there is nothing to run, and what to do."""


ERRORS = (
    ComparisonError, OSError, NothingFoundError, PageError, PlanError, ReportError
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="+", metavar="OVERRIDE")
    parser.add_argument("--config-dir", type=Path, help="as train.py's: a folder with more groups")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "report",
                        help="folder; default: outputs/report")  # fmt: skip
    parser.add_argument("--with", dest="others", nargs="+", type=Path, default=[], metavar="PATH",
                        help="JSON of `hoconv benchmark`, or folders with it")  # fmt: skip
    parser.add_argument("--wandb", action="store_true",
                        help="log the pages and their figures to Weights & Biases")  # fmt: skip
    arguments = parser.parse_intermixed_args(argv)
    try:
        require_packages()
        jobs = plan(arguments.overrides, arguments.out.resolve(), arguments.config_dir)
        run_all(jobs, arguments.out)
        return report(jobs, arguments, argv)
    except ERRORS as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"Interrupted: finished runs are kept in {arguments.out}; the same command goes on",
              file=sys.stderr)  # fmt: skip
        return INTERRUPTED


def plan(overrides: Sequence[str], out: Path, config_dir: Path | None = None) -> list[Job]:
    """Returns the runs in their order.

    Raises:
        PlanError: the overrides cannot be read, or name only one implementation.
    """
    swept, fixed = _values(overrides)
    impls, seeds = swept.get("impl", []), swept.get("seed", ["0"])
    if len(impls) < 2:
        raise PlanError(
            f"impl: expected two implementations or more, the first as the baseline, got {impls}; "
            "such as impl=reference,cpp"
        )
    common = [*fixed, "resume=null"]
    jobs = []
    for impl in impls:
        folder = out / "shares" / _name(impl)
        target = "+callbacks.shares._target_=hoconv.lightning.LayerShares"
        path = f"+callbacks.shares.path={folder / SHARES}"
        settings = [f"impl={impl}", f"seed={seeds[0]}", *common, *SHORT, target, path]
        name = f"{_name(impl)}, share of the layers"
        jobs.append(Job(folder, settings, name, SHARES, config_dir))
    for seed in seeds:
        for impl in (*impls, impls[0]):
            number = len(jobs) - len(impls)
            folder = out / "runs" / f"{number:03}_seed{seed}_{_name(impl)}"
            settings = [f"impl={impl}", f"seed={seed}", "logger=csv", *common]
            name = f"{_name(impl)}, seed {seed}"
            jobs.append(Job(folder, settings, name, config_dir=config_dir))
    return jobs


def _values(overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Divides overrides into the values of `impl` and `seed`, and the others."""
    try:
        parsed = OverridesParser.create().parse_overrides([*overrides])
    except HydraException as error:
        raise PlanError(" ".join(str(error).split())) from error
    swept, fixed = {}, []
    for override in parsed:
        if override.key_or_group in ("impl", "seed"):
            swept[override.key_or_group] = (
                [*override.sweep_string_iterator()]
                if override.is_sweep_override()
                else [override.get_value_element_as_str()]
            )
        elif override.is_sweep_override():
            raise PlanError(
                f"{override.key_or_group}: only impl and seed take several values here, got "
                f"{override.input_line}; scripts/compare.py compares the runs of any sweep"
            )
        elif override.key_or_group.split(".")[0] != "logger":
            fixed.append(override.input_line)
    return swept, fixed


def _name(impl: str) -> str:
    """An implementation in the name of a folder."""
    found = OverridesParser.create().parse_override(f"impl={impl}").value()
    return impl_label(
        {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else impl
    )


def run_all(jobs: Sequence[Job], out: Path) -> None:
    """Runs what is not done yet, one after another."""
    console = Console(stderr=True)
    changed = newest_source(jobs[0].config_dir)
    left = [job for job in jobs if not is_done(job, changed)]
    if kept := len(jobs) - len(left):
        console.print(f"{kept} of {len(jobs)} runs are in {out} already", highlight=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["training.run"])  # a second a run, not ten
    began = time.perf_counter()
    for number, job in enumerate(left, 1):
        with console.status(f"[{number}/{len(left)}] {job.name}"):
            seconds = time.perf_counter()
            process = context.Process(target=train, args=(job,))
            process.start()
            try:
                process.join()
            except KeyboardInterrupt:
                process.join()  # the run got the signal too, and writes what it has
                raise
            seconds = time.perf_counter() - seconds
        remaining = (time.perf_counter() - began) / number * (len(left) - number)
        said = "" if number == len(left) else f"; about {remaining:.0f} s left"
        result = f"{seconds:.0f} s" if is_done(job, 0.0) else f"failed: {_problem(job)}"
        console.print(f"[{number}/{len(left)}] {job.name}: {result}{said}", markup=False,
                      highlight=False, soft_wrap=True)  # fmt: skip


def newest_source(config_dir: Path | None) -> float:
    """Returns when a file was changed on which the results of runs depend."""
    packages = {Path(o.function.__code__.co_filename).parent for o in operators()}
    folders = {ROOT / name for name in SOURCES} | packages | ({config_dir} if config_dir else set())
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    return max(file.stat().st_mtime for file in files if "__pycache__" not in file.parts)


def is_done(job: Job, changed: float) -> bool:
    """Returns whether a job finished with the same overrides, after the sources were `changed`."""
    try:
        results = json.loads((job.folder / "results.json").read_text())
        finished = (job.folder / job.proof).stat().st_mtime
    except (OSError, ValueError):
        return False
    same = results.get("overrides") == job.overrides
    return same and results.get("status") == "finished" and finished > changed


def train(job: Job) -> None:
    """Runs train.py with the overrides of a job, in this process; what it prints goes to a file."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for name in {job.proof, "results.json"}:  # of an earlier run
        (job.folder / name).unlink(missing_ok=True)
    with (job.folder / LOG).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    more = [f"--config-dir={job.config_dir.resolve()}"] if job.config_dir else []
    sys.argv = ["train.py", *more, *job.overrides, f"hydra.run.dir={job.folder}"]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def _problem(job: Job) -> str:
    """Says why a job failed: what its results.json says, or the last line that it printed."""
    with contextlib.suppress(OSError, ValueError):
        results = json.loads((job.folder / "results.json").read_text())
        if results.get("error"):
            return str(results["error"])
    with contextlib.suppress(OSError):
        lines = [line for line in (job.folder / LOG).read_text().splitlines() if line.strip()]
        return lines[-1] if lines else "it printed nothing"
    return "it did not begin"


def report(jobs: Sequence[Job], arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Checks the operators of the runs, and writes a page for each."""
    out: Path = arguments.out
    measured = [job.folder / SHARES for job in jobs if (job.folder / SHARES).exists()]
    shares = [json.loads(path.read_text()) for path in measured]
    names = sorted({name for each in shares for name in each["operators"]})
    if not names:
        raise PlanError(
            f"no layer of the model is built on an operator, or no run in {out / 'shares'} "
            f"finished: its {LOG} says why"
        )
    _check(names, sorted({each["device"] for each in shares}), arguments)
    others = [*sorted(out.glob("*.json")), *arguments.others]
    folders = [job.folder for job in jobs if job.folder.exists()]
    command = shlex.join(["python", "scripts/report.py", *argv])
    for name in names:
        page = make(name, [*folders, *others], out, None, command)
        if arguments.wandb:
            print(log_page(page, json.loads(page.with_suffix(".json").read_text())))
    return 0


def _check(names: Sequence[str], devices: Sequence[str], arguments: argparse.Namespace) -> None:
    """Checks operators, unless that was done after the last change.

    An operator that only the configuration imports, not an entry point, is unknown here.
    """
    path: Path = arguments.out / "check.json"
    kept = path.exists() and path.stat().st_mtime > newest_source(arguments.config_dir)
    known = [name for name in names if name in {operator.name for operator in operators()}]
    if kept or not known:
        return
    options = ["--operator", *known, "--device", *devices, "--small", "--seed", "0"]
    with (arguments.out / "check.out").open("w") as log, contextlib.redirect_stdout(log):
        check.main([*options, "--json", str(path)])


if __name__ == "__main__":
    sys.exit(main())
