"""train.py on a disk of a size, in a process of its own; tests/test_full_disk.py starts it.

The disk is a tmpfs that no other process sees, and that goes with the process; what is on it at the
end is copied out first.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

import train
from training.command import run_command

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
CANNOT_MOUNT = 77  # the exit code


def main(kilobytes: int, overrides: Sequence[str], folder: Path) -> None:
    """Runs train.py in ``folder/disk/run``; copies what it leaves to ``folder/left``.

    The file ``folder/out`` gets what the process prints.
    """
    disk = folder / "disk"
    disk.mkdir(parents=True)
    try:
        _mount(disk, kilobytes)
    except OSError:
        sys.exit(CANNOT_MOUNT)
    with (folder / "out").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    sys.argv = ["train.py", *overrides, f"hydra.run.dir={disk / 'run'}"]
    code = 1
    try:
        code = run_command(train.main)
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    shutil.copytree(disk, folder / "left")
    sys.exit(code)


def _mount(path: Path, kilobytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)):
        raise OSError(ctypes.get_errno(), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    size = f"size={kilobytes}k".encode()
    for source, target, kind, flags, data in (
        (None, b"/", None, MS_REC | MS_PRIVATE, None),
        (b"none", bytes(path), b"tmpfs", 0, size),
    ):
        if libc.mount(source, target, kind, ctypes.c_ulong(flags), data):
            raise OSError(ctypes.get_errno(), "mount")
