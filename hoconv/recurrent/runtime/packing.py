"""Packs a layer's parameters as a program reads them, and unpacks their gradients.

What a program reads of several parameters, the same columns of each, are columns of one tensor: all
these parameters, concatenated by rows. Their gradients are rows of one tensor.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hoconv.recurrent.ir.program import Param, Piece, Program

_Names = tuple[str, ...]
_KEPT = 256  # programs


def pack(program: Program, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensor of each param of a program; its rows may lie apart."""
    wholes: dict[_Names, Tensor] = {}
    found = []
    for param, names in zip(program.params, group_params(program)[0], strict=True):
        if names is None:
            found.append(torch.cat([_read(parameters[p.parameter], p) for p in param.pieces]))
            continue
        if names not in wholes:
            wholes[names] = _concatenate([parameters[name] for name in names])
        found.append(_read(wholes[names], param.pieces[0]))
    return found


@functools.lru_cache(_KEPT)
def find_sources(program: Program) -> list[tuple[_Names, list[tuple[int, int | None]]]]:
    """Returns where the gradients of parameters lie: of those that lie together, or of one, what is
    concatenated by columns: the number of each param, and of its piece or None for all of them."""
    groups, together = group_params(program)
    parts: dict[_Names, dict[tuple[int, int], tuple[int, int | None]]] = defaultdict(dict)
    for i, (param, names) in enumerate(zip(program.params, groups, strict=True)):
        if names is not None and names in together:
            parts[names][param.pieces[0].columns or (0, 0)] = i, None
            continue
        for number, piece in enumerate(param.pieces):
            parts[piece.parameter,][piece.columns or (0, 0)] = i, number
    return [(names, [each for _, each in sorted(of.items())]) for names, of in parts.items()]


@functools.lru_cache(_KEPT)
def group_params(program: Program) -> tuple[list[_Names | None], set[_Names]]:
    """The parameters of which each param is the same columns, or None; and those groups of
    parameters of which nothing else reads one."""
    widths: dict[str, int] = defaultdict(int)
    for param in program.params:
        for piece in param.pieces:
            widths[piece.parameter] = max(widths[piece.parameter], (piece.columns or (0, 0))[1])

    def find_names(param: Param) -> _Names | None:
        names = tuple(piece.parameter for piece in param.pieces)
        read = {(piece.columns, widths[piece.parameter]) for piece in param.pieces}
        return names if len(read) == 1 and len({*names}) == len(names) else None

    groups = [find_names(param) for param in program.params]
    readers: dict[str, set[_Names | None]] = defaultdict(set)
    for param, names in zip(program.params, groups, strict=True):
        for piece in param.pieces:
            readers[piece.parameter].add(names)
    alone = {names for names in groups if names and all(len(readers[n]) == 1 for n in names)}
    return groups, alone


def separate(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Copies what shares memory with an earlier tensor, or with one of `others`."""
    taken = {t.untyped_storage().data_ptr() for t in others}
    found = []
    for tensor in tensors:
        start = tensor.untyped_storage().data_ptr()
        found.append(tensor.clone() if start in taken else tensor.contiguous())
        taken.add(start)
    return found


def _read(whole: Tensor, piece: Piece) -> Tensor:
    if piece.columns is None:
        return whole
    start, stop = piece.columns
    return whole.narrow(1, start, stop - start)


def _concatenate(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors, dim)
