"""Times training steps of every model with every implementation: ``benchmark.py table``.

The simple model is the high-order layer on 3 x 224 x 224 images, global average pooling and a
linear classifier, on one fixed batch. The others are experiments of train.py. Writes, where
<devices> is cpu, cuda or cpu_cuda::

    table_<devices>.json
        command, date, method, environment
        cells             one for each model and column:
            model, column, device, impl, compile, capture, batch of the simple model
            error, step_ms, samples_per_s, peak_memory_mb, data_wait_fraction
                          error: null, or why nothing was measured; step_ms with percentiles
        batches           the same for the simple model with every `batch`
        largest_batch     column -> the largest power of two of images with which a step of the
                          simple model fits the GPU, or null
    table_<devices>.begun.json    the finished part of a command that is not done; after an
                      interruption the same command continues it
    table_<devices>.md    time and peak memory of the cells
    table_<devices>.png   time and memory of a step of the simple model against its batch
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.markdown import Markdown

from benchmarks.training.step import CLASSES, NETWORKS
from benchmarks.training.training_run import MEASURED, measure_training
from benchmarks.training.training_run import METHOD as TRAINING
from hoconv import HighOrderConv2d
from hoconv.dispatch.implementations import ImplementationError, choose
from hoconv.tools.benchmarking.charts import lines, save, sizes_axis
from hoconv.tools.benchmarking.measurement import (
    LEAST_REPEATS,
    WARM_UP,
    extra_memory,
    failure,
    mark,
    memory_limit,
    milliseconds_between,
    percentiles,
    temporarily,
)
from hoconv.tools.commands import count, write_json, write_text
from hoconv.tools.tables import console

SIMPLE = "simple"
EXPERIMENTS = {
    "mnist_cnn": (),
    "coco_segmentation": ("data=coco_tiny",),
    "coco_captions": ("data=coco_tiny",),
    "mnist_lstm": (),
    "mnist_mbm": (),
}


class Column(NamedTuple):
    """A way of training a model; `capture` is train.py's, and only experiments are captured."""

    device: str
    impl: str
    compile: bool = False
    capture: str = "off"


