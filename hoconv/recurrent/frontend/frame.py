"""The frame in which a cell runs: provides parameters and random numbers, and computes ops.

B batch, n features.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hoconv.recurrent.frontend.symbol import Symbol, fail
from hoconv.recurrent.ir import evaluate

# A value of the step: a tensor (B, n), or of more axes, or a symbol.
Row = Any


# What the elements of a parameter begin with: None, as weights do.
Init = float | Tensor | Callable[[Tensor], Any] | None


class Map(Protocol):
    """A linear map, by its identity: its name, the sizes of its result, None for the hidden size,
    and whether it has a bias."""

    name: str
    shape: tuple[int, ...] | None
    bias: bool


class Frame(ABC):
    """Provides parameters and random numbers to a step of a cell, and computes its ops.

    Attributes:
        training: whether masks are drawn.
        hidden_size: the default size of maps and parameters.
        prefix: what the names of parameters begin with, in a cell within the cell.
    """

    training: bool
    hidden_size: int
    prefix: str = ""

    @contextmanager
    def enter_cell(self, name: str, hidden_size: int) -> Iterator[None]:
        """Runs a cell within the cell, by its name and with its hidden size."""
        before = self.prefix, self.hidden_size
        self.prefix, self.hidden_size = f"{self.prefix}{name}_", hidden_size
        try:
            yield
        finally:
            self.prefix, self.hidden_size = before

    @abstractmethod
    def linear(self, map: Map, operands: tuple[Row, ...]) -> Row: ...

    @abstractmethod
    def parameter(self, name: str, shape: tuple[int, ...], init: Init, learned: bool) -> Row: ...

    @abstractmethod
    def keep(self, probability: float, shape: tuple[int, ...]) -> Row: ...

    @abstractmethod
    def apply(self, kind: str, *operands: Row | float) -> Row: ...


class _Local(threading.local):
    frame: Frame | None = None


_local = _Local()


@contextmanager
def enter_frame(frame: Frame) -> Iterator[None]:
    """Runs a step in a frame."""
    before, _local.frame = _local.frame, frame
    try:
        yield
    finally:
        _local.frame = before


def current_frame(called: str) -> Frame:
    """The frame of the cell that calls what can be called in a cell only.

    Raises:
        ValueError: no cell is running.
    """
    if _local.frame is None:
        fail(f"{called} is called outside of a cell that an RNN runs")
    return _local.frame


def check_name(function: str, name: Any) -> None:
    """Checks the name of what a cell learns.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(name, str) or not name.isidentifier():
        fail(f"{function}: expected a name as its first argument, of letters, digits and _; "
             f"got {name!r}")  # fmt: skip


def apply(kind: str, *operands: Row | float) -> Row:
    """Computes an op on tensors, or appends it to the program that symbols belong to."""
    for operand in operands:
        if isinstance(operand, Symbol):
            return operand.builder.apply(kind, *operands)
    if _local.frame is not None:
        return _local.frame.apply(kind, *operands)
    return evaluate.elementwise(kind, *operands, dtype=torch.get_default_dtype())
