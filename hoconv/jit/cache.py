"""The folder where compiled code is kept: what may be run from there, and how it gets there.

What is loaded from it runs with all rights of the user. So the folder and those above it must be
such that only the user and root can change them, as ssh asks of its keys, and beside every file is
its digest: one that was cut off, damaged or never finished is made again.
"""

from __future__ import annotations

import fcntl
import grp
import hashlib
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path


class BuildError(RuntimeError):
    """Code could not be compiled or kept: says why, and what to do."""


def folder() -> Path:
    """Where compiled code is kept: in ``TORCH_EXTENSIONS_DIR`` where that is set, else in the
    user's home; for a user without one in a folder of its own for temporary files."""
    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named, "hoconv").resolve()
    try:
        return Path(Path.home(), ".cache", "hoconv").resolve()
    except RuntimeError:  # no HOME, and no name for this user
        return Path(tempfile.gettempdir(), f"hoconv-{os.geteuid()}").resolve()


def find(pattern: str) -> Path | None:
    """A file of the cache whose contents still match its digest; None where there is none.

    Raises:
        BuildError: the cache may not be trusted.
    """
    try:
        cache = _trusted(folder())
        return next(filter(_whole, sorted(cache.glob(pattern))), None)
    except OSError:
        return None


def keep(name: str, make: Callable[[Path], Path]) -> Path:
    """The file of the cache of this name.

    Args:
        name: says all that the contents depend on.
        make: makes the file where the cache has none, or has a damaged one. It is called with a
            folder to work in, by one process at a time, and returns the path of what it made.

    Raises:
        BuildError: the cache may not be trusted, or cannot be written; or what `make` raises.
    """
    if found := find(name):
        return found
    cache = folder()
    try:
        for missing in reversed([each for each in (cache, *cache.parents) if not each.exists()]):
            missing.mkdir(0o755, exist_ok=True)  # whatever the umask, no other can write to it
        target = _trusted(cache) / name
        with _locked(target.with_suffix(".lock")):
            if not _whole(target):  # another process may have made it while this one waited
                with _emptied(target.with_suffix(".build")) as working:
                    made = make(working)
                    digest = working / "digest"
                    digest.write_text(_digest(made))
                    for each in (made, digest):
                        each.chmod(0o755)
                    os.replace(made, target)  # whole or not at all, also when killed
                    os.replace(digest, _beside(target))
    except OSError as error:
        raise BuildError(
            f"cannot write the build cache {cache} ({error.strerror or error}); "
            "set TORCH_EXTENSIONS_DIR to a folder that can be written"
        ) from error
    return target


def _trusted(cache: Path) -> Path:
    """The folder, where nobody else can put a file into it or another folder in its place."""
    owners = {0, os.geteuid()}
    problem, where = _shared(cache.lstat(), owners), cache
    # Where root has another number, as in a container of its own users, whose / is has all anyway.
    owners.add(Path("/").stat().st_uid)
    for parent in cache.parents:
        status = parent.lstat()
        # In a sticky folder, as /tmp is, everyone can make what is not there, and replace nothing.
        sticky = status.st_mode & stat.S_ISVTX and status.st_uid in owners
        if not problem and not sticky:
            problem, where = _shared(status, owners), parent
    if problem:
        raise BuildError(
            f"the build cache {cache} is not safe to run code from: {where} {problem}; "
            "make it yours alone (chown, chmod go-w), or set TORCH_EXTENSIONS_DIR to one that is"
        )
    return cache


def _shared(status: os.stat_result, owners: Container[int]) -> str | None:
    """What lets others than these change a file or folder; None where nothing does."""
    if status.st_uid not in owners:
        return f"belongs to user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "can be written by everyone"
    if status.st_mode & stat.S_IWGRP and not _private(status.st_gid):
        return f"can be written by group {status.st_gid}"
    return None


def _private(group: int) -> bool:
    """Whether a group is the user's alone, such as many systems make for each user."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == name and set(entry.gr_mem) <= {name}


def _whole(path: Path) -> bool:
    """Whether a file is as it was made."""
    try:
        kept = (path, _beside(path))
        statuses = [each.lstat() for each in kept]
        owners = {0, os.geteuid()}
        if any(not stat.S_ISREG(s.st_mode) or _shared(s, owners) for s in statuses):
            return False
        return kept[1].read_bytes() == _digest(path).encode()
    except OSError:
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _beside(path: Path) -> Path:
    """Where the digest of a file is."""
    return path.with_name(f"{path.name}.sha256")


@contextmanager
def _emptied(working: Path) -> Iterator[Path]:
    """A folder to work in, without what a build that was killed left there."""
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(0o700)
    try:
        yield working
    finally:
        shutil.rmtree(working, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the system frees the lock of a process that was killed."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
