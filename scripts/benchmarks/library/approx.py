"""Times approximate products beside PyTorch's: ``python scripts/benchmark.py approx``.

The problems are a matrix product and a convolution as in the middle of a ResNet, of dense operands,
with every multiplier. Writes, and draws beside it::

    approx_<device>.json
        command, date, method
        environment       hoconv.tools.doctor.environment(), with the commit
        device, threads
        unavailable       why our kernels were not timed, or null
        scalar_gmac_per_s multiplier -> multiply-accumulates, 1e9 a second, of the scalar loop
                          that `method` describes; CPU only
        rows              one for each problem and contender, a multiplier or "torch":
            problem, contender, macs    multiply-accumulates of a forward
            error                 null, "out of memory", or what was raised: then the rest is null
            forward, backward
                median_ms, p20_ms, p80_ms, repeats
                gmac_per_s        1e9 multiply-accumulates a second; a backward has twice as many
                share_of_torch    of PyTorch's rate in the same direction
                times_scalar      times the rate of the scalar loop; CPU, forward only
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from hoconv import approx
from hoconv.dispatch.declaration import Sample
from hoconv.dispatch.implementations import ImplementationError, choose
from hoconv.jit.generated import compile_cpp
from hoconv.ops.approx.operator import CONV2D
from hoconv.tools.benchmarking.charts import COLOURS, save
from hoconv.tools.benchmarking.measurement import (
    APART,
    REPEATS,
    Contender,
    memory_limit,
    method,
    percentiles,
    take_turns,
    temporarily,
    time_apart,
)
from hoconv.tools.commands import count, hardware, write_json
from hoconv.tools.tables import show

TORCH = "torch"
SCALAR_ROWS, SCALAR_REPEATS = 32, 5
SCALAR = """
#include <cstdint>
#include "approx/multipliers.h"

extern "C" void scalar_matmul(const char* multiplier, const float* a, const float* b, float* out,
                              int64_t M, int64_t K, int64_t N) {
  hoconv::approx::with_multiplier(multiplier, [&](auto m) {
    for (int64_t i = 0; i < M; ++i)
      for (int64_t j = 0; j < N; ++j) {
        float sum = 0;
        for (int64_t k = 0; k < K; ++k) {
          float product = m.multiply(a[i * K + k], b[j * K + k]);
          hoconv::approx::keep_rounded(product);
          sum += product;
        }
        out[i * N + j] = sum;
      }
  });
}
"""
_SCALAR_METHOD = (
    " Scalar loop: three nested loops over the multiplier's definition in C++, the innermost over "
    "k, with both operands contiguous, one thread, compiled with the flags of the library; an "
    "empty asm statement on each product keeps the compiler from vectorising it. Median of "
    f"{SCALAR_REPEATS} calls of {SCALAR_ROWS} rows by 512 columns, K = 512."
)
METHOD = method(APART) + _SCALAR_METHOD


@dataclass(frozen=True)
class Problem:
    """A product: its approximate function, PyTorch's, the shapes of its operands, its cost."""

    name: str
    approximate: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    macs: int


def problems(matmul_size: int, images: int, channels: int) -> list[Problem]:
    """Returns a product of square matrices, and a convolution of images of 14 x 14 pixels."""
    n, pixels = matmul_size, 14 * 14
    return [
        Problem(f"matrix product, {n} x {n} x {n}", approx.matmul, torch.matmul,
                ((n, n), (n, n)), n**3),
        Problem(f"convolution, {images} x {channels} x 14 x 14, {channels} filters of 3 x 3",
                functools.partial(approx.conv2d, padding=1), functools.partial(F.conv2d, padding=1),
                ((images, channels, 14, 14), (channels, channels, 3, 3)),
                images * pixels * 9 * channels**2),
    ]  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--multiplier", nargs="+", choices=approx.MULTIPLIERS,
                        default=list(approx.MULTIPLIERS), help="default: all")  # fmt: skip
    parser.add_argument("--size", type=count, help="rows and columns of the matrices; default: 512 "
                        "on a CPU, 4096 on a GPU")  # fmt: skip
    parser.add_argument("--images", type=count, default=32, help="default: 32")
    parser.add_argument("--channels", type=count, default=256, help="default: 256")
    parser.add_argument("--threads", type=count, default=torch.get_num_threads(),
                        help="of a CPU; default: PyTorch's")  # fmt: skip


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes the results."""
    threads = torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    try:
        for device in arguments.device:
            measured = head | measure(device, arguments)
            show(_table(measured))
            if measured["unavailable"]:
                print(measured["unavailable"])
            path = arguments.out / f"approx_{device}.json"
            write_json(path, measured)
            draw(measured, path.with_suffix(".png"))
    finally:
        torch.set_num_threads(threads)


def measure(device_type: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Times all problems on one device; returns the contents of its JSON."""
    device, impl = torch.device(device_type), "cuda" if device_type == "cuda" else "cpp"
    multipliers, unavailable = arguments.multiplier, None
    try:
        choose(CONV2D, impl, device_type)
    except ImplementationError as error:
        multipliers, unavailable = [], str(error)
    on_cpu = device_type == "cpu"
    scalar = {m: _scalar_gmac_per_s(m) for m in multipliers} if on_cpu else {}
    size = arguments.size or (512 if on_cpu else 4096)
    rows = []
    with (
        Progress(console=Console(stderr=True)) as progress,
        memory_limit(device_type),
        temporarily(torch.backends.cudnn, allow_tf32=False),
    ):
        for problem in problems(size, arguments.images, arguments.channels):
            task = progress.add_task(
                problem.name, total=(1 + len(multipliers)) * (1 + REPEATS[device_type])
            )

            def say(contender: Contender, task: Any = task) -> None:
                progress.update(task, advance=1)

            operands = tuple(torch.randn(shape, device=device) for shape in problem.shapes)
            sample = Sample(operands)
            contenders = [Contender(TORCH, problem.exact, sample)]
            for name in multipliers:
                function = functools.partial(problem.approximate, multiplier=name, impl=impl)
                contenders.append(Contender(name, function, sample))
            take_turns(contenders, time_apart, device, REPEATS[device_type], say)
            rows += [_row(problem, c, contenders[0], scalar.get(c.name)) for c in contenders]
    return {
        "method": method(APART, [device_type]) + (_SCALAR_METHOD if on_cpu else ""),
        "device": device_type,
        "threads": arguments.threads,
        "unavailable": unavailable,
        "scalar_gmac_per_s": scalar,
        "rows": rows,
    }


