"""Times the first use of the library: ``python scripts/benchmark.py start``.

Writes::

    start_<library>.json
        command, date, method, environment, library
        first_s           import and load with an empty cache, compilation included
        later_s           the same with the library in the cache: median_s, and each_s
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from common import console
from rich.table import Table

from hoconv import jit
from hoconv.commands import write_json

STARTS = 5
METHOD = (
    "Each start is a fresh process; the clock starts after `import torch` (and, for CUDA, after "
    "torch.cuda.init()), and stops when hoconv is imported and the library loaded. The first finds "
    "an empty cache and compiles."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds none: the command has no options of its own."""


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes the results."""
    table = Table("library", "first use, compiling", "later starts, median", title="Start, s")
    for library in arguments.device:
        with tempfile.TemporaryDirectory() as cache:
            first, *later = (_start(library, cache) for _ in range(1 + STARTS))
        median = statistics.median(later)
        table.add_row(library, f"{first:.2f}", f"{median:.3f}")
        measured = {
            "method": METHOD,
            "library": library,
            "first_s": first,
            "later_s": {"median_s": median, "each_s": later},
        }
        write_json(arguments.out / f"start_{library}.json", head | measured)
    console().print(table)


def _start(library: str, cache: str) -> float:
    """Measures the seconds in which a new process imports hoconv and loads a library.

    Raises:
        BuildError: it cannot be compiled or loaded.
    """
    program = """
import sys, time, torch
if sys.argv[1] == "cuda":
    torch.cuda.init()
begin = time.perf_counter()
from hoconv import jit
reason = jit.load(sys.argv[1])
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
        raise jit.BuildError(f"{library}: {reason}")
    return float(seconds)
