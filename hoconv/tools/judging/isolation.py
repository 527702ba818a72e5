"""Takes from a process what a kernel does not need: the network, the sight of other processes, the
definition's file, and privileges. The functions that import no PyTorch run before threads exist."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# From <sched.h>, <sys/mount.h>, <sys/prctl.h> and <linux/capability.h>.
_NEW_USER, _NEW_NET, _NEW_MOUNTS, _NEW_PIDS = 0x10000000, 0x40000000, 0x00020000, 0x20000000
_MS_BIND, _MS_REC_PRIVATE = 0x1000, 0x4000 | 0x40000
_PDEATHSIG, _GET_DUMPABLE, _SET_DUMPABLE, _CAPBSET_DROP, _NO_NEW_PRIVS = 1, 3, 4, 24, 38
_CAPABILITY_VERSION_3, _CAPABILITIES = 0x20080522, 64

_libc = ctypes.CDLL(None, use_errno=True)


def enter_namespaces(own_pids: bool) -> set[str]:
    """Enters namespaces of its own, as far as the kernel permits; returns those of ``network``,
    ``files`` and ``processes`` that are. The next child is the first of the new processes."""
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    kinds = _NEW_NET | _NEW_MOUNTS | (_NEW_PIDS if own_pids else 0)
    for flags in (_NEW_USER | kinds, kinds):
        probe = os.fork()  # a process that fails half-way is of no use
        if not probe:
            os._exit(0 if _enter(flags) else 1)
        if os.waitpid(probe, 0)[1] == 0 and _enter(flags):
            return {"network", "files"} | ({"processes"} if own_pids else set())
    return set()


def _enter(flags: int) -> bool:
    user, group = os.geteuid(), os.getegid()
    if _libc.unshare(flags):
        return False
    try:
        if flags & _NEW_USER:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError:
        return False
    return not _libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None)


def give_up(entered: set[str], hidden: Sequence[str]) -> None:
    """Hides files, and gives up what could undo that: for ever, for this process and its children.

    Args:
        entered: what :func:`enter_namespaces` returned; ``files`` is removed where that fails.
        hidden: files that are to look empty.
    """
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    for path in hidden:
        if _libc.mount(b"/dev/null", os.fsencode(path), None, _MS_BIND, None):
            entered.discard("files")
    if "network" not in entered:
        socket.socket.connect = socket.socket.bind = _refuse  # pyright: ignore[reportAttributeAccessIssue]
    for capability in range(_CAPABILITIES):
        _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
    _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _libc.capset(ctypes.byref(header), (ctypes.c_uint32 * 6)())


@contextmanager
def unreadable() -> Iterator[None]:
    """Forbids other processes of the user to read the memory of this one."""
    before = _libc.prctl(_GET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_SET_DUMPABLE, before, 0, 0, 0)


def descendants(process: int) -> list[int]:
    """Returns a process and all that descend from it."""
    found = [process]
    for parent in found:  # which grows
        with suppress(OSError):  # it ended
            for thread in os.listdir(f"/proc/{parent}/task"):
                with suppress(OSError):
                    children = Path(f"/proc/{parent}/task/{thread}/children").read_text()
                    found += map(int, children.split())
    return found


def signal_all(processes: Iterable[int], number: int) -> None:
    """Sends a signal to processes that may have ended."""
    for each in processes:
        try:
            os.kill(each, number)
        except ProcessLookupError:
            continue


def _refuse(*_: object) -> None:
    raise PermissionError("a kernel that is judged has no network")
