"""Says what hoconv finds on this machine: ``hoconv doctor``, for a bug report.

It shows versions, compilers and devices, which implementations can run or what they lack, and what
``impl="auto"`` means for every declared operator. Without ``--build`` it compiles nothing, and the
only broken code that it finds are packages of operators that cannot be imported. The exit code is 1
if something is broken.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import hoconv
from hoconv import jit
from hoconv.dispatch.declaration import GROUP, Operator, broken_packages, libraries, operators
from hoconv.dispatch.implementations import (
    BrokenImplementationError,
    ImplementationError,
    candidates,
    choose,
    implementations,
    obstacle,
)
from hoconv.jit import cache
from hoconv.tools.tables import print_line

_BROKEN = "broken: "


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hoconv doctor", description=__doc__)
    parser.add_argument("--build", action="store_true",
                        help="compile and load, and see what is broken and what `auto` really "
                             "chooses")  # fmt: skip
    arguments = parser.parse_args(argv)
    untried = "" if arguments.build else ", unless it turns out to be broken: --build tries"
    broken, shown = False, {""}  # a compiler's further lines, shown once
    for title, facts in (
        ("Environment", _environment_facts()),
        ("Compilers", _compiler_facts()),
        ("Implementations", implementations()),
        ("Compiled code", _library_facts(arguments.build)),
        (f"What impl=auto means{untried}", _auto_facts(arguments.build)),
        ("What is broken", _broken_facts(arguments.build)),
    ):
        if not facts:
            continue
        print(title)
        width = max(len(name) for name in facts)
        for name, fact in facts.items():
            line, _, details = fact.partition("\n")
            print_line(f"  {name:<{width}}  {line}", indent=width + 4)
            if details not in shown:
                print(textwrap.indent(details, "    "))
            shown.add(details)
            broken |= fact.startswith(_BROKEN)
    return int(broken)


def environment() -> dict[str, Any]:
    """Returns versions and hardware, without which measurements cannot be compared.

    Returns:
        A dict for JSON; None for what is not there. ``gpu`` is the first GPU's name, ``driver``
        the NVIDIA driver's version, ``cuda`` the CUDA version that torch was built with,
        ``cpu_capability`` the instruction set that torch uses, and ``threads`` how many threads.
        ``commit`` is that of hoconv's checkout, with ``-dirty`` if tracked files differ from it
        outside its folder ``docs``, where a measurement writes records before the next one begins.
    """
    return {
        "hoconv": hoconv.__version__,
        "commit": commit_of(Path(hoconv.__file__).parent),
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


def package(operator: Operator) -> dict[str, str | None]:
    """Returns the package that declares an operator, for JSON.

    Returns:
        Its ``distribution`` and ``version``, None where it is not installed, and the ``commit`` of
        its checkout, None where it is in none.
    """
    top = operator.function.__module__.partition(".")[0]
    names = {"hoconv": "hoconv"}
    for entry in metadata.entry_points(group=GROUP):
        if entry.dist:
            names[entry.module.partition(".")[0]] = entry.dist.name
    distribution = names.get(top)
    version = _version(distribution) if distribution else None
    file = getattr(sys.modules[top], "__file__", None)
    commit = commit_of(Path(file).parent) if file else None
    return {"distribution": distribution, "version": version, "commit": commit}


def devices() -> tuple[str, ...]:
    """Returns this machine's device types: ``"cpu"``, and ``"cuda"`` if PyTorch sees a GPU."""
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


def _library_facts(compiling: bool) -> dict[str, str]:
    """Finds the state of each library of the operators."""
    return {
        f"{library.name} for {library.device}": _describe_library(library, compiling)
        for device in ("cpu", "cuda")
        for library in libraries(device)
    }


def _describe_library(library: jit.Library, compiling: bool) -> str:
    if missing := library.obstacle():
        return missing
    try:
        if compiling and (reason := library.load()):
            return f"{_BROKEN}{reason}"
        if library.prebuilt():
            return "prebuilt"
        return "compiled here" if library.find() else "not compiled yet"
    except jit.BuildError as error:
        return f"{_BROKEN}{error}"


def _auto_facts(compiling: bool) -> dict[str, str]:
    describe = _describe_choice if compiling else _predict_choice
    return {
        operator.name: "; ".join(f"{device}: {describe(operator, device)}" for device in devices())
        for operator in operators()
    }


def _describe_choice(operator: Operator, device_type: str) -> str:
    try:
        choice = choose(operator, "auto", device_type)
        return f"{choice.name} ({choice.why})"
    except ImplementationError as error:
        return f"none: {error}"


def _predict_choice(operator: Operator, device_type: str) -> str:
    """Returns what `choose` will choose unless it is broken, which only compiling shows."""
    runnable = (
        name for name in candidates(operator, device_type)
        if not obstacle(operator, name, device_type)
    )  # fmt: skip
    return next(runnable, "none")


def _broken_facts(compiling: bool) -> dict[str, str]:
    """Finds broken packages, and with `compiling` broken implementations for these devices."""
    facts = {name: f"{_BROKEN}{reason}" for name, reason in broken_packages().items()}
    if compiling:
        for operator, device in itertools.product(operators(), devices()):
            for impl in candidates(operator, device):
                try:
                    choose(operator, impl, device)
                except BrokenImplementationError as error:
                    reason = str(error).partition(": ")[2]
                    facts[f"{operator.name} {impl} on {device}"] = f"{_BROKEN}{reason}"
                except ImplementationError:
                    pass  # something is missing, which is said above
    return facts


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def commit_of(folder: Path) -> str | None:
    """Returns the commit of a folder whose files git knows: an installed one may lie in the tree of
    something else."""
    git = "git", "-C", str(folder)
    if _first_line(*git, "ls-files") is None:
        return None
    commit = _first_line(*git, "rev-parse", "HEAD")
    tracked = "--porcelain", "--untracked-files=no"
    changed = _first_line(*git, "status", *tracked, "--", ":/", ":(top,exclude)docs")
    return f"{commit}-dirty" if commit and changed else commit


def _first_line(*command: str, containing: str = "") -> str | None:
    """Returns the first such line that a program prints; None if there is none or it fails."""
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
