"""Times the implementations of operators: ``hoconv benchmark [OPERATOR ...]``.

Values are new before every timed call, and results of some calls, chosen at random, are compared
with the reference's: a contender that is wrong loses its times. So does one that leaves the device
unusable, as an illegal memory access does; another process then measures the rest.
It also times ``torch.compile`` of the reference, but where the declaration says that this takes
many minutes, and the declared baselines, at the declared sizes.
With ``--grid`` it times what ``impl="auto"`` takes, and ``torch.compile`` of the reference, for the
calls of the declared grid, says which kernels ``auto`` launches on a GPU, and draws a map: shares
of the floor, and which of the two is faster.
With ``--against FOLDER`` it times nothing else than the implementations, each in turn with that of
another copy of the operator's package: a checkout, or what ``pip install --target`` made. It says
what is slower here, by more than the percent by which two processes of equal code may differ: not
slower where a slowdown of 5 % is excluded, unclear where the ratios of the times differ too much.
The exit code is 1 where something is slower, fails or could not be compared, and 2 where the folder
has no copy of the package.
Writes, and draws beside it where matplotlib is installed::

    op_<operator>_<device>_<dtype>.json, grid_<operator>_<device>_<dtype>.json
        command, date, method
        environment       hoconv.tools.doctor.environment(), with the commit
        package           distribution, version and commit of the package that declares the operator
        operator, device, dtype, axis
        copy_gb_per_s     copy bandwidth of this run: bytes read plus bytes written, 1e9 a second
        matmul_tflop_per_s    of a large matrix product of this run, 1e12 operations a second
        unavailable       implementation -> why it was not timed
        rows              one for each size, or call of the grid, and contender:
            size, sample, contender   size: of the grid, the name of the call
            error                 null, "out of memory", or what was raised: then the rest is null
            forward, backward
                median_ms, p20_ms, p80_ms, repeats
                least_bytes, least_flops    what the declaration says that a call needs at least
                floor_ms          the longer of these bytes over the copy bandwidth, and of these
                                  operations over those of the product
                floor_is          which of them: "memory" or "arithmetic"
                share_of_floor    floor_ms / median_ms: 1 is as fast as the hardware allows
                gb_per_s          the declared least bytes over the median
                tflop_per_s       the declared operations over the median
            extra_memory_bytes    most that a forward and a backward hold beyond their inputs
            least_memory_bytes    output and gradients; null only where every contender failed
            kernels               forward, backward -> the kernels launched; null on a CPU
            compared              timed calls whose output and gradients were compared with the
                                  reference's, and were right

    against_<operator>_<device>_<dtype>.json
        command, date, method, environment, package, operator, device, dtype, axis, unavailable
        against
            folder, commit        its name; of its checkout, null where it is in none
        errors            what could not be compared: size, contender, error
        changes           one for each size, implementation and direction:
            size, contender, way
            ratio, low, high    new / old, and its interval
            ratios              of each pair of processes
            verdict
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, track

from hoconv.dispatch.declaration import Operator, find, operators
from hoconv.tools.benchmarking import against
from hoconv.tools.benchmarking.functions import COMPILED, timed_functions
from hoconv.tools.benchmarking.kernels import launched
from hoconv.tools.benchmarking.measurement import (
    APART,
    OUT_OF_MEMORY,
    REPEATS,
    Contender,
    DeviceLost,
    copy_bandwidth,
    differentiable_leaves,
    matmul_peak,
    memory_limit,
    method,
    summary,
    take_turns,
    temporarily,
)
from hoconv.tools.benchmarking.processes import Elsewhere, call_each
from hoconv.tools.benchmarking.tables import kernels_table, tables
from hoconv.tools.benchmarking.verification import METHOD as VERIFIED
from hoconv.tools.benchmarking.verification import Verified
from hoconv.tools.commands import (
    add_device_option,
    add_operator_option,
    add_out_option,
    count,
    dtype_name,
    mark_operators,
    record,
    report_broken_packages,
    write_json,
)
from hoconv.tools.doctor import commit_of, package
from hoconv.tools.tables import show


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, shows and writes the results; returns an exit code."""
    argv = sys.argv[1:] if argv is None else argv
    dtypes = {dtype_name(dtype): dtype for each in operators() for dtype in each.tolerances}
    parser = argparse.ArgumentParser(
        prog="hoconv benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_operator_option(parser)
    add_device_option(parser)
    add_out_option(parser)
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=["float32"],
                        help="default: float32")  # fmt: skip
    parser.add_argument("--sizes", nargs="+", type=count, help="default: the declared ones")
    parser.add_argument("--grid", action="store_true", help="the declared grid, and its map")
    parser.add_argument("--quick", action="store_true",
                        help="the first size or call only, three repeats")  # fmt: skip
    parser.add_argument("--against", type=Path, metavar="FOLDER",
                        help="compare with an older copy of the package, a checkout, say; 1 is the "
                             "exit code where something became slower")  # fmt: skip
    arguments = parser.parse_args(mark_operators(argv))
    if arguments.quick and arguments.against:
        parser.error("--quick: three repeats show no noise; choose sizes by --sizes instead")
    head = record("hoconv benchmark", argv)
    failed = report_broken_packages() and not arguments.operator
    for operator in map(find, arguments.operator) if arguments.operator else operators():
        name = operator.name
        if arguments.grid and not operator.benchmark.grid:
            print(f"{name}: it declares no grid", file=sys.stderr)
            continue
        wanted = (dtypes[each] for each in arguments.dtype)
        for device, dtype in itertools.product(arguments.device, wanted):
            if dtype in operator.tolerances:
                run = _compare if arguments.against else _run
                try:
                    failed |= run(operator, device, dtype, arguments, head)
                except against.NoCopyError as error:
                    parser.error(f"--against: {error}")
            else:
                known = ", ".join(map(dtype_name, operator.tolerances))
                print(f"{name}: no {dtype_name(dtype)}; it has {known}", file=sys.stderr)
    return int(failed)


