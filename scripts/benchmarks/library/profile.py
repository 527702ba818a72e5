"""Reads the GPU's counters of the largest kernels: ``python scripts/benchmark.py profile``.

The kernels are those of the fused high-order layer, in every precision, and of the approximate
matrix product, with some multipliers. The command needs NVIDIA's profiler ncu, and the permission
to read counters. Writes::

    profile_cuda.json
        command, date, method, environment
        kernels           one for each case and kernel:
            case, kernel (forward, backward, multiply_matrices), registers_per_thread
            milliseconds              at the clock that ncu sets: not the benchmark's
            million_instructions      of warps
            percent                   of the device's peak, by unit:
                issue                 cycles in which a scheduler issues an instruction
                tensor_cores          cycles in which they are busy
                shared_memory         passes of loads and stores through L1 and shared memory
                dram                  bytes
                warps                 resident
            stalls                    reason -> cycles that a warp waits for each instruction that
                                      it issues, if at least 0.1
"""

from __future__ import annotations

import argparse
import csv
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

import hoconv
from benchmarks.library.layer import PRECISIONS, layer_sample
from benchmarks.library.precision import Precision
from hoconv import approx, jit
from hoconv.tools.commands import write_json
from hoconv.tools.tables import show

IMAGES = 64
SIZE = 4096
MULTIPLIERS = "exact", "mbm12", "mbm16", "mbm32"
METHOD = (
    f"NVIDIA Nsight Compute, impl=cuda: one forward and one backward kernel of the layer, {IMAGES} "
    f"images, and one of the product, {SIZE} x {SIZE} x {SIZE}, each measured in several passes "
    "with cold caches. Stalls of a warp follow the profiler's own names."
)
_KERNELS = "forward|backward|multiply_matrices"
_PERCENT = {
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "tensor_cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "shared_memory": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
_STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "gmma", "long_scoreboard",
    "math_pipe_throttle", "mio_throttle", "no_instruction", "not_selected", "selected",
    "short_scoreboard", "wait",
)  # fmt: skip
_LEAST_STALL = 0.1  # cycles an instruction; shorter stalls are left out
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
_OTHER = ("gpu__time_duration.sum", "smsp__inst_executed.sum", "launch__registers_per_thread")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES),
                        help="default: all")  # fmt: skip


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes the results."""
    if "cuda" not in arguments.device:
        obstacle = None if torch.cuda.is_available() else jit.no_gpu()
        raise SystemExit(f"profile: {obstacle or 'only a GPU has these counters; drop --device'}")
    kernels = [kernel for name in arguments.case for kernel in _profile(name)]
    table = Table("case", "kernel", "ms", "M instructions", "registers", *_PERCENT,
                  title="counters; percent of the device's peak")  # fmt: skip
    for kernel in kernels:
        table.add_row(
            kernel["case"],
            kernel["kernel"],
            f"{kernel['milliseconds']:.3f}",
            f"{kernel['million_instructions']:.0f}",
            f"{kernel['registers_per_thread']}",
            *(f"{kernel['percent'][unit]:.0f}" for unit in _PERCENT),
        )
    measured = {"method": METHOD, "kernels": kernels}
    write_json(arguments.out / "profile_cuda.json", head | measured)
    show(table)


def _profile(case: str) -> list[dict[str, Any]]:
    """Runs a case under ncu, in a process of its own; returns the counters of its kernels.

    Raises:
        SystemExit: ncu is not installed, or fails.
    """
    metrics = [*_PERCENT.values(), *(_STALL.format(stall) for stall in _STALLS), *_OTHER]
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base",
               "--kernel-name", f"regex:^({_KERNELS})", "--metrics", ",".join(metrics),
               sys.executable, "-m", "benchmarks.library.profile", case]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError:
        raise SystemExit("ncu was not found; install NVIDIA Nsight Compute") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or len(lines) < 3:
        raise SystemExit(f"ncu could not measure {case}:\n{done.stdout}{done.stderr}")
    names, _units, *rows = csv.reader(lines)
    return [_kernel(case, dict(zip(names, row, strict=True))) for row in rows]


def _kernel(case: str, row: dict[str, str]) -> dict[str, Any]:
    def value(metric: str) -> float:
        return float(row[metric].replace(",", ""))

    stalls = {stall: round(value(_STALL.format(stall)), 2) for stall in _STALLS}
    kernel = re.search(_KERNELS, row["Kernel Name"])
    assert kernel, row
    return {
        "case": case,
        "kernel": kernel[0],
        "registers_per_thread": int(value("launch__registers_per_thread")),
        "milliseconds": value("gpu__time_duration.sum") / 1e6,
        "million_instructions": value("smsp__inst_executed.sum") / 1e6,
        "percent": {unit: value(metric) for unit, metric in _PERCENT.items()},
        "stalls": {stall: ratio for stall, ratio in stalls.items() if ratio >= _LEAST_STALL},
    }


def _layer(precision: Precision) -> None:
    sample = layer_sample(IMAGES, torch.device("cuda"), precision.dtype)
    inputs = [t.detach().requires_grad_() for t in sample.args]
    with precision.in_force(products=False, benchmark=True):
        out = hoconv.high_order_layer(*inputs, impl="cuda", **sample.kwargs)
        torch.autograd.grad(out, inputs, torch.ones_like(out))


def _product(multiplier: str) -> None:
    a, b = torch.randn(2, SIZE, SIZE, device="cuda")
    approx.matmul(a, b, multiplier, impl="cuda")


CASES: dict[str, Callable[[], None]] = {
    **{f"layer {p.name}": functools.partial(_layer, p) for p in PRECISIONS["cuda"]},
    **{f"approx {name}": functools.partial(_product, name) for name in MULTIPLIERS},
}

if __name__ == "__main__":
    CASES[sys.argv[1]]()
    torch.cuda.synchronize()
