"""Writing files whole or not at all; the run continues where the disk is full."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from training import console

# Bytes of a file name: a file system takes 255, and a partial file's name has a suffix.
LONGEST_NAME = 240
DIGEST = 8  # hexadecimal digits that tell apart names with the same beginning


class DiskError(Exception):
    """A file cannot be written: the disk is full, the folder is gone or not to be written to."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} cannot be written ({reason})")
        self.path = path


def plain(text: str) -> str:
    """Returns text that every file and terminal takes: a byte of a file name that is not UTF-8,
    which Python has as half a character, becomes ``\\udcXX``."""
    return text.encode(errors="backslashreplace").decode()


def file_name(name: str, suffix: str) -> str:
    """Returns the name, or path, of a file that is written for another one: `name` and `suffix`,
    :func:`plain`. The end of what is too long for a name becomes a digest of the whole."""
    folder, slash, last = plain(name).rpartition("/")
    if len((last + suffix).encode()) > LONGEST_NAME:
        end = f"~{hashlib.sha256(last.encode()).hexdigest()[:DIGEST]}{suffix}"
        last = last.encode()[: LONGEST_NAME - len(end.encode())].decode(errors="ignore") + end
    else:
        last += suffix
    return f"{folder}{slash}{last}"


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Raises DiskError for an OSError, or for an error that a library, such as torch.save, raised
    from one."""
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
    """As ``hoconv.files.replaced``; raises DiskError where the file cannot be written."""
    from hoconv import files  # brings PyTorch, which composing a configuration does without

    with named(path), files.replaced(path) as file:
        yield file


def append(path: Path, text: str) -> None:
    """Appends :func:`plain` text to an existing file.

    Raises:
        DiskError: the text cannot be written; the file is unchanged.
    """
    with named(path):
        size = path.stat().st_size
        try:
            with path.open("ab") as file:  # one write: a process that is killed leaves no half row
                file.write(plain(text).encode())
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            raise


def attempt(path: Path, write: Callable[[], None], again: bool = False) -> bool:
    """Calls `write`; where the disk fails, warns instead of raising. Returns whether it wrote.

    The first failure in each folder is one line; :func:`settle` names every missing file.

    Args:
        path: what `write` writes, by `replaced` or `append`.
        write: raises DiskError where the disk fails; other errors pass.
        again: whether `settle` calls `write` once more.
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


def is_current(path: Path) -> bool:
    """Returns whether a file exists and this process's last attempt to write it succeeded."""
    return path.is_file() and path not in _lost


def forget(path: Path) -> None:
    """Forgets failures to write a file, or files in a folder, that the run no longer needs."""
    for lost in [lost for lost in _lost if lost.is_relative_to(path)]:
        del _lost[lost]


def settle() -> None:
    """Ends a run: tries failed writes again where asked to, and names the files still missing."""
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
