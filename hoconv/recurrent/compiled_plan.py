"""A plan and what was compiled of it. Importing this module imports the whole compiler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from hoconv.recurrent.frontend.serialize import from_text
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.passes.stream import stream
from hoconv.recurrent.runtime.clusters import Clusters
from hoconv.recurrent.runtime.cpp import CppLoop, compile_loops, has_rows
from hoconv.recurrent.runtime.cuda import CudaLoop
from hoconv.recurrent.runtime.host import HostCode
from hoconv.recurrent.schedule import Plan, plan_trace

R = TypeVar("R")


def _once(lock: threading.RLock, function: Callable[..., R]) -> Callable[..., R]:
    """Returns a function that computes each result once, also where threads ask at the same time,
    which functools.cache does not: what is compiled finds a program by its identity."""
    kept: dict[Any, R] = {}

    def find(*args: Any) -> R:
        if args not in kept:
            with lock:
                if args not in kept:
                    kept[args] = function(*args)
        return kept[args]

    return find


class CompiledPlan:
    """A plan and its compiled loops.

    Attributes:
        text: by which :func:`hoconv.recurrent.plans.find_plan` finds it.
        names: the names of the cell's parameters, in the order in which the op takes them.
        reverse: whether the first step is the last of the sequence.
    """

    def __init__(
        self, text: str, cell: str, dtype: torch.dtype, schedule: str, options: dict[str, Any]
    ) -> None:
        self.text = text
        self.plan: Plan = plan_trace(from_text(cell), dtype, schedule, **options)
        self.names = tuple(d.name for d in self.plan.declarations)
        self._states = tuple(s.name for s in self.plan.definition.states)
        self.reverse = options["reverse"]
        lock = threading.RLock()  # one result asks for others
        # One of the plan's programs: ``inference``, ``forward`` or ``backward``.
        self.program = _once(lock, self._program)
        self.cuda_loop = _once(lock, self._cuda)
        # Of a program, as of `program`, and the same program in the other direction. They share
        # their values, so that one kernel can run both.
        self.both = _once(lock, self._both)
        self.hosts_of_both = _once(lock, self._host_both)
        self._hosts = _once(lock, self._host)
        # Of a program, the same as it runs where threads of a CPU have many rows.
        self._streamed = _once(lock, self._stream)
        self._cpp_loops = _once(lock, self._cpp)

    def _program(self, which: str) -> Program:
        return getattr(self.plan, which)

    def find(self, which: str, impl: str, x: Tensor) -> HostCode:
        """Returns what runs one of the plan's programs.

        Args:
            which: as of `program`.
            x: (T, B, n).

        Raises:
            hoconv.jit.BuildError: there is no compiler, or it failed.
        """
        on_cpu = x.is_cpu
        return self._hosts(which, impl, on_cpu, on_cpu and has_rows(x.shape[1]))

    def prepare(self, which: str, impl: str, device_type: str) -> None:
        """Compiles the loop of a program.

        Raises:
            hoconv.jit.BuildError: there is no compiler, or it failed.
        """
        if impl == "cuda":
            self.cuda_loop(which).prepare()
        elif device_type == "cpu":
            self._cpp_loops(which != "inference")

    def keeps_weights(self, which: str, x: Tensor, directions: int = 1) -> bool:
        """Returns whether one kernel keeps the weights on the GPU of x, for its batch, in a
        program.

        Args:
            which: as of `program`; with ``forward`` also in ``backward``.
            x: (T, B, n).
            directions: 2 for those of both directions.
        """
        programs = (which, "backward") if which == "forward" else (which,)
        return x.is_cuda and all(
            self.cuda_loop(name).keeps_weights(x.shape[1], x.device, directions)
            for name in programs
        )

    def _host(self, which: str, impl: str, on_cpu: bool, streamed: bool) -> HostCode:
        program, loop = self.program(which), None
        if impl == "cuda":
            loop = self.cuda_loop(which)
        elif on_cpu:
            program = self._streamed(which) if streamed else program
            loop = self._cpp_loops(which != "inference")[program]
        return HostCode(program, self.names, self._states, which == "backward", loop)

    def _host_both(self, which: str) -> list[HostCode]:
        """Returns what runs a program in both directions on a GPU."""
        loop, backward = self.cuda_loop(which), which == "backward"
        return [HostCode(p, self.names, self._states, backward, loop) for p in self.both(which)]

    def _both(self, which: str) -> tuple[Program, Program]:
        program = self.program(which)
        return program, replace(program, reverse=not program.reverse)

    def _cuda(self, which: str) -> CudaLoop:
        program, always = self.program(which), self.plan.schedule == "persistent"
        following = (lambda: self.cuda_loop("backward").clusters) if which == "forward" else None
        clusters = Clusters(program, always, following) if self.plan.persistent else None
        return CudaLoop(program, self.plan.recorded, clusters)

    def _stream(self, which: str) -> Program:
        program = self.program(which)  # of a lower rung of the ladder as it is
        return stream(program) if self.plan.recorded else program

    def cpp_programs(self, differentiable: bool) -> dict[str, Program]:
        """Returns the programs whose loops a CPU runs, each once, by name."""
        names = ("forward", "backward") if differentiable else ("inference",)
        programs = {name: self.program(name) for name in names}
        for name in names:
            if (streamed := self._streamed(name)) is not programs[name]:
                programs[f"{name}_streamed"] = streamed
        return programs

    def _cpp(self, differentiable: bool) -> dict[Program, CppLoop]:
        programs = self.cpp_programs(differentiable)
        return {programs[name]: loop for name, loop in compile_loops(programs).items()}