COLUMNS = {
    "reference CPU": Column("cpu", "reference"),
    "reference GPU": Column("cuda", "reference"),
    "reference GPU, captured": Column("cuda", "reference", capture="on"),
    "cpp CPU": Column("cpu", "cpp"),
    "cpp GPU": Column("cuda", "cpp"),
    "cpp GPU, captured": Column("cuda", "cpp", capture="on"),
    "cuda GPU": Column("cuda", "cuda"),
    "cuda GPU, captured": Column("cuda", "cuda", capture="on"),
    "torch.compile CPU": Column("cpu", "reference", compile=True),
    "torch.compile GPU": Column("cuda", "reference", compile=True),
    "torch.compile GPU, captured": Column("cuda", "reference", compile=True, capture="on"),
    "cuda and torch.compile GPU, captured": Column("cuda", "cuda", compile=True, capture="on"),
}
BATCHES = (8, 16, 32, 64, 128, 256, 512)
BATCH = 64  # in the table; the nearest of --batch is taken
REPEATS = {"cpu": 5, "cuda": 20}
# A contender whose measured steps have taken this long needs LEAST_REPEATS only.
ENOUGH_S = 20.0
STEPS = {"cpu": 50, "cuda": 200}  # of an experiment
INTERVAL = {"cpu": 5, "cuda": 20}
METHOD = (
    "Simple model: forward, cross-entropy, backward and SGD on one batch, each step timed alone "
    "(time.perf_counter on a CPU, CUDA events on a GPU) after warm-up; memory is the most that a "
    f"step holds beyond the model and the batch. Experiments: {TRAINING} Memory is the peak of "
    "PyTorch's allocations on the GPU, or of the process's resident memory on a CPU. float32, no "
    "TF32. torch.compile compiles the reference, during the warm-up."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", nargs="+", choices=[SIMPLE, *EXPERIMENTS],
                        default=[SIMPLE, *EXPERIMENTS], metavar="MODEL",
                        help=f"of {', '.join([SIMPLE, *EXPERIMENTS])}; default: all")  # fmt: skip
    parser.add_argument("--batch", nargs="+", type=count, default=list(BATCHES),
                        help=f"of the simple model; the table shows {BATCH} or the nearest "
                        f"of them; default: {' '.join(map(str, BATCHES))}")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=300,
                        help="seconds for each experiment; default: %(default)s")  # fmt: skip


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes the results."""
    columns = [name for name, column in COLUMNS.items() if column.device in arguments.device]
    eager = [name for name in columns if COLUMNS[name].capture == "off"]
    nearest = min(arguments.batch, key=lambda batch: abs(batch - BATCH))
    path = arguments.out / f"table_{'_'.join(sorted(arguments.device))}.json"
    begun = path.with_suffix(".begun.json")  # every finished cell is kept at once: cells take long
    measured = _continued(
        begun, head | {"method": METHOD, "cells": [], "batches": [], "largest_batch": {}}
    )
    cells, batches, largest = (measured[name] for name in ("cells", "batches", "largest_batch"))
    if SIMPLE in arguments.model:
        done = {(cell["column"], cell["batch"]) for cell in batches}
        sizes: list[int] = arguments.batch
        for name, batch in itertools.product(eager, sizes):
            if (name, batch) not in done:
                batches.append(_simple(name, batch))
                cells += batches[-1:] if batch == nearest else []
                write_json(begun, measured)
        for name in eager:
            if COLUMNS[name].device == "cuda" and name not in largest:
                largest[name] = _largest_batch(name)
                write_json(begun, measured)
    done = {(cell["model"], cell["column"]) for cell in cells}
    for model, name in itertools.product(arguments.model, columns):
        if model != SIMPLE and (model, name) not in done:
            cells.append(_experiment(name, model, arguments.timeout))
            write_json(begun, measured)
    text = markdown(measured)
    console().print(Markdown(text))
    write_json(path, measured)
    begun.unlink()
    write_text(path.with_suffix(".md"), text)
    if batches:
        _draw(batches, path.with_suffix(".png"))


def _continued(begun: Path, nothing: dict[str, Any]) -> dict[str, Any]:
    """Returns what the same command measured in the same environment before an interruption."""
    if not begun.exists():
        return nothing
    earlier = json.loads(begun.read_text())
    if any(earlier[name] != nothing[name] for name in ("command", "environment", "method")):
        print(f"{begun} is of another command or environment: starting anew", flush=True)
        return nothing
    print(f"Continuing {begun}", flush=True)
    return earlier


def _cell(model: str, column: str) -> dict[str, Any]:
    return {"model": model, "column": column, **COLUMNS[column]._asdict()}


def _experiment(column: str, model: str, timeout_s: float) -> dict[str, Any]:
    device, impl, compiled, capture = COLUMNS[column]
    print(f"{model}, {column}", flush=True)
    overrides = (
        f"experiment={model}", *EXPERIMENTS[model], f"impl={impl}", f"compile={compiled}",
        f"capture={capture}",
        f"trainer={'gpu' if device == 'cuda' else 'cpu'}",
    )  # fmt: skip
    threads = torch.get_num_threads()
    found = measure_training(overrides, STEPS[device], INTERVAL[device], timeout_s, threads)
    return _cell(model, column) | found


def _simple(column: str, batch: int) -> dict[str, Any]:
    device = torch.device(COLUMNS[column].device)
    print(f"{SIMPLE}, {column}, batch {batch}", flush=True)
    found: dict[str, Any] = dict.fromkeys(MEASURED)

    def measure() -> None:
        with _step(column, batch) as step:
            memory = extra_memory(step, device)
            for _ in range(WARM_UP):
                step()
            times: list[float] = []
            begin = time.perf_counter()
            while len(times) < REPEATS[device.type]:
                start = mark(device)
                step()
                times.append(milliseconds_between(start, mark(device)))
                if len(times) >= LEAST_REPEATS and time.perf_counter() - begin > ENOUGH_S:
                    break
            found["step_ms"] = percentiles(times)
            found["samples_per_s"] = 1e3 * batch / found["step_ms"]["median_ms"]
            found["peak_memory_mb"] = memory / 2**20

    return _cell(SIMPLE, column) | {"batch": batch, "error": _failure(column, measure), **found}


def _largest_batch(column: str) -> int | None:
    """Finds the largest power of two of images with which a step fits the GPU."""
    fits, batch = None, BATCH
    while True:
        print(f"{SIMPLE}, {column}, does a batch of {batch} fit?", flush=True)

        def attempt(batch: int = batch) -> None:
            with _step(column, batch) as step:
                step()

        if _failure(column, attempt):
            return fits
        fits, batch = batch, 2 * batch


def _failure(column: str, action: Callable[[], Any]) -> str | None:
    device, impl, *_ = COLUMNS[column]
    try:
        choose(HighOrderConv2d.operator, impl, device)
    except ImplementationError as error:
        return str(error)
    with memory_limit(device), temporarily(torch.backends.cudnn, allow_tf32=False):
        return failure(action)


@contextmanager
def _step(column: str, batch: int) -> Iterator[Callable[[], None]]:
    """Yields a function that trains the simple model for a step."""
    device, impl, compiled, _ = COLUMNS[column]
    network = NETWORKS["one layer at 224 x 224"]
    model = network.make(impl).to(device)
    if compiled:
        torch.compiler.reset()
        model.compile(dynamic=False)
    optimizer = network.optimizer(model.parameters(), lr=1e-3)
    images = torch.randn(batch, *network.image_shape, device=device)
    labels = torch.randint(CLASSES, (batch,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    step()  # compiles, and allocates the optimizer's state
    yield step


def markdown(measured: dict[str, Any]) -> str:
    """Returns a table of time and memory; below it, why cells are empty."""
    cells = {(cell["model"], cell["column"]): cell for cell in measured["cells"]}
    measured_columns = {column for _, column in cells}
    columns = [name for name in COLUMNS if name in measured_columns]
    reasons = list(dict.fromkeys(cell["error"] for cell in cells.values() if cell["error"]))
    rows = [["", *columns], ["---"] * (1 + len(columns))]
    for model in dict.fromkeys(model for model, _ in cells):
        of_model = [cells.get((model, column)) for column in columns]
        first = next(filter(None, of_model))
        name = f"{model}, {first['batch']} images" if model == SIMPLE else model
        rows.append([f"{name}, ms", *(_ms(cell, reasons) for cell in of_model)])
        rows.append([f"{name}, MB", *(_mb(cell) for cell in of_model)])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", "Median, from the 20th to the 80th percentile.", ""]
    lines += [f"({i}) {reason}  " for i, reason in enumerate(reasons, start=1)]
    for column, batch in measured["largest_batch"].items():
        lines.append(f"Largest batch of the simple model, {column}: {batch or 'none'}  ")
    return "\n".join(lines) + "\n"


def _ms(cell: dict[str, Any] | None, reasons: list[str]) -> str:
    if cell is None:
        return ""
    if cell["error"]:
        return f"({1 + reasons.index(cell['error'])})"
    median, low, high = (
        f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
        for ms in (cell["step_ms"][key] for key in ("median_ms", "p20_ms", "p80_ms"))
    )
    return f"{median} ({low}-{high})"


def _mb(cell: dict[str, Any] | None) -> str:
    return "" if cell is None or cell["error"] else f"{cell['peak_memory_mb']:,.0f}"


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(11, 5), layout="constrained")
    shown = [row | {"contender": row["column"], "size": row["batch"]} for row in rows]
    ms, mb = figure.subplots(1, 2)
    lines(ms, shown, lambda row: row["step_ms"] and row["step_ms"]["median_ms"])
    lines(mb, shown, lambda row: row["peak_memory_mb"])
    for panel, label in ((ms, "ms per step"), (mb, "MB of a step")):
        sizes_axis(panel, shown, "batch")
        panel.set(title=label)
    save(figure, "one layer, 3 x 224 x 224", path, columns=4)
