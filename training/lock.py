"""A lock on the folder of a run: one command at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
from collections.abc import Iterator
from datetime import datetime
from io import FileIO
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_only

from training import console

NAME = ".lock"
FLOCK = "hhlli"  # struct flock of Linux: type, whence, start, length, process


class RunningError(Exception):
    """Another process is running in this folder."""


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Keeps other commands out of the folder of a run, until the block or the process ends.

    The operating system holds the lock, a POSIX record lock, which NFS passes on to other hosts. It
    releases the lock however the process ends; forked processes do not keep it. The contents of the
    file say to people who holds it and since when. In a distributed run the first process holds it.
    Where the file system has no locks, a line says so and nothing is held.

    Raises:
        RunningError: another process holds it; says which.
    """
    path = run_dir / NAME
    with contextlib.ExitStack() as stack:
        if rank_zero_only.rank == 0:  # pyright: ignore
            try:
                file = stack.enter_context(path.open("ab", buffering=0))
                _take(file, path)
            except OSError as error:
                console.warn(
                    f"{path}: {error.strerror}; no other command is kept out of this folder"
                )
        yield


def _take(file: FileIO, path: Path) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        raise RunningError(
            f"a run is going on in {path.parent}, {_owner(path)}; wait until it ends, or end it; "
            "to start another one, leave resume=auto out and set hydra.run.dir to another folder"
        ) from None
    now = datetime.now().astimezone().isoformat(" ", "seconds")
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": now}
    with contextlib.suppress(OSError):  # a full disk: the lock is held all the same
        file.truncate(0)
        file.write(json.dumps(owner).encode())


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text())
        return f"by process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "by a process that could not write who it is"


def is_running(run_dir: Path) -> bool:
    """Whether another process holds the lock of a folder.

    A process that holds the lock itself must not call it: closing the file would release the lock.
    """
    question = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with (run_dir / NAME).open("rb") as file:
            kind, *_ = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, question))
    except OSError:  # no lock file, or a file system without locks
        return False
    return kind != fcntl.F_UNLCK