def _row(
    problem: Problem, contender: Contender, torchs: Contender, scalar: float | None
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "problem": problem.name,
        "contender": contender.name,
        "macs": problem.macs,
        "error": contender.error,
    }
    for direction, macs in (("forward", problem.macs), ("backward", 2 * problem.macs)):
        row[direction] = None
        if contender.error is None:
            times = percentiles(contender.times_ms[direction])
            rate = 1e-6 * macs / times["median_ms"]
            exact = torchs.times_ms[direction]
            row[direction] = times | {
                "gmac_per_s": rate,
                "share_of_torch": statistics.median(exact) / times["median_ms"] if exact else None,
            }
            if direction == "forward" and scalar is not None:
                row[direction]["times_scalar"] = rate / scalar
    return row


def _scalar_gmac_per_s(multiplier: str) -> float:
    function = ctypes.CDLL(str(compile_cpp("approx", SCALAR))).scalar_matmul
    M, K, N = SCALAR_ROWS, 512, 512
    a, b, out = torch.randn(M, K), torch.randn(N, K), torch.empty(M, N)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, out)]
    sizes = [ctypes.c_int64(n) for n in (M, K, N)]
    seconds = []
    for _ in range(1 + SCALAR_REPEATS):
        begin = time.perf_counter()
        function(multiplier.encode(), *pointers, *sizes)
        seconds.append(time.perf_counter() - begin)
    expected = approx.matmul(a, b.mT, multiplier, impl="cpp")
    assert torch.equal(out, expected), "the scalar loop is not the definition"
    return 1e-9 * M * K * N / statistics.median(seconds[1:])


def _table(measured: dict[str, Any]) -> Table:
    title = f"approximate products, {hardware(measured)}, {measured['threads']} in use"
    table = Table(title=title if measured["device"] == "cpu" else hardware(measured), box=SIMPLE)
    table.add_column("problem")
    table.add_column("multiplier")
    for direction in ("forward", "backward"):
        for column in (f"{direction}\nms", "\nGMAC/s", "share of\ntorch"):
            table.add_column(column, justify="right")
    table.add_column("times the\nscalar loop", justify="right")
    problem = None
    for row in measured["rows"]:
        cells = ["" if row["problem"] == problem else row["problem"], row["contender"]]
        if row["problem"] != problem and problem is not None:
            table.add_section()
        problem = row["problem"]
        for direction in ("forward", "backward"):
            timing = row[direction]
            cells += ["[red]failed", "", ""] if timing is None else [
                f"{timing['median_ms']:.4g}",
                f"{timing['gmac_per_s']:.4g}",
                f"{timing['share_of_torch']:.0%}" if timing["share_of_torch"] else "",
            ]  # fmt: skip
        times = row["forward"] and row["forward"].get("times_scalar")
        table.add_row(*cells, f"{times:.3g}" if times else "")
    return table


def draw(measured: dict[str, Any], path: Path) -> None:
    """Draws the rates, forward and backward, as a PNG with a panel for each problem."""
    names = list(dict.fromkeys(row["problem"] for row in measured["rows"]))
    figure = Figure(figsize=(6 * len(names), 5), layout="constrained")
    for panel, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        rows = [r for r in measured["rows"] if r["problem"] == name and r["error"] is None]
        for i, direction in enumerate(("forward", "backward")):
            positions = [p + 0.4 * i - 0.2 for p in range(len(rows))]
            rates = [row[direction]["gmac_per_s"] for row in rows]
            panel.bar(positions, rates, 0.4, label=direction, color=COLOURS[i + 1])
        panel.set_xticks(range(len(rows)), [row["contender"] for row in rows], rotation=45)
        panel.set(title=name, ylabel="10⁹ multiply-accumulates a second")
    save(figure, f"Approximate products: {hardware(measured)}", path)
