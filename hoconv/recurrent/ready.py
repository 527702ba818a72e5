"""Writes the time loops of ready cells in C++, for layers of all sizes: a wheel has them compiled.

    python -m hoconv.recurrent.ready

A loop is named after its text, by which :mod:`hoconv.recurrent.runtime.cpp` finds it.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from hoconv.recurrent import cells
from hoconv.recurrent.codegen.cpp import HEADER, emit_cpp
from hoconv.recurrent.codegen.sizes import lift
from hoconv.recurrent.frontend.cell import Cell
from hoconv.recurrent.frontend.errors import CellError
from hoconv.recurrent.frontend.serialize import to_text
from hoconv.recurrent.frontend.trace import trace
from hoconv.recurrent.plans import find_plan, request
from hoconv.recurrent.runtime.cpp import with_groups
from hoconv.recurrent.runtime.libraries import LOOPS

# Input and hidden sizes, and options. Where a size is 1, or others are equal or change places, a
# cell may have other statements, or the same in another order: one of each kind that people use.
_SIZES = (20, 32), (32, 32), (40, 20), (1, 32)
_OPTIONS = tuple(
    {"heads": heads, "keys": keys, "values": values, "slots": 7, "width": 9, "states": 12,
     "proj_size": 5}
    for heads, keys, values in ((2, 6, 10), (2, 10, 6), (2, 8, 8), (1, 8, 8))
)  # fmt: skip
# Cells that `hoconv check` compares in all dtypes.
_ALL_DTYPES = ("gru", "layernorm_lstm", "lstm", "projected_lstm")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def write(folder: Path, chosen: Mapping[str, Cell]) -> None:
    """Writes a file for each cell and dtype into a folder, and removes all others.

    In other dtypes than float32 they are few, and read no sequences of several lengths.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    written: set[str] = set()
    for name, cell in chosen.items():
        for dtype in _DTYPES if name in _ALL_DTYPES else _DTYPES[:1]:
            found = {
                loop: text
                for traced in _trace(cell)
                for loop, text in _write_loops(traced, dtype)
                if loop not in written
            }
            written |= found.keys()
            path = folder / f"{name}_{str(dtype).removeprefix('torch.')}.cpp"
            path.write_text("\n\n".join((HEADER, *found.values())))


def _trace(cell: Cell) -> Iterator[str]:
    """Yields the text of a cell with each of the sizes and options that it can have."""
    choices = [{name: each[name] for name in each if name in cell.options} for each in _OPTIONS]
    for (input_size, hidden_size), (i, options) in itertools.product(_SIZES, enumerate(choices)):
        if options not in choices[:i]:
            with contextlib.suppress(CellError):  # blocks do not divide these sizes
                yield to_text(trace(cell.bind(input_size, hidden_size, options)))


def _write_loops(cell: str, dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each loop of a cell, which is given as a text."""
    lengths = (False, True) if dtype is torch.float32 else (False,)
    for masked, reverse in itertools.product(lengths, (False, True)):
        plan = find_plan(request(cell, dtype, "auto", masked, False, reverse))
        for differentiable in (False, True):
            named, _ = with_groups(plan.cpp_programs(differentiable))
            for program in named.values():
                lifted = lift(emit_cpp(program, "").marked)
                yield lifted.name, lifted.text


if __name__ == "__main__":
    write(LOOPS, {name: cell for name, cell in vars(cells).items() if isinstance(cell, Cell)})
