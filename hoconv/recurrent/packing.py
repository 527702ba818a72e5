"""A layer's parameters as a program reads them, and their gradients back.

m features of a result, n features of an operand.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hoconv.recurrent.ir import Program


def packed(program: Program, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """Of each of the program's params: its pieces on top of each other, contiguous."""
    found = []
    for param in program.params:
        pieces = []
        for piece in param.pieces:
            tensor = parameters[piece.parameter]
            pieces.append(tensor if piece.columns is None else tensor[:, slice(*piece.columns)])
        found.append(pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces))
    return found


def unpacked(
    program: Program, results: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The gradient of each parameter from a gradient program's results; 0 where it has none."""
    gradients = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for i, param in enumerate(program.params):
        if (result := results.get(f"d_{i}")) is None:
            continue
        rows = [parameters[piece.parameter].shape[0] for piece in param.pieces]
        for piece, part in zip(param.pieces, result.split(rows), strict=True):
            whole = gradients[piece.parameter]
            (whole if piece.columns is None else whole[:, slice(*piece.columns)]).copy_(part)
    return gradients
