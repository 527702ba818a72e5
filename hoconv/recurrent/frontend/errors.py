"""Reports errors in a cell at the line of the cell."""

from __future__ import annotations

import inspect
import linecache
import os
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

_RECURRENT = Path(__file__).parents[1]
_INNER = (f"{_RECURRENT}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}")
_READY_CELLS = f"{_RECURRENT / 'cells'}{os.sep}"


class CellError(ValueError):
    """A cell cannot be compiled. Says file and line, what is wrong, and what to write instead."""


def locate_error(message: str, filename: str, line: int, cell: str) -> CellError:
    """Makes a :class:`CellError` that shows a line of a cell."""
    source = linecache.getline(filename, line).strip()
    shown = f"\n    {source}" if source else ""
    return CellError(f"{filename}:{line}: in the cell {cell}: {message}{shown}")


def find_line(traceback: TracebackType | None, code: CodeType) -> int:
    """The line of a function at which an exception passed through it."""
    line = code.co_firstlineno
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def find_caller() -> FrameType | None:
    """The innermost frame outside of the language's own files, and of PyTorch's."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and _is_inner(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_inner(filename: str) -> bool:
    return filename.startswith(_INNER) and not filename.startswith(_READY_CELLS)
