"""Plans, found by their content. The torch op takes a plan as a text, which holds the whole cell.

torch.compile treats the text as a constant. The text means the same in every process: an exported
program needs neither the cell nor its module.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

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

# The number of plans that a process keeps; it compiles older ones again.
_KEPT = 256


class _Request(NamedTuple):
    dtype: str
    schedule: str
    options: dict[str, bool]
    cell: str


def request(
    cell: str, dtype: torch.dtype, schedule: str, masked: bool, resets: bool, reverse: bool,
    recompute: bool = False,
) -> str:  # fmt: skip
    """Writes a plan as a text. Arguments and result are constants: torch.compile does not trace it.

    Args:
        cell: the text of its trace, by :func:`hoconv.recurrent.frontend.serialize.to_text`.
        dtype, schedule, masked, resets, reverse, recompute: as in
            :func:`hoconv.recurrent.schedule.plan_trace`.
    """
    return _request_once(cell, dtype, schedule, masked, resets, reverse, recompute)


_OPTIONS = ("masked", "resets", "reverse", "recompute")


@functools.lru_cache(_KEPT)
def _request_once(cell: str, dtype: torch.dtype, schedule: str, *options: bool) -> str:
    chosen = (name for name, wanted in zip(_OPTIONS, options, strict=True) if wanted)
    name = str(dtype).removeprefix("torch.")
    return "/".join((name, schedule, "+".join(chosen) or "plain", cell))


request._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _parse(text: str) -> _Request:
    dtype, schedule, options, cell = text.split("/", 3)
    chosen = set(options.split("+")) - {"plain"}
    if unknown := chosen - set(_OPTIONS):
        raise ValueError(
            f"this recurrent layer was exported by another version of hoconv, which has the option "
            f"{unknown.pop()!r}: load it there, or export it again here"
        )
    return _Request(dtype, schedule, {name: name in chosen for name in _OPTIONS}, cell)


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
        text: by which :func:`find_plan` finds it.
        names: the names of the cell's parameters, in the order in which the op takes them.
        reverse: whether the first step is the last of the sequence.
    """

    def __init__(self, text: str) -> None:
        self.text, r = text, _parse(text)
        self.plan: Plan = plan_trace(
            from_text(r.cell), getattr(torch, r.dtype), r.schedule, **r.options
        )
        self.names = tuple(d.name for d in self.plan.declarations)
        self.reverse = r.options["reverse"]
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
        """What runs one of the plan's programs.

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
        """Whether one kernel keeps the weights on the GPU of x, for its batch, in a program.

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
        return HostCode(program, self.names, which == "backward", loop)

    def _host_both(self, which: str) -> list[HostCode]:
        """What runs a program in both directions on a GPU."""
        loop, backward = self.cuda_loop(which), which == "backward"
        return [HostCode(p, self.names, backward, loop) for p in self.both(which)]

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

    def _cpp(self, differentiable: bool) -> dict[Program, CppLoop]:
        names = ("forward", "backward") if differentiable else ("inference",)
        programs = {name: self.program(name) for name in names}
        for name in names:
            if (streamed := self._streamed(name)) is not programs[name]:
                programs[f"{name}_streamed"] = streamed
        return {programs[name]: loop for name, loop in compile_loops(programs).items()}


@functools.lru_cache(_KEPT)
def find_plan(text: str) -> CompiledPlan:
    """The compiled plan of a text.

    Raises:
        ValueError: the text is of another version of hoconv.
    """
    return CompiledPlan(text)


def find_read(text: str) -> tuple[int, ...]:
    """Returns where the sequences of ``backward`` are among those of ``forward``, its results and
    the gradient of the output. A constant to torch.compile, which traces a backward pass too."""
    return _find_read_once(text)


find_read._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.lru_cache(_KEPT)
def _find_read_once(text: str) -> tuple[int, ...]:
    made = find_plan(text)
    forward, backward = made.program("forward"), made.program("backward")
    given = (*forward.sequences, *forward.results, ("d_output", None))
    at = {name: i for i, (name, _) in enumerate(given)}
    return tuple(at[name] for name, _ in backward.sequences)


def prepare(impl: str, device_type: str, text: str, which: str) -> None:
    """Compiles the loop of one program of a plan; with ``forward`` also that of ``backward``.

    Raises:
        hoconv.jit.BuildError: the compiler failed.
    """
    made = find_plan(text)
    if impl == "cuda" and made.plan.cudnn:
        return  # cuDNN computes the layer
    for program in (which, "backward") if which == "forward" else (which,):
        made.prepare(program, impl, device_type)