def _run(
    operator: Operator,
    device: str,
    dtype: torch.dtype,
    arguments: argparse.Namespace,
    head: dict[str, Any],
) -> bool:
    """Measures one operator; returns whether an implementation failed."""
    kind = "grid" if arguments.grid else "op"
    path = arguments.out / f"{kind}_{operator.name}_{device}_{dtype_name(dtype)}.json"
    measured = head
    for contents in measure(operator, device, dtype, arguments):
        measured = head | contents
        write_json(path, measured, say=False)  # it stays if a later size ends the process
    for table in tables(measured):
        show(table)
    if arguments.grid and device == "cuda":
        show(kernels_table(measured))
    print(path)
    for impl, reason in measured["unavailable"].items():
        print(f"{impl}: {reason}")
    failed = [row for row in measured["rows"] if row["error"]]
    for row in failed:
        print(f"{row['contender']} at {row['size']}: {row['error']}")
    if find_spec("matplotlib"):
        from hoconv.tools.benchmarking.charts import draw, draw_map

        (draw_map if arguments.grid else draw)(measured, path.with_suffix(".png"))
    broken = (row for row in failed if row["error"] != OUT_OF_MEMORY)
    return any(row["contender"] in operator.implementations for row in broken)


def _compare(
    operator: Operator,
    device: str,
    dtype: torch.dtype,
    arguments: argparse.Namespace,
    head: dict[str, Any],
) -> bool:
    """Compares one operator with another copy of it; returns whether an implementation is slower,
    failed, or could not be compared."""
    functions, unavailable = timed_functions(operator, device)
    impls = [each for each in operator.implementations if each in functions][1:]
    makers = operator.benchmark.calls(arguments.grid, arguments.sizes)
    calls = {size: functools.partial(make, torch.device(device), dtype)
             for size, make in makers.items()}  # fmt: skip
    title = f"{operator.name} {device} {dtype_name(dtype)}"
    show_progress = functools.partial(track, description=title, console=Console(stderr=True))
    changes, errors = against.compare(
        arguments.against, operator, device, impls, calls, show_progress
    )
    contents = {
        "method": against.METHOD,
        "package": package(operator),
        "operator": operator.name,
        "device": device,
        "dtype": dtype_name(dtype),
        "axis": operator.benchmark.axis,
        "unavailable": unavailable,
        "against": {
            "folder": arguments.against.resolve().name,
            "commit": commit_of(arguments.against),
        },
        "errors": [
            {"size": size, "contender": impl, "error": error}
            for (size, impl), error in errors.items()
        ],
        "changes": [change._asdict() | {"verdict": change.verdict} for change in changes],
    }
    if not impls:
        print(f"{operator.name}: only the reference runs on {device}: there is nothing to compare")
    if changes:
        show(against.table(changes, title, arguments.against))
    name = f"against_{operator.name}_{device}_{dtype_name(dtype)}.json"
    write_json(arguments.out / name, head | contents)
    for impl, reason in unavailable.items():
        print(f"{impl}: {reason}")
    for (size, impl), error in errors.items():
        print(f"{impl} at {size}: {error}")
    return bool(errors) or not changes or any(each.verdict == "slower" for each in changes)


