"""A lock on the folder of a run: one command at a time."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout
from lightning_utilities.core.rank_zero import rank_zero_only

from training import console

PATIENCE = 1  # seconds: another command that only asks holds the lock for a moment


class RunningError(Exception):
    """Another process is running in this folder."""


def _lock(run_dir: Path, timeout: float) -> FileLock:
    return FileLock(run_dir / ".lock", timeout, fallback_to_soft=False)


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Keeps other commands out of the folder of a run, until the block or the process ends.

    The operating system holds the lock, on NFS also against other hosts. It releases the lock
    however the process ends; forked processes do not keep it. The contents of the file say to
    people who holds it and since when. In a distributed run the first process holds it. Where the
    file system has no locks, a line says so and nothing is held.

    Raises:
        RunningError: another process holds it; says which.
    """
    lock = _lock(run_dir, PATIENCE)
    path = Path(lock.lock_file)
    if rank_zero_only.rank == 0:  # pyright: ignore
        try:
            lock.acquire()
        except Timeout:
            raise RunningError(
                f"a run is going on in {run_dir}, {path.read_text()}; wait until it ends, or end "
                "it; to start another one, leave resume=auto out and set hydra.run.dir to another "
                "folder"
            ) from None
        except OSError as error:
            console.warn(f"{path}: {error.strerror}; no other command is kept out of this folder")
        else:
            now = datetime.now().astimezone().isoformat(" ", "seconds")
            with contextlib.suppress(OSError):  # a full disk: the lock is held all the same
                path.write_text(f"by process {os.getpid()} on {socket.gethostname()} since {now}")
    try:
        yield
    finally:
        lock.release()


def is_running(run_dir: Path) -> bool:
    """Returns whether another process holds the lock of a folder."""
    lock = _lock(run_dir, 0)
    try:
        if Path(lock.lock_file).exists():
            with lock:
                pass
    except OSError as error:  # also of a file system without locks
        return isinstance(error, Timeout)
    return False
