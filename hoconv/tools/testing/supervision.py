"""Runs a command in a process of its own, so that a kernel that ends the process, by a bad access
of memory or by ``os._exit(0)``, cannot pass for one that is right."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TextIO

_VERDICT = "verdict "
_supervisor: TextIO | None = None  # of this process


def say(what: str) -> None:
    """Notes what the process is doing now, in one line: the supervisor says so if it ends there."""
    if _supervisor is not None:
        print(what.replace("\n", " "), file=_supervisor, flush=True)


def supervise(run: Callable[[], int]) -> int:
    """Runs a command in a child process.

    Returns:
        Its exit code; 1 where the process ended before the command did, after a line on stderr that
        says what it was doing.
    """
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        os.close(read)
        _obey(os.fdopen(write, "w"), run)
    os.close(write)
    stops = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(stop, lambda stop, _: os.kill(child, stop)) for stop in stops]
    last, code = "", None
    with os.fdopen(read) as lines:
        for line in map(str.strip, lines):
            if line.startswith(_VERDICT):
                code = int(line.removeprefix(_VERDICT))
            last = line
    os.waitpid(child, 0)
    for stop, handler in zip(stops, before, strict=True):
        signal.signal(stop, handler)
    if code is None:
        print(
            f"The process ended in {last or 'its first steps'}: somebody killed it, a kernel "
            f"accessed memory that is not its own, or an implementation ended it.",
            file=sys.stderr,
        )
    return 1 if code is None else code


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Ends a command: Ctrl-C reaches it from the terminal, and from the supervisor again."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _obey(supervisor: TextIO, run: Callable[[], int]) -> None:
    """Runs a command, tells the supervisor how it ended, and ends the process."""
    global _supervisor
    _supervisor, code = supervisor, 1
    signal.signal(signal.SIGINT, _interrupt_once)
    try:
        code = run()
    except SystemExit as error:  # argparse's, after its message
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    say(f"{_VERDICT}{code}")
    os._exit(code)
