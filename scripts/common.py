"""What the scripts share: options, tables, the head of a JSON record, files written whole."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hoconv import doctor, jit
from hoconv.declaration import broken_packages, operators

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
sys.path.append(str(ROOT))  # models/ is there, which is not installed


def add_operator_option(parser: argparse.ArgumentParser) -> None:
    declared = [operator.name for operator in operators()]
    parser.add_argument("--operator", nargs="+", choices=declared, default=declared,
                        help="default: all that are declared")  # fmt: skip


def broken_packages_named() -> bool:
    """Whether there are packages of operators that cannot be imported; says which, and why."""
    for name, reason in broken_packages().items():
        print(f"The package of operators {name} is broken: {reason}", file=sys.stderr)
    return bool(broken_packages())


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", nargs="+", type=_device, default=doctor.devices(),
                        metavar="cpu|cuda", help="default: those of this machine")  # fmt: skip


def _device(name: str) -> str:
    if name not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu or cuda, got {name!r}")
    if name not in doctor.devices():
        raise argparse.ArgumentTypeError(f"{name}: {jit.no_gpu()}")
    return name


def count(text: str) -> int:
    """At least one, for the type of an option."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def add_out_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=_folder, default=str(RESULTS),
                        help="folder; default: docs/results")  # fmt: skip


def _folder(name: str) -> Path:
    """Known to be writable before anything is measured."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name} cannot be written ({error.strerror})") from error


def console() -> Console:
    """A terminal says how wide it is; a file or a pipe does not."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def record(script: str, argv: Sequence[str]) -> dict[str, Any]:
    """How every JSON file begins: what was run, when and where."""
    return {
        "command": shlex.join(["python", f"scripts/{script}", *argv]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": doctor.environment(),
    }


def write_json(path: Path, contents: Any) -> None:
    write(path, lambda partial: partial.write_text(json.dumps(contents, indent=2) + "\n"))


def write(path: Path, write_to: Callable[[Path], Any]) -> None:
    """Whole or not at all: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    write_to(partial)
    os.replace(partial, path)
    print(path)
