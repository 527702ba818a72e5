"""Traces a cell for a layer, in both modes: programs, parameters, outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hoconv.recurrent.frontend.cell import BoundCell
from hoconv.recurrent.frontend.serialize import to_text
from hoconv.recurrent.frontend.trace import Declaration, trace


@dataclass(frozen=True, eq=False)
class Traced:
    """The traces of a cell.

    Attributes:
        declarations: the parameters of the cell.
        names: their names, without a suffix.
        shapes: their shapes.
        flattened: the numbers of those that programs read as rows and that have several axes.
        evaluation, training: the text of the trace in either mode.
        draws: whether a step has noise in training.
        output_size: the features of the step's output.
        outputs: the outputs that have names, and their sizes.
    """

    declarations: tuple[Declaration, ...]
    names: tuple[str, ...]
    shapes: list[torch.Size]
    flattened: tuple[int, ...]
    evaluation: str
    training: str
    draws: bool
    output_size: int
    outputs: Mapping[str, int] | None


def read_size(traced: Traced, output: str | None, num_layers: int) -> int:
    """Returns the features that the next layer reads of a layer's outputs in one direction.

    Raises:
        ValueError: `output` names none of the cell's outputs, or it has several and none is named.
    """
    if traced.outputs is None:
        if output is not None:
            raise ValueError(f"output: the cell names no outputs; leave it out, got {output!r}")
        return traced.output_size
    names = ", ".join(traced.outputs)
    if output is None and num_layers > 1 and len(traced.outputs) > 1:
        raise ValueError(f"output: expected the one that the next layer reads, of {names}")
    if output is not None and output not in traced.outputs:
        raise ValueError(f"output: expected one of {names}, got {output!r}")
    return traced.outputs[output or next(iter(traced.outputs))]


def trace_cell(cell: BoundCell) -> Traced:
    """Traces a cell in both modes.

    Raises:
        CellError: the cell leaves the language, or is another program each time.
    """
    evaluation, again, training = trace(cell), trace(cell), trace(cell, training=True)
    if to_text(evaluation) != to_text(again):
        raise cell.error(
            "it is another program each time that it is called: it reads what changes, such as "
            "Python's random numbers; write rnn.dropout or rnn.zoneout, or give x the noise"
        )
    return Traced(
        training.declarations,
        tuple(d.name for d in training.declarations),
        [torch.Size(d.shape) for d in training.declarations],
        tuple(i for i, d in enumerate(training.declarations) if d.shape != d.read_shape),
        to_text(evaluation),
        to_text(training),
        training.draws,
        training.output_size,
        training.outputs,
    )


def explain_misfit(
    names: list[str], found: list[Tensor], traced: Traced, dtype: torch.dtype, device: torch.device
) -> Exception:
    """Returns the error that says which parameter of a run does not fit: the shape that its cell
    declares, the dtype of the first parameter, or the device of x."""
    for name, tensor, shape in zip(names, found, traced.shapes, strict=True):
        if tensor.shape != shape:
            expected = tuple(shape)
            return ValueError(f"{name}: expected shape {expected}, got {tuple(tensor.shape)}")
        if tensor.dtype != dtype:
            return TypeError(
                f"{name}: expected the dtype of the other parameters, {dtype}, got "
                f"{tensor.dtype}; convert the whole layer with .to(...)"
            )
        if tensor.device != device:
            return ValueError(
                f"x: expected the device of the parameters, {tensor.device} as {name}, got {device}"
            )
    raise AssertionError("every parameter fits")
