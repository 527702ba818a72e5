"""Plans by content: an op takes a text that holds the whole cell, a constant to torch.compile.

A text means the same in every process: an exported program needs neither the cell nor its module.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from hoconv.recurrent.frontend.serialize import from_text
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.runtime.cpp import CppLoop, compile_loops
from hoconv.recurrent.runtime.cuda import CudaLoop
from hoconv.recurrent.runtime.interpret import Loop
from hoconv.recurrent.schedule import Plan, plan_trace

# Plans that a process keeps; one that is asked for after more than these is made again.
_KEPT = 256


class _Request(NamedTuple):
    dtype: str
    schedule: str
    masked: bool
    reverse: bool
    cell: str


def request(cell: str, dtype: torch.dtype, schedule: str, masked: bool, reverse: bool) -> str:
    """A plan as a text. Constants in, a constant out: torch.compile does not trace it.

    Args:
        cell: what :func:`hoconv.recurrent.frontend.serialize.to_text` made of its trace.
        dtype, schedule, masked, reverse: as in :func:`hoconv.recurrent.schedule.plan_trace`.
    """
    name = str(dtype).removeprefix("torch.")
    return "/".join((name, schedule, str(masked), str(reverse), cell))


request._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _parsed(text: str) -> _Request:
    dtype, schedule, masked, reverse, cell = text.split("/", 4)
    return _Request(dtype, schedule, masked == "True", reverse == "True", cell)


class Prepared:
    """A plan and what was compiled of it.

    Attributes:
        names: the cell's parameters, in the order in which an op takes them.
        reverse: whether the first step is the last of the sequence.
    """

    def __init__(self, text: str) -> None:
        r = _parsed(text)
        self.plan: Plan = plan_trace(
            from_text(r.cell), getattr(torch, r.dtype), r.schedule,
            masked=r.masked, reverse=r.reverse,
        )  # fmt: skip
        self.names = tuple(d.name for d in self.plan.declarations)
        self.reverse = r.reverse
        self._cuda_loop = functools.cache(self._cuda)
        self._cpp_loops = functools.cache(self._cpp)

    def program(self, which: str) -> Program:
        """One of the plan's programs: ``inference``, ``forward`` or ``backward``."""
        return getattr(self.plan, which)

    def loop(self, which: str, impl: str, device_type: str) -> Loop | None:
        """What runs the steps of one of the programs; None is PyTorch, op by op.

        Raises:
            hoconv.jit.BuildError: there is no compiler, or it failed.
        """
        if impl == "cuda":
            return self._cuda_loop(which)
        return self._cpp_loops(which != "inference")[which] if device_type == "cpu" else None

    def _cuda(self, which: str) -> CudaLoop:
        return CudaLoop(self.program(which), self.plan.recorded)

    def _cpp(self, differentiable: bool) -> dict[str, CppLoop]:
        names = ("forward", "backward") if differentiable else ("inference",)
        return compile_loops({name: self.program(name) for name in names})


@functools.lru_cache(_KEPT)
def prepared(text: str) -> Prepared:
    """The plan of a request.

    Raises:
        ValueError: the text is of another version of hoconv.
    """
    return Prepared(text)


def prepare(impl: str, device_type: str, text: str, which: str) -> None:
    """Compiles what runs one of a plan's programs, and with ``forward`` also ``backward``.

    Raises:
        hoconv.jit.BuildError: the compiler failed.
    """
    made = prepared(text)
    if impl == "cuda" and made.plan.library:
        return  # the library's function runs it, which has no kernels of ours
    for program in (which, "backward") if which == "forward" else (which,):
        loop = made.loop(program, impl, device_type)
        if isinstance(loop, CudaLoop):
            loop.prepare()
