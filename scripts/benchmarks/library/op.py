"""Times the implementations of every declared operator: ``python scripts/benchmark.py op``.

It also times ``torch.compile`` of the reference and the declared baselines, at the declared sizes.
Writes, and draws beside it::

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
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from charts import grid, hardware, lines, save, sizes_axis
from common import count, show
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.measurement import (
    APART,
    REPEATS,
    Contender,
    copy_bandwidth,
    memory_limit,
    method,
    summary,
    take_turns,
    temporarily,
    time_apart,
)
from hoconv.commands import add_operator_option, dtype_name, write, write_json
from hoconv.declaration import Operator, operators
from hoconv.implementations import BrokenImplementationError, ImplementationError, choose

COMPILED = "torch.compile"
METHOD = method(APART)


def add_options(parser: argparse.ArgumentParser) -> None:
    dtypes = {dtype_name(dtype): None for operator in operators() for dtype in operator.tolerances}
    add_operator_option(parser)
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=["float32"],
                        help="default: float32")  # fmt: skip
    parser.add_argument("--sizes", nargs="+", type=count, help="default: the declared ones")
    parser.add_argument("--quick", action="store_true", help="the first size only, three repeats")


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes the results."""
    for operator in operators():
        if operator.name not in arguments.operator:
            continue
        for device in arguments.device:
            for dtype in operator.tolerances:
                if dtype_name(dtype) in arguments.dtype:
                    measured = head | measure(operator, device, dtype, arguments)
                    show(_table(measured))
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
    """Times one operator on one device in one dtype; returns the contents of its JSON."""
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
    with (
        Progress(console=Console(stderr=True)) as progress,
        memory_limit(device_type),
        temporarily(torch.backends.cudnn, allow_tf32=False),  # float32 is timed as float32
    ):
        task = progress.add_task(title, total=steps)
        for size in sizes:
            sample = operator.benchmark.sample(size, device, dtype)
            torch.compiler.reset()
            contenders = [Contender(*named, sample) for named in functions.items()]

            def say(contender: Contender, size: int = size) -> None:
                progress.update(task, advance=1, description=f"{title} {size}: {contender.name}")

            least_memory = take_turns(contenders, time_apart, device, repeats, say)
            cost = operator.cost(sample)
            for contender in contenders:
                times = contender.times_ms
                rows.append({
                    "size": size,
                    "sample": sample.name,
                    "contender": contender.name,
                    "forward": summary(times["forward"], cost.forward_bytes, bandwidth),
                    "backward": summary(times["backward"], cost.backward_bytes, bandwidth),
                    "extra_memory_bytes": contender.extra_memory,
                    "least_memory_bytes": least_memory,
                    "error": contender.error,
                })  # fmt: skip
        progress.update(task, completed=steps, description=title)
    return {
        "method": method(APART, [device_type]),
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
) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """Returns contender -> function, and implementation -> why it cannot run."""

    def public(impl: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: operator.function(*args, impl=impl, **kwargs)

    functions, unavailable = {"reference": public("reference")}, {}
    functions |= operator.benchmark.baselines
    functions[COMPILED] = torch.compile(public("reference"), dynamic=False, fullgraph=True)
    for impl in operator.implementations:
        try:
            choose(operator, impl, device_type)
        except ImplementationError as error:
            if not isinstance(error, BrokenImplementationError):  # each of its rows will say why
                unavailable[impl] = str(error)
                continue
        functions[impl] = public(impl)
    return functions, unavailable


def _table(measured: dict[str, Any]) -> Table:
    title = f"{measured['operator']}, {measured['dtype']}, {hardware(measured)}, "
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
    figure, panels = grid(1, 2)
    for panel, direction in zip(panels[0], ("forward", "backward"), strict=True):
        lines(panel, rows, lambda row, key=direction: row[key] and row[key]["median_ms"])
        floors = {row["size"]: row[direction]["floor_ms"] for row in rows if row[direction]}
        panel.plot([*floors], [*floors.values()], "k.--", label="floor: bytes / copy bandwidth")
        panel.set_title(direction)
        sizes_axis(panel, rows, measured["axis"])
    panels[0][0].set_ylabel("time of a call, ms")
    versions = f"{measured['dtype']}, torch {measured['environment']['torch']}"
    save(figure, f"{measured['operator']}: {hardware(measured)}, {versions}", path)
