"""Says what a process did when it crashed: a bad access of memory ends Python at once."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from types import TracebackType

# Reads what the process is doing, a line each time, until it ends.
_LISTENER = """
import sys
last = ""
for line in sys.stdin:
    last = line.strip()
if last:
    print(f"The process ended in {last}: somebody killed it, or a kernel accessed memory that is "
          "not its own.", file=sys.stderr)
"""


class CrashReporter:
    """A context in which the death of the process, by a segmentation fault, say, is followed by a
    line on stderr: what it was doing.

    A process of its own prints it. It imports nothing, and ends with the context.
    """

    def __enter__(self) -> CrashReporter:
        # In a session of its own Ctrl-C does not reach it.
        self._listener = subprocess.Popen(
            [sys.executable, "-I", "-c", _LISTENER],
            stdin=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.say("")
        assert self._listener.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._listener.stdin.close()
        self._listener.wait()

    def say(self, what: str) -> None:
        """Notes what the process is doing now, in one line; nothing, if it is empty."""
        assert self._listener.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody ended the listener
            self._listener.stdin.write(what.replace("\n", " ") + "\n")
            self._listener.stdin.flush()
