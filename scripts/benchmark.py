"""Times operators and the first use of the library; writes JSON, and a chart beside it.

``op`` times every implementation of an operator, ``torch.compile`` of its reference and its
declared baselines, at the declared sizes. ``start`` times the compilation and the later starts. How
each is done is said by their ``--help`` and, beside the numbers, in the JSON that they write::

    op_<operator>_<device>_<dtype>.json
        command, date, method
        environment       hoconv.doctor.environment(), with the commit
        operator, device, dtype, axis
        copy_gb_per_s     copy bandwidth of this run: bytes read plus bytes written, 1e9 a second
        unavailable       implementation -> why it was not timed
        rows              one for each size and contender:
            size, sample, contender
            error                 null, "out of memory", or what was raised: then the rest is null
            forward, backward
                median_ms, p20_ms, p80_ms, repeats
                floor_ms          the declared least bytes over the copy bandwidth
                share_of_floor    floor_ms / median_ms: 1 is as fast as a copy
                gb_per_s          the declared least bytes over the median
            extra_memory_bytes    most that a forward and a backward hold beyond their inputs
            least_memory_bytes    output and gradients; null only where every contender failed

    start_<library>.json
        command, date, method, environment, library
        first_s           import and load with an empty cache: the compilation
        later_s           the same with the library in the cache: median_s, and each of them
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
    add_device_option,
    add_operator_option,
    console,
    dtype_name,
    record,
    write,
    write_json,
)
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from measurement import (
    CLOCK,
    METHOD,
    REPEATS,
    Contender,
    copy_bandwidth,
    memory_limit,
    summary,
    take_turns,
)
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from hoconv import build
from hoconv.implementations import ImplementationError, choose
from hoconv.operators import Operator, operators

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
COMPILED = "torch.compile"
STARTS = 5
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#777777", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7")
MARKERS = "os^Dv*P"
START_METHOD = (
    "Each start is a fresh process; the clock starts after `import torch` (and, for CUDA, after "
    "torch.cuda.init()), and stops when hoconv is imported and the library loaded. The first finds "
    "an empty cache and compiles."
)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parse(argv)
    arguments.run(arguments, record("benchmark.py", argv))
    return 0


def benchmark_operators(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """The sub-command ``op``."""
    for operator in operators():
        if operator.name not in arguments.operator:
            continue
        for device in arguments.device:
            for dtype in operator.tolerances:
                if dtype_name(dtype) in arguments.dtype:
                    measured = head | measure(operator, device, dtype, arguments)
                    console().print(_table(measured))
                    for impl, reason in measured["unavailable"].items():
                        print(f"{impl}: {reason}")
                    for row in measured["rows"]:
                        if row["error"]:
                            print(f"{row['contender']} at {row['size']}: {row['error']}")
                    path = arguments.out / f"op_{operator.name}_{device}_{dtype_name(dtype)}.json"
                    write_json(path, measured)
                    write(path.with_suffix(".png"), functools.partial(draw, measured))


def measure(
    operator: Operator, device_type: str, dtype: torch.dtype, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Times one operator on one device in one dtype; returns what its JSON says of it."""
    device = torch.device(device_type)
    sizes = arguments.sizes or operator.benchmark.sizes
    repeats = REPEATS[device_type]
    if arguments.quick:
        sizes, repeats = sizes[:1], 3
    functions, unavailable = _functions(operator, device_type)
    bandwidth = copy_bandwidth(device, repeats)
    rows = []
    title = f"{operator.name} {device_type} {dtype_name(dtype)}"
    steps = len(sizes) * len(functions) * (repeats + 1)
    with Progress(console=Console(stderr=True)) as progress, memory_limit(device_type):
        task = progress.add_task(title, total=steps)
        for size in sizes:
            sample = operator.benchmark.sample(size, device, dtype)
            torch.compiler.reset()
            contenders = [Contender(name, function) for name, function in functions.items()]

            def say(contender: Contender, size: int = size) -> None:
                progress.update(task, advance=1, description=f"{title} {size}: {contender.name}")

            least_memory = take_turns(contenders, sample, device, repeats, say)
            cost = operator.cost(sample)
            rows += [
                {
                    "size": size,
                    "sample": sample.name,
                    "contender": contender.name,
                    "forward": summary(contender.forward_ms, cost.forward_bytes, bandwidth),
                    "backward": summary(contender.backward_ms, cost.backward_bytes, bandwidth),
                    "extra_memory_bytes": contender.extra_memory,
                    "least_memory_bytes": least_memory,
                    "error": contender.error,
                }
                for contender in contenders
            ]
        progress.update(task, completed=steps, description=title)
    return {
        "method": METHOD + CLOCK[device_type],
        "operator": operator.name,
        "device": device_type,
        "dtype": dtype_name(dtype),
        "axis": operator.benchmark.axis,
        "copy_gb_per_s": bandwidth / 1e9,
        "unavailable": unavailable,
        "rows": rows,
    }


def _functions(
    operator: Operator, device_type: str
) -> tuple[dict[str, Callable[..., Tensor]], dict[str, str]]:
    """Contender -> function of a sample's arguments; and implementation -> why it cannot run."""

    def public(impl: str) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: operator.function(*args, impl=impl, **kwargs)

    functions, unavailable = {"reference": public("reference")}, {}
    functions |= operator.benchmark.baselines
    functions[COMPILED] = torch.compile(public("reference"), dynamic=False, fullgraph=True)
    for impl in operator.implementations:
        try:
            choose(operator, impl, device_type)
            functions[impl] = public(impl)
        except ImplementationError as error:
            unavailable[impl] = str(error)
    return functions, unavailable


