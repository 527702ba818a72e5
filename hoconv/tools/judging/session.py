"""The judge's side of a worker: starts it, asks it, stops it while nothing is asked, ends it."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hoconv.tools.judging.exchange import (
    UNWRITTEN,
    Again,
    Call,
    Load,
    Placed,
    Several,
    cpu_memory,
    gpu_memory,
    is_as_put,
    of_several,
    place_like,
    put,
)
from hoconv.tools.judging.isolation import descendants, signal_all
from hoconv.tools.testing.many_calls import private_memory

_LOAD_SECONDS = 900  # a candidate may compile its code
_LONGEST_ANSWER = 1 << 20  # bytes; numbers are in the memory
_LAST_LINES = 5


class Misbehaved(Exception):
    """A worker gave no answer, or none that can be one; `name` says how."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name, self.detail = name, detail


@dataclass(frozen=True)
class Reply:
    """The answer to one call.

    Attributes:
        nonce: by which its results are asked for again.
        results: copies that are this process's alone.
        seconds: from the request until there were such copies.
        calls: what the worker says was called, where that was asked for.
        changed: names of what has other values in memory than before the call.
    """

    nonce: str
    results: dict[str, Tensor]
    seconds: float
    calls: list[str]
    changed: list[str]


class Starter:
    """A process that imports PyTorch once and forks workers."""

    def __enter__(self) -> Starter:
        self._socket, theirs = socket.socketpair()
        self._folder = tempfile.TemporaryDirectory()
        quiet = "-Wignore::DeprecationWarning"  # of forks of a process that has threads
        module = "hoconv.tools.judging.worker"
        command = [sys.executable, quiet, "-P", "-m", module, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], cwd=self._folder.name, start_new_session=True
        )
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait()
        self._folder.cleanup()

    def start(self, device: str, hidden: Sequence[Path]) -> Worker:
        return Worker(self._socket, device, [str(path.resolve()) for path in hidden])


