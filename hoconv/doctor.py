"""Says what hoconv finds on this machine: ``python -m hoconv.doctor``, for a bug report.

Versions, compilers, devices, implementations and why not, and what ``impl="auto"`` means for every
declared operator. Compiles nothing unless asked to with ``--build``, and so cannot tell what is
broken, except packages of operators that cannot be imported. Exit code 1 where something is.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import hoconv
from hoconv import jit
from hoconv.declaration import Operator, broken_packages, operators
from hoconv.implementations import (
    BrokenImplementationError,
    ImplementationError,
    candidates,
    choose,
    implementations,
    obstacle,
)
from hoconv.jit import cache

_BROKEN = "broken: "


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hoconv.doctor", description=__doc__)
    parser.add_argument("--build", action="store_true",
                        help="compile and load, and see what is broken and what `auto` really "
                             "chooses")  # fmt: skip
    arguments = parser.parse_args(argv)
    untried = "" if arguments.build else ", unless it turns out to be broken: --build tries"
    broken = False
    for title, facts in (
        ("Environment", _environment_facts()),
        ("Compilers", _compiler_facts()),
        ("Implementations", _implementation_facts(arguments.build)),
        (f"What impl=auto means{untried}", _auto_facts(arguments.build)),
        ("What is broken", _broken_facts(arguments.build)),
    ):
        if not facts:
            continue
        print(title)
        width = max(len(name) for name in facts)
        for name, fact in facts.items():
            print(f"  {name:<{width}}  {fact}")
            broken |= fact.startswith(_BROKEN)
    return int(broken)


def environment() -> dict[str, Any]:
    """Versions and hardware: what a measurement needs beside it to be compared with another.

    Returns:
        A dict for JSON; None for what is not there. ``gpu`` is the first GPU's name, ``driver``
        the NVIDIA driver's version, ``cuda`` the CUDA version torch was built with,
        ``cpu_capability`` the instruction set torch uses, ``threads`` how many, and ``commit`` that
        of the checkout hoconv is imported from, with ``-dirty`` where tracked files differ from it.
    """
    return {
        "hoconv": hoconv.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pytorch_lightning": _version("pytorch-lightning"),
        "cuda": torch.version.cuda,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


def devices() -> tuple[str, ...]:
    """The device types that are here: ``"cpu"``, and ``"cuda"`` where PyTorch sees a GPU."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def _environment_facts() -> dict[str, str]:
    facts = {name: str(value or "none") for name, value in environment().items() if name != "gpu"}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        facts[f"gpu {index}"] = f"{gpu.name}, {capability}, {gpu.total_memory / 2**30:.0f} GiB"
    if torch.cuda.device_count() == 0:
        facts["gpu"] = jit.no_gpu()
    return facts


def _compiler_facts() -> dict[str, str]:
    facts = {}
    for label, library in (("C++", "cpu"), ("CUDA", "cuda")):
        try:
            path = jit.compiler(library)
            version = _first_line(path, "--version", containing=".")
            facts[label] = f"{path}: {version or 'does not say its version'}"
        except jit.BuildError as error:
            facts[label] = str(error)
    facts["build cache"] = str(cache.folder())
    return facts


def _implementation_facts(compiling: bool) -> dict[str, str]:
    facts = implementations()
    for name, library in (("cpp", "cpu"), ("cuda", "cuda")):
        if facts[name] == "available":
            facts[name] = _tried(library) if compiling else _looked_for(library)
    return facts


def _tried(library: str) -> str:
    reason = jit.load(library)
    return f"{_BROKEN}{reason}" if reason else "built and loaded"


def _looked_for(library: str) -> str:
    try:
        return "built" if jit.find(library) else "can be built"
    except jit.BuildError as error:
        return f"{_BROKEN}{error}"


def _auto_facts(compiling: bool) -> dict[str, str]:
    describe = _chosen if compiling else _expected
    return {
        operator.name: "; ".join(f"{device}: {describe(operator, device)}" for device in devices())
        for operator in operators()
    }


def _chosen(operator: Operator, device_type: str) -> str:
    try:
        choice = choose(operator, "auto", device_type)
        return f"{choice.name} ({choice.why})"
    except ImplementationError as error:
        return f"none: {error}"


def _expected(operator: Operator, device_type: str) -> str:
    """What `choose` will say unless something is broken, which only trying shows."""
    able = (n for n in candidates(operator, device_type) if not obstacle(operator, n, device_type))
    return next(able, "none")


def _broken_facts(compiling: bool) -> dict[str, str]:
    """Packages, and with `compiling` the implementations for the devices here."""
    facts = {name: f"{_BROKEN}{reason}" for name, reason in broken_packages().items()}
    if compiling:
        for operator, device in itertools.product(operators(), devices()):
            for impl in candidates(operator, device):
                try:
                    choose(operator, impl, device)
                except BrokenImplementationError as error:
                    reason = str(error).partition(": ")[2].splitlines()[0]
                    facts[f"{operator.name} {impl} on {device}"] = f"{_BROKEN}{reason}"
                except ImplementationError:
                    pass  # something is missing, which is said above
    return facts


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    root = Path(hoconv.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    return _first_line(
        "git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
    )


def _first_line(*command: str, containing: str = "") -> str | None:
    """The first such line that a program prints; None where there is none or it fails."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return next((line.strip() for line in output.splitlines() if containing in line), None)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