def _table(measured: dict[str, Any]) -> Table:
    title = f"{measured['operator']}, {measured['dtype']}, {_hardware(measured)}, "
    table = Table(title=title + f"copy {measured['copy_gb_per_s']:.4g} GB/s", box=SIMPLE)
    table.add_column("size", justify="right")
    table.add_column("contender")
    for direction in ("forward", "backward"):
        for column in (f"{direction}\nms", "floor\nms", "share of\nfloor", "\nGB/s"):
            table.add_column(column, justify="right")
    table.add_column("extra\nMiB", justify="right")
    table.add_column("least\nMiB", justify="right")
    for i, row in enumerate(measured["rows"]):
        if i and row["size"] != measured["rows"][i - 1]["size"]:
            table.add_section()
        cells = [str(row["size"]), row["contender"]]
        for timing in (row["forward"], row["backward"]):
            cells += ["", "", "", ""] if timing is None else [
                f"{timing['median_ms']:.4g}",
                f"{timing['floor_ms']:.4g}",
                f"{timing['share_of_floor']:.0%}",
                f"{timing['gb_per_s']:.3g}",
            ]  # fmt: skip
        for column in ("extra_memory_bytes", "least_memory_bytes"):
            cells.append("" if row[column] is None else f"{row[column] / 2**20:.3g}")
        if row["error"]:
            cells[2] = "[red]failed"
        table.add_row(*cells)
    return table


def draw(measured: dict[str, Any], path: Path) -> None:
    """Draws the measured times against the size, forward and backward, as a PNG."""
    rows = measured["rows"]
    sizes = sorted({row["size"] for row in rows})
    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, direction in zip(panels, ("forward", "backward"), strict=True):
        for i, contender in enumerate(dict.fromkeys(row["contender"] for row in rows)):
            points = [(row["size"], row[direction]["median_ms"]) for row in rows
                      if row["contender"] == contender and row[direction]]  # fmt: skip
            style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
            panel.plot(*zip(*points, strict=True) if points else ([], []), label=contender, **style)
        floors = {row["size"]: row[direction]["floor_ms"] for row in rows if row[direction]}
        panel.plot(floors.keys(), floors.values(), "k.--", label="floor: bytes / copy bandwidth")
        panel.set(title=direction, xscale="log", yscale="log", xlabel=measured["axis"])
        panel.set_xticks(sizes, labels=[str(size) for size in sizes])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter("{x:g}")
        panel.grid(which="major", color="0.85")
        panel.tick_params(labelleft=True)
    panels[0].set_ylabel("time of a call, ms")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    versions = f"{measured['dtype']}, torch {measured['environment']['torch']}"
    figure.suptitle(f"{measured['operator']}: {_hardware(measured)}, {versions}")
    figure.savefig(path, format="png", dpi=150)


def benchmark_start(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """The sub-command ``start``."""
    table = Table("library", "first use, compiling", "later starts, median", title="Start, s")
    for library in arguments.device:
        with tempfile.TemporaryDirectory() as cache:
            first, *later = (_start(library, cache) for _ in range(1 + STARTS))
        median = statistics.median(later)
        table.add_row(library, f"{first:.2f}", f"{median:.3f}")
        measured = {
            "method": START_METHOD,
            "library": library,
            "first_s": first,
            "later_s": {"median_s": median, "each_s": later},
        }
        write_json(arguments.out / f"start_{library}.json", head | measured)
    console().print(table)


def _start(library: str, cache: str) -> float:
    """Seconds that a new process takes to import hoconv and load a library, with this cache.

    Raises:
        BuildError: it cannot be compiled or loaded.
    """
    program = """
import sys, time, torch
if sys.argv[1] == "cuda":
    torch.cuda.init()
begin = time.perf_counter()
from hoconv import build
reason = build.load(sys.argv[1])
print(time.perf_counter() - begin, reason)
"""
    environment = {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": cache,
        "PYTHONPATH": os.pathsep.join(sys.path),  # hoconv need not be installed
    }
    done = subprocess.run([sys.executable, "-c", program, library], env=environment, check=True,
                          stdout=subprocess.PIPE, text=True)  # fmt: skip
    seconds, reason = done.stdout.strip().split(maxsplit=1)
    if reason != "None":
        raise build.BuildError(f"{library}: {reason}")
    return float(seconds)


def _hardware(measured: dict[str, Any]) -> str:
    environment = measured["environment"]
    if measured["device"] == "cuda":
        return environment["gpu"]
    return f"{environment['cpu']}, {environment['threads']} threads"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    dtypes = {dtype_name(dtype): None for operator in operators() for dtype in operator.tolerances}
    common = argparse.ArgumentParser(add_help=False)
    add_device_option(common)
    common.add_argument("--out", type=Path, default=RESULTS, help="folder; default: docs/results")

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    op = commands.add_parser("op", parents=[common], description=METHOD + " ".join(CLOCK.values()),
                             help="time and memory of forward and backward")  # fmt: skip
    add_operator_option(op)
    op.add_argument("--dtype", nargs="+", choices=dtypes, default=["float32"],
                    help="default: float32")  # fmt: skip
    op.add_argument("--sizes", nargs="+", type=int, help="default: the declared ones")
    op.add_argument("--quick", action="store_true", help="the first size only, three repeats")
    op.set_defaults(run=benchmark_operators)
    start = commands.add_parser("start", parents=[common], description=START_METHOD,
                                help="time of the first use and of later starts")  # fmt: skip
    start.set_defaults(run=benchmark_start)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
