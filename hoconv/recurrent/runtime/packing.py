"""Packs a layer's parameters as a program reads them, and unpacks their gradients.

m features of a result, n features of an operand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from hoconv.recurrent.ir.program import Piece, Program


def pack(program: Program, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensor of each param of a program: its pieces, concatenated by rows, contiguous."""
    found = []
    for param in program.params:
        pieces = [_piece(piece, parameters) for piece in param.pieces]
        found.append(pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces))
    return found


def unpack(
    program: Program, results: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The gradient of each parameter, from the results of a backward program; 0 without one."""
    parts: dict[str, dict[tuple[int, int] | None, Tensor]] = defaultdict(dict)
    for i, param in enumerate(program.params):
        if (result := results.get(f"d_{i}")) is None:
            found = [torch.zeros_like(_piece(piece, parameters)) for piece in param.pieces]
        else:
            found = result.split([len(parameters[piece.parameter]) for piece in param.pieces])
        for piece, part in zip(param.pieces, found, strict=True):
            parts[piece.parameter][piece.columns] = part
    return {
        name: torch.cat([part for _, part in sorted(parts[name].items())], -1)
        for name in parameters
    }


def _piece(piece: Piece, parameters: Mapping[str, Tensor]) -> Tensor:
    whole = parameters[piece.parameter]
    if piece.columns is None:
        return whole
    start, stop = piece.columns
    return whole.narrow(1, start, stop - start)
