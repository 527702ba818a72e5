"""A CSV file that grows while a run lasts, and can be cut back to where a run goes on."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from reporting.console import tolerated


class GrowingTable:
    """Rows are on disk when `extend` returns; those that the disk has no room for wait.

    Args:
        path: of the file; a new one replaces what was there.
        columns: the first ones; others follow as rows bring them.
        rows: how many of the rows that are there are kept, to go on after them.

    Attributes:
        rows: how many there are, waiting ones included.
    """

    def __init__(self, path: Path, columns: Iterable[str] = (), rows: int = 0) -> None:
        self.path = path
        self.rows = 0
        self._columns = list(columns)
        self._waiting: list[Mapping[str, Any]] = []
        with tolerated(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._replace(self._read()[:rows] if rows else [])
        self.rows = rows

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends rows: column -> value; a float is written in digits that give it back."""
        rows = list(rows)
        self.rows += len(rows)
        self._waiting += rows
        with tolerated(self.path):
            columns = dict.fromkeys(name for row in self._waiting for name in row)
            if new := [name for name in columns if name not in self._columns]:
                before = self._read()
                self._columns += new
                self._replace([*before, *self._waiting])
            else:
                self._append(self._waiting)
            self._waiting = []

    def _read(self) -> list[dict[str, str]]:
        with self.path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        self._columns += [name for name in (rows[0] if rows else ()) if name not in self._columns]
        return rows

    def _append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        size = self.path.stat().st_size
        try:
            with self.path.open("a", newline="") as file:
                self._writer(file).writerows(rows)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)  # no half row stays
            raise

    def _replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """All at once: a reader, or a run that goes on, never finds half a file."""
        partial = self.path.with_name(self.path.name + ".partial")
        with partial.open("w", newline="") as file:
            if self._columns:
                self._writer(file).writeheader()
            self._writer(file).writerows(rows)
        os.replace(partial, self.path)

    def _writer(self, file: Any) -> csv.DictWriter:
        return csv.DictWriter(file, self._columns, lineterminator="\n")
