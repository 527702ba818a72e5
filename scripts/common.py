"""What the scripts share beyond :mod:`hoconv.commands`: where they are, options, the console."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
sys.path.append(str(ROOT))  # models/ is there, which is not installed


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
