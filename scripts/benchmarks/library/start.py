"""Times the first use of the library: ``python scripts/benchmark.py start``.

Writes::

    start_<device>.json
        command, date, method, environment, device
        first_s           import and load with an empty cache, compilation included
        later_s           the same with the libraries in the cache: median_s, and each_s
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from rich.table import Table

from hoconv import jit
from hoconv.tools.commands import write_json
from hoconv.tools.tables import show

STARTS = 5
METHOD = (
    "Each start is a fresh process; the clock starts after `import torch` (and, for CUDA, after "
    "torch.cuda.init()), and stops when hoconv is imported and the libraries of all operators for "
    "the device are loaded, one after another. The first finds an empty cache and compiles."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds none: the command has no options of its own."""


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes the results."""
    table = Table("libraries for", "first use, compiling", "later starts, median", title="Start, s")
    for device in arguments.device:
        with tempfile.TemporaryDirectory() as cache:
            first, *later = (_start(device, cache) for _ in range(1 + STARTS))
        median = statistics.median(later)
        table.add_row(device, f"{first:.2f}", f"{median:.3f}")
        measured = {
            "method": METHOD,
            "device": device,
            "first_s": first,
            "later_s": {"median_s": median, "each_s": later},
        }
        write_json(arguments.out / f"start_{device}.json", head | measured)
    show(table)


def _start(device: str, cache: str) -> float:
    """Measures the seconds in which a new process imports hoconv and loads a device's libraries.

    Raises:
        BuildError: one of them cannot be compiled or loaded.
    """
    program = """
import sys, time, torch
if sys.argv[1] == "cuda":
    torch.cuda.init()
begin = time.perf_counter()
from hoconv.dispatch.declaration import libraries
reason = next(filter(None, (each.load() for each in libraries(sys.argv[1]))), None)
print(time.perf_counter() - begin, reason)
"""
    environment = {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": cache,
        "PYTHONPATH": os.pathsep.join(sys.path),  # hoconv need not be installed
    }
    done = subprocess.run([sys.executable, "-c", program, device], env=environment, check=True,
                          stdout=subprocess.PIPE, text=True)  # fmt: skip
    seconds, reason = done.stdout.strip().split(maxsplit=1)
    if reason != "None":
        raise jit.BuildError(f"{device}: {reason}")
    return float(seconds)
