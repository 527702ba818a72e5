"""Binds tensors to the buffers of a compiled loop.

B batch, T time steps, n features.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import (
    _empty_strided_cuda,  # pyright: ignore[reportAttributeAccessIssue]
    _reinterpret_tensor,  # pyright: ignore[reportAttributeAccessIssue]
)

from hoconv.recurrent.codegen.storage import Buffer, Storage
from hoconv.recurrent.ir.evaluate import DTYPES
from hoconv.recurrent.ir.program import Program, Value
from hoconv.recurrent.runtime import pages
from hoconv.recurrent.runtime.interpret import Tensors
from hoconv.recurrent.runtime.pages import contiguous_strides

_KEPT = 1024  # descriptions of a storage, for a T and a B


class _Layout(NamedTuple):
    """The tensors that T steps of B rows read and write.

    Attributes:
        values: the values that are given: sequences, and the params that the steps read.
        given: the buffers of these, and of the first states where the loop reads them.
        shapes, dtypes: of the tensors of these.
        dense: those of them that are contiguous: the steps know no strides.
        made: the other buffers, and the shapes, strides and dtypes of their tensors.
    """

    values: tuple[Value, ...]
    given: tuple[Buffer, ...]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    dense: tuple[Buffer, ...]
    made: tuple[tuple[Buffer, tuple[int, ...], tuple[int, ...], torch.dtype], ...]


@functools.lru_cache(_KEPT)
def _lay_out(program: Program, storage: Storage, T: int, B: int) -> _Layout:
    params = zip((p.value for p in program.params), storage.params, strict=True)
    sequences = (*(v for _, v in program.sequences), *program.made_before)
    # Ops before and after the loop alone read the weights of x, say.
    homes = {v: b for v, b in params if v in program.read}
    homes |= zip(sequences, storage.sequences, strict=True)
    given = (*homes.values(), *storage.first)
    made = (b for b in storage.buffers if b not in {*storage.params, *given})
    return _Layout(
        tuple(homes),
        given,
        [torch.Size(b.shape(T, B)) for b in given],
        [DTYPES[b.type.dtype] for b in given],
        tuple(b for b in given if b not in storage.strided),
        tuple(
            (b, shape := b.shape(T, B), contiguous_strides(shape), DTYPES[b.type.dtype])
            for b in made
        ),
    )


def bind(
    program: Program,
    storage: Storage,
    T: int,
    B: int,
    values: Tensors,
    initial: list[Tensor],
    resident: Mapping[Buffer, Tensor],
) -> dict[Buffer, Tensor]:
    """Gives each buffer that the steps use a tensor, and writes the initial states where a buffer
    keeps them.

    Args:
        values: the tensors that exist before the loop.
        initial: (B, n) of each state.
        resident: the tensors of buffers with fixed addresses; values are copied into them.

    The current GPU is that of `values`, if they are on one.
    """
    layout = _lay_out(program, storage, T, B)
    given = [values[v] for v in layout.values]
    if storage.first:
        given += initial
    device = values[program.sequences[0][1]].device
    if (
        [t.shape for t in given] != layout.shapes
        or [t.dtype for t in given] != layout.dtypes
        or [t.device for t in given] != [device] * len(given)
    ):
        raise _explain(layout, given, device)
    tensors = dict(zip(layout.given, given, strict=True))
    for buffer, own in resident.items():
        if buffer in tensors:
            own.copy_(tensors[buffer])
        tensors[buffer] = own
    for buffer in layout.dense:
        if not (tensor := tensors[buffer]).is_contiguous():
            tensors[buffer] = tensor.contiguous()
    allocate = pages.allocate if device.type == "cpu" else _empty_strided_cuda
    for buffer, shape, strides, dtype in layout.made:
        if buffer not in tensors:
            tensors[buffer] = allocate(shape, strides, dtype)
    if not storage.first:
        for own, first in zip(storage.initial, initial, strict=True):
            for each in own:
                start = T - 1 if each.kind == "history" and program.reverse else 0
                tensors[each].select(0, start).copy_(first)
    return tensors


def _explain(layout: _Layout, given: list[Tensor], device: torch.device) -> ValueError:
    """Says what differs from what compiled code reads, through bare pointers."""
    for buffer, shape, dtype, t in zip(layout.given, layout.shapes, layout.dtypes, given):
        if (t.shape, t.dtype, t.device) != (shape, dtype, device):
            return ValueError(
                f"hoconv::recurrent: {buffer.name}: the compiled loop reads {dtype}, "
                f"{tuple(shape)}, {device}; got {t.dtype}, {tuple(t.shape)}, {t.device}"
            )
    raise AssertionError("nothing differs")


def results(
    program: Program, storage: Storage, tensors: Mapping[Buffer, Tensor], T: int
) -> tuple[Tensors, list[Tensor]]:
    """The sequences that T steps have written, and the states after the last step."""
    written: Tensors = {}
    for each, buffer in zip(program.yields, storage.yields, strict=True):
        tensor = tensors[buffer]
        if buffer.kind == "history":  # without the state after the last step
            tensor = _reinterpret_tensor(tensor, (T, *tensor.shape[1:]), tensor.stride(), 0)
        written[each.sequence] = tensor
    if storage.last:
        return written, [tensors[buffer] for buffer in storage.last]
    final = [
        tensors[b].select(0, T if b.kind == "history" else T % 2).clone() for b in storage.states
    ]
    return written, final
