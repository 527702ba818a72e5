"""A CSV file that grows during a run, and is cut back to the checkpoint when a run resumes."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from training import console, disk


class GrowingTable:
    """Rows are on disk when `extend` returns; those that the disk has no room for wait.

    Args:
        path: of the file; a new one replaces what was there.
        columns: the first columns; a row with other names adds more.
        rows: how many rows of an existing file are kept; new ones follow. Where the file has fewer,
            since the disk was full before the run was killed, a line says so.

    Attributes:
        rows: number of rows, those that wait included.
    """

    def __init__(self, path: Path, columns: Iterable[str] = (), rows: int = 0) -> None:
        self.path = path
        self.rows = rows
        self._columns = list(columns)
        self._kept = rows  # of an existing file
        self._begun = False  # whether this object has rewritten the file with the kept rows
        self._waiting: list[Mapping[str, Any]] = []
        self.extend([])

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends rows: column -> value; a float is written in digits that give it back."""
        rows = list(rows)
        self.rows += len(rows)
        self._waiting += rows
        disk.attempt(self.path, self._write, again=True)

    def _write(self) -> None:
        """Appends the waiting rows; replaces the file to begin it, or where they add columns."""
        if self._begun and all(row.keys() <= set(self._columns) for row in self._waiting):
            disk.append(self.path, _text(self._columns, self._waiting))
        else:
            rows = [*self.read(), *self._waiting]
            columns = dict.fromkeys([*self._columns, *(name for row in rows for name in row)])
            with disk.replaced(self.path) as file:
                text = _text(columns, [dict(zip(columns, columns)), *rows])
                file.write(disk.plain(text).encode())
            self._begun, self._columns = True, list(columns)
        self._waiting = []

    def read(self) -> list[dict[str, str]]:
        """Returns the rows of the file; before it is begun, only those that are kept."""
        rows = []
        with disk.named(self.path):
            if self._begun or (self._kept and self.path.exists()):
                with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
                    rows = list(csv.DictReader(file))
        if self._begun:
            return rows
        if len(rows) < self._kept:
            console.warn(f"{self.path} has {len(rows)} of the {self._kept} rows written so far")
        return rows[: self._kept]


def _text(columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO(newline="")
    csv.DictWriter(text, list(columns), lineterminator="\n").writerows(rows)
    return text.getvalue()
