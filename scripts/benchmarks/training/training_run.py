"""Measuring how fast ``python train.py`` trains, by a short run in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import ROOT

from hoconv.tools.benchmarking.measurement import percentiles
from hoconv.tools.commands import count

METHOD = (
    "python train.py with logger=csv, without validation; step_ms are the intervals of "
    "trainer.log_every_n_steps steps after the first ten steps, measured by "
    "hoconv.lightning.Throughput: from one batch to the next, reading data included."
)
INTERVALS = 3  # the fewest that a run must have measured
MEASURED = ("step_ms", "samples_per_s", "peak_memory_mb", "data_wait_fraction")


def add_run_options(
    parser: argparse.ArgumentParser, steps: int, timeout_s: float, overrides: Sequence[str]
) -> None:
    """Adds the options of runs with their defaults."""
    parser.add_argument("--steps", type=count, default=steps,
                        help="of each run; default: %(default)s")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=timeout_s,
                        help="seconds for each run; default: %(default)s")  # fmt: skip
    parser.add_argument("overrides", nargs="*", default=list(overrides),
                        help="of train.py; default: " + " ".join(overrides))  # fmt: skip


def measure_training(
    overrides: Sequence[str], steps: int, interval: int, timeout_s: float, threads: int
) -> dict[str, Any]:
    """Trains for `steps` steps, or until `timeout_s` seconds are over.

    Args:
        overrides: of train.py.
        interval: steps of a measured interval.
        threads: of each process of the run.

    Returns:
        ``error``: None, or why nothing was measured. `MEASURED`: the percentiles of ``step_ms``
        over the intervals, and the medians of the rest; None if nothing was measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "train.py", *overrides, "logger=csv", f"hydra.run.dir={folder}",
            "trainer.max_epochs=-1", f"trainer.max_steps={steps}",
            f"trainer.log_every_n_steps={interval}",
            "trainer.limit_val_batches=0", "trainer.limit_test_batches=0",
        ]  # fmt: skip
        pipe = subprocess.PIPE
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            _, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            err = f"{INTERVALS} intervals of {interval} steps take more than {timeout_s:g} s"
        finally:
            _kill(process)
        return _measured(Path(folder), err)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills a run and the processes that it started.

    SIGTERM would wait for the end of a step, and a step may wait for a compiler.
    """
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _measured(folder: Path, err: str) -> dict[str, Any]:
    nothing = dict.fromkeys(MEASURED)
    results = folder / "results.json"
    status = json.loads(results.read_text()) if results.exists() else {"status": "failed"}
    if status["status"] == "failed":
        lines = err.strip().splitlines() or ["no error message"]
        said = lines[-1] if lines[0].startswith("Traceback") else lines[0]
        return {"error": status.get("error") or said, **nothing}
    columns = {name: f"throughput/{name}" for name in MEASURED}
    columns["samples_per_s"] = "throughput/samples_per_sec"
    path = folder / "csv" / "metrics.csv"
    rows = []
    if path.exists():
        with path.open() as file:
            rows = [row for row in csv.DictReader(file) if row.get(columns["step_ms"])]
    if len(rows) < INTERVALS:
        return {"error": err.strip().splitlines()[-1] if err.strip() else "too short", **nothing}
    values = {name: [float(row[column]) for row in rows] for name, column in columns.items()}
    medians = {name: percentiles(values[name])["median_ms"] for name in MEASURED}
    return {"error": None} | medians | {"step_ms": percentiles(values["step_ms"])}