class Worker:
    """An isolated process with a candidate.

    Attributes:
        isolated: which of ``network``, ``files`` and ``processes`` the kernel keeps from it.
    """

    def __init__(self, starter: socket.socket, device: str, hidden: Sequence[str]) -> None:
        self.device = device
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the worker)
        self._connection, theirs = Pipe()
        printed = self._printed.fileno()
        inputs = results = printed  # where the memory is that of a GPU
        if device == "cpu":
            (self.inputs, inputs), (self.results, results) = cpu_memory(), cpu_memory()
        else:
            self.inputs, self.results = gpu_memory()
        given = [theirs.fileno(), inputs, results, printed]
        message = json.dumps({"hidden": hidden, "device": device}).encode()
        socket.send_fds(starter, [message], given)
        theirs.close()
        for descriptor in {inputs, results} - {printed}:
            os.close(descriptor)
        self._extent = 0  # bytes of the results' memory that were written
        answers = self._receive(_LOAD_SECONDS) | self._receive(_LOAD_SECONDS)
        self._process: int = answers["process"]
        self.isolated: list[str] = answers["isolated"]

    def load(self, load: Load, state: dict[str, Tensor]) -> str | None:
        """Loads a candidate; returns why it could not, or None."""
        end, places = 0, {}
        for name, t in state.items():
            places[name], end = put(t, self.inputs, end)
        shared = None
        if self.device != "cpu":
            from torch.multiprocessing.reductions import reduce_tensor

            shared = [reduce_tensor(t) for t in (self.inputs, self.results)]
        self._send(replace(load, state=places, shared=shared))
        return self._receive(_LOAD_SECONDS).get("error")

    def call(
        self, args: Any, kwargs: Any, cotangent: Any, seconds: float, *, timed: bool = False,
        **options: Any,
    ) -> Reply:  # fmt: skip
        """Asks for one call.

        Args:
            seconds: to wait for the answer.
            timed: whether the worker stands still until the clock runs.
            options: of :class:`Call`.

        Raises:
            Misbehaved: there is no such answer.
        """
        stopped = descendants(self._process) if timed else []
        signal_all(stopped, signal.SIGSTOP)
        placed = self._place((args, kwargs, cotangent))
        request = Call(secrets.token_hex(8), *placed, **options)
        answer, results, elapsed = self._ask(request, seconds, stopped)
        calls = [str(each) for each in answer.get("calls") or ()]
        return Reply(
            request.nonce, results, elapsed, calls, self._changed(request, args, cotangent)
        )

    def call_several(
        self, calls: Sequence[tuple[Any, Any, Any]], seconds: float, **options: int
    ) -> list[Reply]:
        """Asks for several calls, each of arguments, keyword arguments and a cotangent.

        Args:
            options: of :class:`Several`.

        Raises:
            Misbehaved: as :meth:`call`.
        """
        requests = [Call("", *placed) for placed in self._place([*calls])]
        request = Several(secrets.token_hex(8), tuple(requests), **options)
        _, results, elapsed = self._ask(request, seconds, [])
        replies = []
        for i, (each, (args, _, cotangent)) in enumerate(zip(requests, calls, strict=True)):
            begin = of_several(i, "")
            own = {name.removeprefix(begin): t
                   for name, t in results.items() if name.startswith(begin)}  # fmt: skip
            changed = self._changed(each, args, cotangent)
            replies.append(Reply(request.nonce, own, elapsed, [], changed))
        return replies

    def memory(self) -> int:
        """Returns the bytes that the candidate's process holds; on a GPU, also what any other
        process holds there."""
        held = private_memory(self._process)
        if self.device == "cpu":
            return held
        free, total = torch.cuda.mem_get_info()
        return held + total - free - torch.cuda.memory_reserved()

    def _place(self, values: Any) -> Any:
        """Writes the tensors among some values to the inputs' memory, and wipes the results'."""
        end, places = 0, {}

        def place(value: Any) -> Any:
            nonlocal end
            if not isinstance(value, Tensor):
                return value
            if id(value) not in places:  # calls at once may share tensors
                places[id(value)], end = put(value, self.inputs, end)
            return places[id(value)]

        placed = tree_map(place, values)
        self.results[: self._extent].fill_(UNWRITTEN)
        self._synchronize()
        return placed

    def _changed(self, request: Call, args: Sequence[Any], cotangent: Any) -> list[str]:
        """Names the arguments that are not what was written, and the gradient of the output."""
        given = [(f"argument {i}", *pair) for i, pair in enumerate(zip(request.args, args))]
        leaves = zip(tree_leaves(request.cotangent), tree_leaves(cotangent), strict=True)
        given += [("the gradient of the output", *pair) for pair in leaves]
        return [
            name
            for name, where, t in given
            if isinstance(where, Placed) and not is_as_put(t, where, self.inputs)
        ]

    def descriptors(self) -> int:
        """Counts the files that the candidate's process has open; 0 where the kernel hides them."""
        try:
            return len(os.listdir(f"/proc/{self._process}/fd"))
        except OSError:
            return 0

    def again(self, nonce: str, seconds: float) -> dict[str, Tensor]:
        """Returns the results of an earlier call, as they are now."""
        _, results, _ = self._ask(Again(secrets.token_hex(8), nonce), seconds, [])
        return results

    def ask(self, request: Any, seconds: float) -> dict[str, Any]:
        """Sends a request that moves no tensors; returns the answer."""
        self._send(request)
        return self._receive(seconds)

    def processes(self) -> int:
        """Counts the processes that the candidate has started and not ended."""
        return len(descendants(self._process)) - 1

    def close(self) -> None:
        """Ends the worker, and all that it started."""
        signal_all(descendants(self._process), signal.SIGKILL)
        self._connection.close()
        self._printed.close()

    def printed(self) -> str:
        """Returns the last lines that the candidate printed."""
        self._printed.seek(0)
        text = self._printed.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def _ask(
        self, request: Call | Several | Again, seconds: float, stopped: list[int]
    ) -> tuple[dict[str, Any], dict[str, Tensor], float]:
        began = time.perf_counter()
        self._send(request)
        signal_all(stopped, signal.SIGCONT)
        answer = self._receive(seconds)
        if "error" in answer:
            raise Misbehaved("error", str(answer["error"]))
        if answer.get("nonce") != request.nonce:
            raise Misbehaved("forged answer", "it is not an answer to the request")
        results = self._copies(answer.get("results"))
        elapsed = time.perf_counter() - began
        return answer, results, elapsed

    def _copies(self, described: Any) -> dict[str, Tensor]:
        try:
            named = {
                str(name): (tuple(map(int, shape)), getattr(torch, dtype.removeprefix("torch.")))
                for name, shape, dtype in described
            }
            places = place_like(named.values())
            copies = [place.view(self.results).clone() for place in places]
            results = dict(zip(named, copies, strict=True))
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise Misbehaved("forged answer", f"it describes no results: {error}") from error
        self._synchronize()
        self._extent = max([self._extent, *(p.offset + t.nbytes for p, t in zip(places, copies))])
        return results

    def _synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def _send(self, request: Any) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(request))
        except OSError as error:
            raise self._ended() from error

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            if not self._connection.poll(seconds):
                raise Misbehaved("no answer", f"in {seconds:g} s")
            answer = json.loads(self._connection.recv_bytes(_LONGEST_ANSWER))
        except (EOFError, OSError) as error:
            raise self._ended() from error
        except ValueError as error:
            raise Misbehaved("forged answer", "it is not JSON") from error
        if not isinstance(answer, dict):
            raise Misbehaved("forged answer", "it is not a JSON object")
        return answer

    def _ended(self) -> Misbehaved:
        printed = self.printed()
        detail = f"the candidate ended its process{f': {printed}' if printed else ''}"
        return Misbehaved("ended process", detail)
