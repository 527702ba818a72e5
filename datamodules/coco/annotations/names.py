"""Finds the file that the file name of an image means, in the folder of the images.

A name that leads from the folder to a file, as COCO's do, means that file. Tools also write paths
of another machine or system, web addresses, and paths from another folder. Such a name is read

1. as it is;
2. with ``\\`` between folders, and without an address, ``https://host`` or
   ``/data/local-files/?d=``;
3. the same with ``%20`` for a space, and so on.

The last parts of each are looked for in the folder: of ``C:\\work\\train\\a.png`` these are
``C:/work/train/a.png``, ``work/train/a.png``, ``train/a.png`` and ``a.png``. Where there is none of
them, the eight digits and the hyphen that Label Studio puts before the name of an upload are left
out. If all that is there is one file, the name means it. What the last parts lead to from the
folders around this one is a file too, and one that they mean as well: ``train/a.png`` is not
``a.png`` in ``val`` where there is another in ``train``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

MAX_NAME, MAX_PATH = 255, 4095  # bytes: Linux has no longer names of files, and no longer paths
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/]*/|.*/data/local-files/\?d=")
QUERY = re.compile(r"[?#].*", re.DOTALL)  # of an address
UPLOAD = re.compile(r"(.*/)?[0-9a-f]{8}-([^/]+)", re.DOTALL)
FOLDERS_AROUND = 2  # images/train: tools write one or both before the name of a file
SHOWN = 60  # characters of a value in a message


class Found(NamedTuple):
    """The file that the name of an image means.

    Attributes:
        name: of the file, relative to the folder; the first that was tried where there is none.
        problem: why it means no one file; None where it does, or where there is none.
        detail: of the problem.
    """

    name: str
    problem: str | None = None
    detail: str = ""


def find_all(names: Sequence[Any], path: Path | None) -> list[Found]:
    """Returns what the file names of an annotation file mean, which may be any values.

    Several images may have one file if their names lead to it as they are. Otherwise the parts that
    were left out told them apart: ``a/1.png`` and ``b/1.png`` are not both ``1.png``.

    Args:
        path: of the folder; None where only the names are wanted, as they are.
    """
    folder = None if path is None else _Folder(path)
    found = [_find(name, folder) for name in names]
    counts = Counter(each.name for each in found if each.problem is None)
    return [
        Found(each.name, "other images come to the same file", f"{show(name)}: {each.name}")
        if each.problem is None and counts[each.name] > 1 and each.name != _tidy(name)
        else each
        for name, each in zip(names, found, strict=True)
    ]


class _Folder:
    """Knows which files are in a folder and in those around it; lists each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listed: dict[str, frozenset[str]] = {}

    def has(self, name: str) -> bool:
        return self._is_file(self._path, name)

    def search(self, names: Sequence[str]) -> list[str]:
        """Returns the last parts of some names that lead to files, one of each file; none where
        there is none in this folder."""
        ends = list(dict.fromkeys(end for name in names for end in _ends(name)))
        found: dict[str, str] = {}
        for end in filter(self.has, ends):
            found.setdefault(os.path.realpath(self._path / end), end)
        if not found:
            return []
        for up, folder in enumerate(self._path.parents[:FOLDERS_AROUND], start=1):
            for end in ends:
                if "/" in end and self._is_file(folder, end):
                    found.setdefault(os.path.realpath(folder / end), up * "../" + end)
        return list(found.values())

    def _is_file(self, folder: Path, name: str) -> bool:
        inside, _, last = name.rpartition("/")
        path = f"{folder}/{inside}"
        if path not in self._listed:
            try:
                with os.scandir(path) as entries:
                    self._listed[path] = frozenset(e.name for e in entries if e.is_file())
            except OSError:  # no such folder, or a longer path than there can be
                self._listed[path] = frozenset()
        return last in self._listed[path]


def _find(name: Any, folder: _Folder | None) -> Found:
    if (exact := _tidy(name)) is not None and (folder is None or folder.has(exact)):
        return Found(exact)
    readings = _read(name)
    if not readings or folder is None:
        return Found("", "the image has no valid file name", show(name))
    uploads = [f"{m[1] or ''}{m[2]}" for text in readings if (m := UPLOAD.fullmatch(text))]
    found = folder.search(readings) or folder.search(uploads) or readings[:1]
    if len(found) > 1:
        return Found(
            readings[0], "its file name fits several files", f"{show(name)}: {', '.join(found)}"
        )
    return Found(found[0])


def _read(name: Any) -> list[str]:
    """Returns the paths that a file name can be, relative to some folder; none of other values."""
    if not isinstance(name, str):
        return []
    slashed = name.replace("\\", "/")
    if (address := ADDRESS.match(slashed)) is not None:
        slashed = QUERY.sub("", slashed[address.end() :])
    paths = map(_tidy, (name, slashed, unquote(slashed).replace("\\", "/")))
    return list(dict.fromkeys(path for path in paths if path is not None))


def _tidy(text: Any) -> str | None:
    """Returns a path from a folder to a file in it or in folders inside, written in one way; None
    where a value leads to nothing there."""
    if not isinstance(text, str):
        return None
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or text.endswith(("/", "/.")):
        return None
    path = "/".join(parts)
    if (encoded := encode_text(path)) is None or len(encoded) > MAX_PATH:
        return None
    return path if max(map(len, encoded.split(b"/"))) <= MAX_NAME else None


def _ends(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[first:]) for first in range(len(parts))]


def encode_text(text: Any) -> bytes | None:
    """Returns a text in UTF-8; None where it is not text, or holds a zero or half of a surrogate
    pair, which the arrays cannot hold."""
    try:
        return text.encode() if isinstance(text, str) and "\0" not in text else None
    except UnicodeEncodeError:
        return None


def one_line(text: str) -> str:
    """Returns a text with escapes for what would break a line, as a file's name may hold."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def show(value: Any) -> str:
    """Returns a value as the annotation file has it, for a message of one line."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
