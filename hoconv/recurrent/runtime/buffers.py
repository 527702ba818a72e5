"""Binds tensors to the buffers of a compiled loop.

B batch, T time steps, n features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hoconv.recurrent.codegen.storage import Buffer, Storage
from hoconv.recurrent.ir.evaluate import DTYPES
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.runtime.interpret import Tensors, count_steps


def empty(buffer: Buffer, T: int, B: int, device: torch.device) -> Tensor:
    """Allocates the tensor of a buffer."""
    return torch.empty(buffer.shape(T, B), dtype=DTYPES[buffer.type.dtype], device=device)


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
    device = values[program.sequences[0][1]].device
    given = [values[p.value] for p in program.params] + [values[v] for _, v in program.sequences]
    given += [values[v] for v in program.made_before]
    buffers = (*storage.params, *storage.sequences)
    if storage.first:
        given, buffers = given + initial, buffers + storage.first
    tensors = dict(resident)
    for buffer, tensor in zip(buffers, given, strict=True):
        _check(buffer, tensor, T, B, device)
        if buffer in resident:
            resident[buffer].copy_(tensor)
        else:
            tensors[buffer] = tensor if buffer in storage.strided else tensor.contiguous()
    for buffer in storage.buffers:
        if buffer not in tensors:
            tensors[buffer] = empty(buffer, T, B, device)
    if not storage.first:
        for own, first in zip(storage.initial, initial, strict=True):
            for each in own:
                start = T - 1 if each.kind == "history" and program.reverse else 0
                tensors[each].select(0, start).copy_(first)
    return tensors


def _check(buffer: Buffer, tensor: Tensor, T: int, B: int, device: torch.device) -> None:
    """Checks a tensor before compiled code reads it through a bare pointer."""
    dtype, shape = DTYPES[buffer.type.dtype], buffer.shape(T, B)
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device != device:
        raise ValueError(
            f"hoconv::recurrent: {buffer.name}: the compiled loop reads {dtype}, {shape}, "
            f"{device}; got {tensor.dtype}, {tuple(tensor.shape)}, {tensor.device}"
        )


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
