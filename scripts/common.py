"""Folders, options and the console of the scripts; :mod:`hoconv.commands` has the rest."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
sys.path.append(str(ROOT))  # for models/ and training/, which are not installed


def count(text: str) -> int:
    """Parses the value of an option that counts something: at least one."""
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
    """Parses a folder, and checks that it can be written before anything is measured."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name} cannot be written ({error.strerror})") from error


def console() -> Console:
    """Returns a console as wide as the terminal; 120 columns for a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=120)
