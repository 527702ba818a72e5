"""Writing on a disk that may be full: what it has no room for is lost, and nothing else.

A file is written whole or not at all, so that what was there before can always be read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from training import console

PARTIAL = ".partial"  # ends the name of what is being written


class DiskError(Exception):
    """A file cannot be written: the disk is full, the folder is gone or not to be written to."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} cannot be written ({reason})")
        self.path = path


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """A DiskError in place of an OSError, and of what a library, as torch.save, makes of one."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise DiskError(path, cause.strerror or str(cause)) from error


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends, whole and on the disk.

    Raises:
        DiskError: it cannot; what was there stays as it was, and nothing else is left.
    """
    partial = path.with_name(path.name + PARTIAL)
    with named(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def append(path: Path, text: str) -> None:
    """Adds to the end of a file that is there.

    Raises:
        DiskError: it cannot; nothing was added.
    """
    with named(path):
        size = path.stat().st_size
        try:
            with path.open("ab") as file:  # one write: a process that is killed leaves no half row
                file.write(text.encode())
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            raise


def attempt(path: Path, write: Callable[[], None], again: bool = False) -> bool:
    """Whether `write` wrote `path`: where the disk does not let it, the run goes on.

    Says so in one line, the first time for each folder; :func:`settle` says what is missing.

    Args:
        path: what `write` writes, by `replaced` or `append`.
        write: other errors than DiskError are its caller's.
        again: whether `settle` is to try it once more.
    """
    try:
        write()
    except DiskError as error:
        if path.parent not in _warned:
            _warned.add(path.parent)
            console.warn(f"{error}; the run goes on")
        _lost[path] = _Lost(str(error), write if again else None)
        return False
    _lost.pop(path, None)
    return True


def current(path: Path) -> bool:
    """Whether a file is there, as it was last attempted to be written by this process."""
    return path.is_file() and path not in _lost


def forget(path: Path) -> None:
    """Misses a file, or those in a folder, no longer: the run has no more use for them."""
    for lost in [lost for lost in _lost if lost.is_relative_to(path)]:
        del _lost[lost]


def settle() -> None:
    """At the end of a run: writes what there is room for by now, and names what is missing."""
    for path, lost in list(_lost.items()):
        if lost.write:
            attempt(path, lost.write)
    folders: dict[Path, list[Path]] = {}
    for path in _lost:
        folders.setdefault(path.parent, []).append(path)
    for paths in folders.values():
        more = f", nor {len(paths) - 1} more in that folder" if len(paths) > 1 else ""
        console.warn(f"{_lost[paths[-1]].reason}: it is missing or not current{more}")
    _lost.clear()
    _warned.clear()


@dataclass(frozen=True)
class _Lost:
    reason: str
    write: Callable[[], None] | None


_lost: dict[Path, _Lost] = {}
_warned: set[Path] = set()
