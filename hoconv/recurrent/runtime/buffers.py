"""Binds tensors to the buffers of a compiled loop.

B batch, T time steps, n features.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hoconv.recurrent.codegen.storage import Buffer, Storage
from hoconv.recurrent.ir.evaluate import DTYPES
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.runtime import pages
from hoconv.recurrent.runtime.interpret import Tensors

_KEPT = 1024  # descriptions of a storage, for a T and a B


class _Described(NamedTuple):
    """A buffer, the shape and dtype of its tensor, and whether that need not be contiguous."""

    buffer: Buffer
    shape: tuple[int, ...]
    dtype: torch.dtype
    strided: bool


@functools.lru_cache(_KEPT)
def _describe(
    storage: Storage, T: int, B: int
) -> tuple[tuple[_Described, ...], tuple[_Described, ...]]:
    """The buffers of tensors that are given, in that order, and the others."""

    def describe(buffers: Iterable[Buffer]) -> tuple[_Described, ...]:
        return tuple(
            _Described(b, b.shape(T, B), DTYPES[b.type.dtype], b in storage.strided)
            for b in buffers
        )

    given = (*storage.params, *storage.sequences, *storage.first)
    return describe(given), describe(b for b in storage.buffers if b not in given)


def bind(
    program: Program,
    storage: Storage,
    T: int,
    B: int,
    values: Tensors,
    initial: list[Tensor],
    resident: Mapping[Buffer, Tensor],
) -> dict[Buffer, Tensor]:
    """Gives each buffer a tensor, and writes the initial states where a buffer keeps them.

    Args:
        values: the tensors that exist before the loop.
        initial: (B, n) of each state.
        resident: the tensors of buffers with fixed addresses; values are copied into them.
    """
    described, others = _describe(storage, T, B)
    device = values[program.sequences[0][1]].device
    given = [values[p.value] for p in program.params] + [values[v] for _, v in program.sequences]
    given += [values[v] for v in program.made_before]
    if storage.first:
        given += initial
    tensors = dict(resident)
    for (buffer, shape, dtype, strided), tensor in zip(described, given, strict=True):
        # Compiled code reads it through a bare pointer.
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
            raise ValueError(
                f"hoconv::recurrent: {buffer.name}: the compiled loop reads {dtype}, {shape}, "
                f"{device}; got {tensor.dtype}, {tuple(tensor.shape)}, {tensor.device}"
            )
        if buffer in resident:
            resident[buffer].copy_(tensor)
        else:
            tensors[buffer] = tensor if strided or tensor.is_contiguous() else tensor.contiguous()
    for buffer, shape, dtype, _ in others:
        if buffer not in tensors:
            tensors[buffer] = (
                pages.allocate(shape, dtype)
                if device.type == "cpu"
                else torch.empty(shape, dtype=dtype, device=device)
            )
    if not storage.first:
        for own, first in zip(storage.initial, initial, strict=True):
            for each in own:
                start = T - 1 if each.kind == "history" and program.reverse else 0
                tensors[each].select(0, start).copy_(first)
    return tensors


def results(
    program: Program, storage: Storage, tensors: Mapping[Buffer, Tensor], T: int
) -> tuple[Tensors, list[Tensor]]:
    """The sequences that T steps have written, and the states after the last step."""
    written: Tensors = {
        each.sequence: tensors[buffer].narrow(0, 0, T)
        if buffer.kind == "history"
        else tensors[buffer]
        for each, buffer in zip(program.yields, storage.yields, strict=True)
    }
    if storage.last:
        return written, [tensors[buffer] for buffer in storage.last]
    final = [
        tensors[b].select(0, T if b.kind == "history" else T % 2).clone() for b in storage.states
    ]
    return written, final