def measure(
    operator: Operator, device_type: str, dtype: torch.dtype, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Times one operator on one device in one dtype.

    Yields the contents of its JSON after each size, with the rows so far.
    """
    options = arguments.grid, arguments.quick, arguments.sizes
    calls = _Calls(operator, device_type, dtype, *options)
    if arguments.grid:
        _compile_ahead(calls, functools.partial(_compile_one, operator.name, device_type, dtype,
                                                *options))  # fmt: skip
    bandwidth = copy_bandwidth(calls.device, calls.repeats)
    peak = matmul_peak(calls.device, dtype, False, calls.repeats)
    rows: list[dict[str, Any]] = []
    contents = {
        "method": method(APART, [device_type]) + VERIFIED,
        "package": package(operator),
        "operator": operator.name,
        "device": device_type,
        "dtype": dtype_name(dtype),
        "axis": operator.benchmark.axis,
        "copy_gb_per_s": bandwidth / 1e9,
        "matmul_tflop_per_s": peak / 1e12,
        "unavailable": calls.unavailable,
        "rows": rows,
    }
    title = f"{operator.name} {device_type} {dtype_name(dtype)}"
    steps = len(calls.makers) * len(calls.functions) * (calls.repeats + 1)
    elsewhere = functools.partial(Elsewhere, _measure_one, operator.name, device_type, dtype,
                                  *options, bandwidth, peak)  # fmt: skip
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=steps)

        def here(size: Any, errors: dict[str, str]) -> list[dict[str, Any]]:
            def say(contender: Contender) -> None:
                progress.update(task, advance=1, description=f"{title} {size}: {contender.name}")

            return calls.measure(size, errors, bandwidth, peak, say)

        other: Elsewhere | None = None  # the process that measures, if it is not this one
        for number, size in enumerate(calls.makers):
            errors: dict[str, str] = {}
            done = False
            while not done:
                try:
                    rows += (other or here)(size, errors)
                    done = True
                except DeviceLost as lost:
                    errors[lost.contender] = lost.reason
                    if other:
                        other.close()
                    other = elsewhere()
            yield contents
            progress.update(task, completed=steps * (number + 1) // len(calls.makers))
        progress.update(task, completed=steps, description=title)
    if other:
        other.close()


class _Calls:
    """The calls of a record in this process: how to make their samples, and what computes them."""

    def __init__(
        self, operator: Operator, device_type: str, dtype: torch.dtype, grid: bool, quick: bool,
        sizes: Sequence[int] | None,
    ) -> None:  # fmt: skip
        self.operator, self.dtype, self.device = operator, dtype, torch.device(device_type)
        self.repeats = REPEATS[device_type]
        self.functions, self.unavailable = timed_functions(operator, device_type)
        self.makers = operator.benchmark.calls(grid, sizes)
        if grid:
            # What auto takes is the last that is available.
            names = COMPILED, [*self.functions][-1]
            self.functions = {name: self.functions[name] for name in names}
        if quick:
            self.makers, self.repeats = dict(itertools.islice(self.makers.items(), 1)), 3

    def measure(
        self, size: Any, errors: dict[str, str], bandwidth: float, peak: float,
        say: Callable[[Contender], None],
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Returns the rows of a call, those of contenders in `errors` without being run.

        Raises:
            DeviceLost: as :func:`take_turns`.
        """
        operator, device = self.operator, self.device
        with (
            memory_limit(device.type),
            temporarily(torch.backends.cudnn, allow_tf32=False),  # float32 is timed as float32
        ):
            sample = self.makers[size](device, self.dtype)
            torch.compiler.reset()
            contenders = [
                Contender(name, function, sample)
                for name, function in self.functions.items()
                if name != COMPILED or operator.benchmark.compiles(sample)
            ]
            for contender in contenders:
                contender.error = errors.get(contender.name)
            turn = Verified(operator, sample, self.dtype)
            least_memory = take_turns(contenders, turn, device, self.repeats, say)
            cost = operator.cost(sample)
            rows = []
            for contender in contenders:
                times = contender.times_ms
                rows.append({
                    "size": size,
                    "sample": sample.name,
                    "contender": contender.name,
                    "forward": summary(
                        times["forward"], cost.forward_bytes, cost.forward_flops, bandwidth, peak
                    ),
                    "backward": summary(
                        times["backward"], cost.backward_bytes, cost.backward_flops, bandwidth, peak
                    ),
                    "extra_memory_bytes": contender.extra_memory,
                    "least_memory_bytes": least_memory,
                    "kernels": launched(contender),
                    "compared": turn.compared.get(contender.name, 0),
                    "error": contender.error,
                })  # fmt: skip
        return rows


def _compile_ahead(calls: _Calls, compile_one: Callable[[Any], None]) -> None:
    """Lets torch.compile compile all calls, on all cores: most of the time of a map is its. Where
    they are timed it finds them in the cache of Inductor."""
    cores = len(os.sched_getaffinity(0))
    done = call_each(compile_one, calls.makers, min(cores, len(calls.makers)))
    for _ in track(done, "torch.compile", len(calls.makers), console=Console(stderr=True)):
        pass


def _compile_one(
    name: str, device_type: str, dtype: torch.dtype, grid: bool, quick: bool,
    sizes: Sequence[int] | None, size: Any,
) -> None:  # fmt: skip
    """Lets torch.compile compile a call, in a process of its own."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # there is a process for each core
    operators()  # imports the package that declares it
    calls = _Calls(find(name), device_type, dtype, grid, quick, sizes)
    sample = calls.makers[size](calls.device, dtype)
    if calls.operator.benchmark.compiles(sample):
        contender = Contender(COMPILED, calls.functions[COMPILED], sample)
        contender.grads = [torch.ones_like(t) for t in differentiable_leaves(contender.forward())]
        contender.both()


def _measure_one(
    name: str, device_type: str, dtype: torch.dtype, grid: bool, quick: bool,
    sizes: Sequence[int] | None, bandwidth: float, peak: float, size: Any, errors: dict[str, str],
) -> list[dict[str, Any]]:  # fmt: skip
    """Returns the rows of a call that is measured in a process of its own, as `_Calls.measure`."""
    operators()  # imports the package that declares it
    calls = _Calls(find(name), device_type, dtype, grid, quick, sizes)
    return calls.measure(size, errors, bandwidth, peak, lambda _: None)


if __name__ == "__main__":
    sys.exit(main())
