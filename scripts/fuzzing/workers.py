"""Running tasks in child processes. A child that crashes or hangs is replaced by another."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fuzzing.verdicts import Verdict

SECONDS = 120.0  # the most that a task may take
_START_SECONDS = 600.0  # the most that a child may take to import modules, on a busy machine
# Runs a task, given the task, a folder for files, and a function to call with its description.
Function = Callable[[Any, Path, Callable[[str], None]], Verdict]


@dataclass(frozen=True)
class Outcome:
    """A task, its description, sent before it ran, and its verdict."""

    task: Any
    description: str
    verdict: Verdict


def run(
    function: Function, tasks: Sequence[Any], folder: Path, jobs: int, seconds: float = SECONDS
) -> Iterator[Outcome]:
    """Runs tasks; yields the outcome of each as soon as it is known.

    Args:
        function: a function of a module, so that another process can import it.
        tasks: its arguments, picklable.
        folder: for the files of all tasks.
        jobs: the number of processes.
        seconds: a task that takes longer has hung; its process is killed.
    """
    outcomes: queue.SimpleQueue[Outcome | BaseException] = queue.SimpleQueue()

    def work(some: Sequence[Any]) -> None:
        child = None
        try:
            for task in some:
                child = child or _Child(function, folder)
                outcomes.put(outcome := child.run(task, seconds))
                if outcome.verdict.kind in ("crashed", "hung"):
                    child = None
        except BaseException as error:
            outcomes.put(error)
        finally:
            if child:
                child.end()

    # Daemon threads, so that an interrupt ends the program and does not wait for them.
    for first in range(min(jobs, len(tasks))):
        threading.Thread(target=work, args=(tasks[first::jobs],), daemon=True).start()
    for _ in tasks:
        outcome = outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        yield outcome


class _Child:
    def __init__(self, function: Function, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(function, folder, other), daemon=True)
        os.environ["OMP_NUM_THREADS"] = "1"  # cases are small: one core is enough for each
        # glibc fills memory that is freed with this byte: floats that are read from it are NaN.
        os.environ["MALLOC_PERTURB_"] = "255"
        self.process.start()
        other.close()
        self.started = False

    def run(self, task: Any, seconds: float) -> Outcome:
        description = ""
        try:
            if not self.started and self.connection.poll(_START_SECONDS):
                self.connection.recv()
                self.started = True
            self.connection.send(task)
            while self.connection.poll(seconds):
                kind, value = self.connection.recv()
                if kind == "done":
                    return Outcome(task, description, value)
                description = value
            self.process.kill()
            self.process.join()
            return Outcome(task, description, Verdict("hung", f"no answer in {seconds:g} s"))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode or 0
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Outcome(task, description, Verdict("crashed", f"the process ended: {name}"))

    def end(self) -> None:
        self.connection.send(None)
        self.process.join()


def _work(function: Function, folder: Path, connection: Connection) -> None:
    torch.backends.cudnn.allow_tf32 = False  # float32 is compared as float32
    connection.send(("started", None))
    while (task := _next(connection)) is not None:
        try:
            verdict = function(task, folder, lambda text: connection.send(("description", text)))
        except Exception:
            verdict = Verdict("wrong", f"no verdict:\n{traceback.format_exc()}")
        connection.send(("done", verdict))


def _next(connection: Connection) -> Any:
    """Receives the next task; None at the end, or if the parent process has ended."""
    try:
        return connection.recv()
    except EOFError:
        return None
