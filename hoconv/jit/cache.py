"""The cache of compiled code: which of its files may be loaded, and how files are added.

Code that is loaded runs with all rights of the user. So only the user and root may be able to
change the folder and those above it, as ssh requires of its keys. Beside every file is its digest:
a file that was truncated, damaged or never finished is made again.
"""

from __future__ import annotations

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

from filelock import FileLock


class BuildError(RuntimeError):
    """Code could not be compiled or kept: says why, and what to do."""


def folder() -> Path:
    """Returns the cache's folder: in ``TORCH_EXTENSIONS_DIR`` if that is set, else in the user's
    home; for a user without a home, in the folder for temporary files."""
    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named, "hoconv").resolve()
    try:
        return Path(Path.home(), ".cache", "hoconv").resolve()
    except RuntimeError:  # no HOME, and no name for this user
        return Path(tempfile.gettempdir(), f"hoconv-{os.geteuid()}").resolve()


def find(pattern: str) -> Path | None:
    """Finds a file of the cache whose contents still match its digest; None if there is none.

    Raises:
        BuildError: the cache may not be trusted.
    """
    try:
        cache = _check_trusted(folder())
        return next(filter(_is_intact, sorted(cache.glob(pattern))), None)
    except OSError:
        return None


def keep(name: str, make: Callable[[Path], Path]) -> Path:
    """Returns the file of this name in the cache, and makes it if it is missing or damaged.

    Args:
        name: depends on everything that the contents depend on.
        make: makes the file. It is called with a folder to work in, by one process at a time, and
            returns the path of the file that it made there.

    Raises:
        BuildError: the cache may not be trusted, or cannot be written; or what `make` raises.
    """
    if found := find(name):
        return found
    cache = folder()
    try:
        for missing in reversed([each for each in (cache, *cache.parents) if not each.exists()]):
            missing.mkdir(0o755, exist_ok=True)  # whatever the umask, only the user can write to it
        target = _check_trusted(cache) / name
        with FileLock(target.with_suffix(".lock"), fallback_to_soft=False):
            if not _is_intact(target):  # another process may have made it while this one waited
                with _working_folder(target.with_suffix(".build")) as working:
                    made = make(working)
                    digest = working / "digest"
                    digest.write_text(_digest(made))
                    for each in (made, digest):
                        each.chmod(0o755)
                    os.replace(made, target)  # whole or not at all, also when killed
                    os.replace(digest, _digest_path(target))
    except OSError as error:
        raise BuildError(
            f"cannot write the build cache {cache} ({error.strerror or error}); "
            "set TORCH_EXTENSIONS_DIR to a folder that can be written"
        ) from error
    return target


def _check_trusted(cache: Path) -> Path:
    """Returns the folder if nobody else can put a file into it, or replace it by another.

    Raises:
        BuildError: someone else can.
    """
    owners = {0, os.geteuid()}
    problem, where = _find_risk(cache.lstat(), owners), cache
    # In a container with users of its own, root may have another number. Whoever owns / has all
    # rights anyway.
    owners.add(Path("/").stat().st_uid)
    for parent in cache.parents:
        status = parent.lstat()
        # In a sticky folder such as /tmp, everyone can add files, but nobody can replace another's.
        sticky = status.st_mode & stat.S_ISVTX and status.st_uid in owners
        if not problem and not sticky:
            problem, where = _find_risk(status, owners), parent
    if problem:
        raise BuildError(
            f"the build cache {cache} is not safe to run code from: {where} {problem}; "
            "make it yours alone (chown, chmod go-w), or set TORCH_EXTENSIONS_DIR to one that is"
        )
    return cache


def _find_risk(status: os.stat_result, owners: Container[int]) -> str | None:
    """Says why users other than `owners` can change a file or folder; None if they cannot."""
    if status.st_uid not in owners:
        return f"belongs to user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "can be written by everyone"
    if status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid):
        return f"can be written by group {status.st_gid}"
    return None


def _is_private(group: int) -> bool:
    """Returns whether the user is a group's only member; many systems make such a group for each
    user."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == name and set(entry.gr_mem) <= {name}


def _is_intact(path: Path) -> bool:
    """Returns whether a file matches its digest, and others can change neither of them."""
    try:
        kept = (path, _digest_path(path))
        statuses = [each.lstat() for each in kept]
        owners = {0, os.geteuid()}
        if any(not stat.S_ISREG(s.st_mode) or _find_risk(s, owners) for s in statuses):
            return False
        return kept[1].read_bytes() == _digest(path).encode()
    except OSError:
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_path(path: Path) -> Path:
    """Returns the path of a file's digest."""
    return path.with_name(f"{path.name}.sha256")


@contextmanager
def _working_folder(working: Path) -> Iterator[Path]:
    """Makes an empty folder, without the files of a build that was killed, and removes it later."""
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(0o700)
    try:
        yield working
    finally:
        shutil.rmtree(working, ignore_errors=True)
