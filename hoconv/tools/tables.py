"""Printing tables and lines, also those that are wider than the terminal.

Lines need Python alone: rich is imported where a table is printed.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 120  # columns, where the output is a file or a pipe
UNLIMITED = 10_000  # columns, to see how wide a table is by itself


def console() -> Console:
    """Returns a console as wide as the terminal, or as `PIPE_WIDTH`."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)


def show(table: Table) -> None:
    """Prints a table as :func:`print_table` does, on the console of :func:`console`."""
    print_table(console(), table)


def print_table(console: Console, table: Table) -> None:
    """Prints a table. Where it is wider than the terminal its rows become columns, in as many
    tables as they fill: nothing is cut off."""
    from rich.measure import Measurement

    def fits(shown: Table) -> bool:
        options = console.options.update(width=UNLIMITED)
        return Measurement.get(console, options, shown).maximum <= console.width

    rows = list(zip(*(column.cells for column in table.columns)))
    if fits(table) or not rows:
        console.print(table)
        return
    begin, title = 0, table.title
    while begin < len(rows):
        end = begin + 1
        while end < len(rows) and fits(_turned(table, rows[begin : end + 1], title)):
            end += 1
        console.print(_turned(table, rows[begin:end], title))
        begin, title = end, None


def _turned(table: Table, rows: list[tuple[Any, ...]], title: Any) -> Table:
    """Rows of a table as the columns of another."""
    from rich.table import Table

    turned = Table(title=title, box=table.box)
    turned.add_column(table.columns[0].header)
    for row in rows:
        turned.add_column(row[0], justify="right")
    for column, cells in zip(table.columns[1:], list(zip(*rows))[1:]):
        turned.add_row(column.header, *cells)
    return turned


def print_line(line: str, indent: int) -> None:
    """Prints a line. A terminal that is too narrow has it in several, divided between words; those
    after the first begin with `indent` spaces."""
    if sys.stdout.isatty():
        line = textwrap.fill(
            line,
            shutil.get_terminal_size().columns,
            subsequent_indent=" " * indent,
            break_long_words=False,  # a path stays whole
            break_on_hyphens=False,
        )
    print(line)
