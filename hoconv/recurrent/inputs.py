"""The inputs of a layer's call beside x.

T time steps, B batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from hoconv.recurrent.frontend.cell import BoundCell


def gather_inputs(
    cell: BoundCell, inputs: Mapping[str, Tensor], x: Tensor, single: bool, batch_first: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns a cell's inputs beside x as rows (T, B, n), and its constants as (1, B, n), in their
    order.

    Args:
        x: (T, B, I).
        single: whether inputs are those of one sequence, without B.
        batch_first: whether they are (B, T, ...).

    Raises:
        TypeError: an input is missing, not the cell's, or of another dtype or device than x.
        ValueError: a shape that does not fit.
    """
    name, shapes = cell.name, cell.input_shapes
    if unknown := [given for given in inputs if given not in shapes]:
        listed = ", ".join(shapes) or "none"
        raise TypeError(f"{unknown[0]}: not an input of the cell {name}; beside x it has {listed}")
    if missing := [wanted for wanted in shapes if wanted not in inputs]:
        raise TypeError(f"{missing[0]}: the cell {name} needs this input: a tensor")
    constants = cell.cell.constants
    for given, shape in shapes.items():
        _check(given, inputs[given], x, shape, given in constants, single, batch_first)
    beside = [
        _arrange(inputs[given], single, batch_first) for given in shapes if given not in constants
    ]
    repeated = [
        inputs[given].reshape(1, -1, math.prod(shape)).expand(1, x.shape[1], -1)
        for given, shape in cell.constant_shapes.items()
    ]
    return beside, repeated


def _check(
    name: str, given: object, x: Tensor, shape: tuple[int, ...], constant: bool, single: bool,
    batch_first: bool,
) -> None:  # fmt: skip
    T, B = x.shape[:2]
    if constant:
        allowed = [(1, *shape), shape if single else (B, *shape)]
        laid_out = "the same at every step"
    else:
        leading = (T,) if single else (B, T) if batch_first else (T, B)
        allowed = [(*leading, *shape)]
        laid_out = "laid out as x is"
    if not isinstance(given, Tensor) or given.shape not in allowed:
        got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"{name}: expected a tensor of shape {allowed[-1]}, {laid_out}, got {got}")
    if given.dtype != x.dtype or given.device != x.device:
        raise TypeError(
            f"{name}: expected {x.dtype} on {x.device}, as x is, got {given.dtype} on "
            f"{given.device}"
        )


def _arrange(given: Tensor, single: bool, batch_first: bool) -> Tensor:
    if single:
        given = given.unsqueeze(1)
    elif batch_first:
        given = given.transpose(0, 1)
    return given.flatten(2)
