"""Options of hoconv's commands and of the scripts, and the JSON records that they write."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from hoconv import jit
from hoconv.dispatch.declaration import broken_packages, operators
from hoconv.files import replaced
from hoconv.tools import doctor

MEASURED = Path("outputs", "measured")  # of what is measured, in the folder of the user


def add_operator_option(parser: argparse.ArgumentParser) -> None:
    """Adds names of operators: a list, or nothing, which means all. What is parsed must have been
    through :func:`mark_operators`."""
    named: Any = {"type": operator_name, "action": "extend", "metavar": "OPERATOR"}
    parser.add_argument("operator", nargs="*", **named,
                        help="names, anywhere among the options; default: all")  # fmt: skip
    parser.add_argument("--operator", nargs="+", **named, help="the same")


def mark_operators(argv: Sequence[str]) -> list[str]:
    """Puts ``--operator`` before names of operators, so that an option of several values ends at
    one; not before a word that is the first value of an option."""
    declared = {operator.name for operator in operators()}
    marked = []
    for before, word in zip(["", *argv], argv):
        marked += ["--operator"] * (word in declared and not before.startswith("-")) + [word]
    return marked


def operator_name(name: str) -> str:
    """Checks the name of an operator in an argument of a command.

    Raises:
        argparse.ArgumentTypeError: no operator of this name is declared.
    """
    declared = [operator.name for operator in operators()]
    if name not in declared:
        cure = "if it is in a package of yours, install that: pip install -e FOLDER"
        broken = [f"the package {package} is broken: {why}"
                  for package, why in broken_packages().items()]  # fmt: skip
        raise argparse.ArgumentTypeError(
            f"expected {', '.join(declared)}; got {name!r}; {'; '.join(broken) or cure}"
        )
    return name


def report_broken_packages() -> bool:
    """Prints the packages of operators that cannot be imported; returns whether there are any."""
    for name, reason in broken_packages().items():
        print(f"The package of operators {name} is broken: {reason}", file=sys.stderr)
    return bool(broken_packages())


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", nargs="+", type=device, default=doctor.devices(),
                        metavar="cpu|cuda", help="default: those of this machine")  # fmt: skip


def device(name: str) -> str:
    """Parses a device that this machine has."""
    if name not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu or cuda, got {name!r}")
    if name not in doctor.devices():
        raise argparse.ArgumentTypeError(f"{name}: {jit.no_gpu()}")
    return name


def add_out_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=_folder, default=str(MEASURED),
                        help=f"folder; default: {MEASURED}")  # fmt: skip


def _folder(name: str) -> Path:
    """Parses a folder, and checks that it can be written before anything is measured."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name} cannot be written ({error.strerror})") from error


def count(text: str) -> int:
    """Parses the value of an option that counts something: at least one."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def record(command: str, argv: Sequence[str]) -> dict[str, Any]:
    """Returns the head of every JSON record: what was run, when and where.

    Args:
        command: what was called, without the options.
        argv: the options.
    """
    return {
        "command": " ".join([command, *map(shlex.quote, argv)]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": doctor.environment(),
    }


def hardware(measured: dict[str, Any]) -> str:
    """Names the hardware of a record of one device: the GPU, or the CPU and its threads."""
    environment = measured["environment"]
    if measured["device"] == "cuda":
        return str(environment["gpu"])
    return f"{environment['cpu']}, {environment['threads']} threads"


def write_json(path: Path, contents: Any, *, say: bool = True) -> None:
    """Writes JSON whole or not at all.

    Args:
        say: whether to print the path; not where more is measured and the file is written again.
    """
    write_text(path, json.dumps(contents, indent=2) + "\n", say=say)


def write_text(path: Path, text: str, *, say: bool = True) -> None:
    """As :func:`write_json`, for text."""
    with replaced(path) as file:
        file.write(text.encode())
    if say:
        print(path)
