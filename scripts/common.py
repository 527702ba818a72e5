"""Folders, options and the console of the scripts; :mod:`hoconv.commands` has the rest."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"  # of the figures in README and docs
MEASURED = ROOT / "outputs" / "measured"
PIPE_WIDTH = 120  # columns, where the output is a file or a pipe
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
    parser.add_argument("--out", type=_folder, default=str(MEASURED),
                        help="folder; default: outputs/measured; the figures of README and docs "
                             "are from docs/results")  # fmt: skip


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
    """Returns a console as wide as the terminal, or as `PIPE_WIDTH`."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)


def show(table: Table) -> None:
    """Prints a table, turned where it is wider than the terminal."""
    from training.results.wide import print_table  # found since the line that appends to sys.path

    print_table(console(), table)
