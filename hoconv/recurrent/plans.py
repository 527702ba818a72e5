"""Cells and plans by name: an op takes strings, and torch.compile sees constants."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from hoconv.recurrent.cell import BoundCell
from hoconv.recurrent.cpp import CppLoop, compile_loops
from hoconv.recurrent.cuda import CudaLoop
from hoconv.recurrent.interpret import Loop
from hoconv.recurrent.ir import Program
from hoconv.recurrent.schedule import Plan, plan
from hoconv.recurrent.trace import trace

_cells: dict[str, BoundCell] = {}
_parameters: dict[str, tuple[str, ...]] = {}


def register(cell: BoundCell) -> str:
    """A name for a cell with its sizes and options, in this process."""
    for name, known in _cells.items():
        if known == cell:
            return name
    name = f"{cell.name}#{len(_cells)}"
    _cells[name] = cell
    _parameters[name] = tuple(d.name for d in trace(cell).declarations)
    return name


def registered(name: str) -> BoundCell:
    """The cell of a name."""
    return _cells[name]


class Request(NamedTuple):
    """Which plan of a cell."""

    cell: str
    dtype: str
    schedule: str
    training: bool
    masked: bool
    reverse: bool


def request(
    cell: str, dtype: str, schedule: str, training: bool, masked: bool, reverse: bool
) -> str:
    """A plan as a text. Constants in, a constant out: torch.compile does not trace it."""
    return "/".join(
        map(str, (cell, dtype.removeprefix("torch."), schedule, training, masked, reverse))
    )


request._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def parsed(text: str) -> Request:
    """The request of a text."""
    cell, dtype, schedule, *flags = text.split("/")
    training, masked, reverse = (flag == "True" for flag in flags)
    return Request(cell, dtype, schedule, training, masked, reverse)


@functools.cache
def planned(text: str) -> Plan:
    """The plan of a request."""
    r = parsed(text)
    return plan(
        registered(r.cell), getattr(torch, r.dtype), r.schedule,
        training=r.training, masked=r.masked, reverse=r.reverse,
    )  # fmt: skip


def parameter_names(cell: str) -> tuple[str, ...]:
    """The parameters of a cell, in the order in which an op takes them."""
    return _parameters[cell]


def program_of(text: str, which: str) -> Program:
    """One of a plan's programs: ``inference``, ``forward`` or ``backward``."""
    return getattr(planned(text), which)


def loop(text: str, which: str, impl: str, device_type: str) -> Loop | None:
    """What runs the steps of one of a plan's programs; None is PyTorch, op by op.

    Raises:
        hoconv.build.BuildError: there is no compiler, or it failed.
    """
    if impl == "cuda":
        return _cuda_loop(text, which)
    return _library(text, which != "inference")[which] if device_type == "cpu" else None


@functools.cache
def _cuda_loop(text: str, which: str) -> CudaLoop:
    return CudaLoop(program_of(text, which), planned(text).recorded)


@functools.cache
def _library(text: str, differentiable: bool) -> dict[str, CppLoop]:
    names = ("forward", "backward") if differentiable else ("inference",)
    return compile_loops({name: program_of(text, name) for name in names})
