"""Binds tensors to the buffers of a compiled loop.

B batch, T time steps, n features.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hoconv.recurrent.codegen.storage import Buffer, Storage
from hoconv.recurrent.ir.evaluate import DTYPES
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.runtime.interpret import Tensors, count_steps

_KEPT = 1024  # descriptions of a storage, for a T and a B


@functools.lru_cache(_KEPT)
def _describe(storage: Storage, T: int, B: int) -> dict[Buffer, tuple[Any, torch.dtype]]:
    """The shape and the dtype of each buffer's tensor."""
    buffers = {*storage.buffers, *storage.params, *storage.sequences, *storage.first}
    return {each: (each.shape(T, B), DTYPES[each.type.dtype]) for each in buffers}


def bind(
    program: Program,
    storage: Storage,
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
    T, B = count_steps(program, values)
    described = _describe(storage, T, B)
    device = values[program.sequences[0][1]].device
    given = [values[p.value] for p in program.params] + [values[v] for _, v in program.sequences]
    given += [values[v] for v in program.made_before]
    buffers = (*storage.params, *storage.sequences)
    if storage.first:
        given, buffers = given + initial, buffers + storage.first
    tensors = dict(resident)
    for buffer, tensor in zip(buffers, given, strict=True):
        shape, dtype = described[buffer]
        # Compiled code reads it through a bare pointer.
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
            raise ValueError(
                f"hoconv::recurrent: {buffer.name}: the compiled loop reads {dtype}, {shape}, "
                f"{device}; got {tensor.dtype}, {tuple(tensor.shape)}, {tensor.device}"
            )
        if buffer in resident:
            resident[buffer].copy_(tensor)
        else:
            tensors[buffer] = tensor if buffer in storage.strided else tensor.contiguous()
    for buffer in storage.buffers:
        if buffer not in tensors:
            shape, dtype = described[buffer]
            tensors[buffer] = torch.empty(shape, dtype=dtype, device=device)
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
