"""Folders, options and the console of the scripts; :mod:`hoconv.commands` has the rest."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"  # of the figures in README and docs
MEASURED = ROOT / "outputs" / "measured"
UNLIMITED = 10_000  # columns, to see how wide a table is by itself
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
    """Prints a table. Where it is wider than the terminal its rows become columns, in as many
    tables as they fill: nothing is cut off."""
    where = console()

    def fits(shown: Table) -> bool:
        return Measurement.get(where, where.options.update(width=UNLIMITED), shown).maximum <= width

    width = where.width
    if fits(table):
        where.print(table)
        return
    rows = list(zip(*(column.cells for column in table.columns)))
    begin, title = 0, table.title
    while begin < len(rows):
        end = begin + 1
        while end < len(rows) and fits(_turned(table, rows[begin : end + 1], title)):
            end += 1
        where.print(_turned(table, rows[begin:end], title))
        begin, title = end, None


def _turned(table: Table, rows: list[tuple[Any, ...]], title: Any) -> Table:
    """Rows of a table as the columns of another."""
    turned = Table(title=title, box=table.box)
    turned.add_column(table.columns[0].header)
    for row in rows:
        turned.add_column(row[0], justify="right")
    for column, cells in zip(table.columns[1:], list(zip(*rows))[1:]):
        turned.add_row(column.header, *cells)
    return turned
