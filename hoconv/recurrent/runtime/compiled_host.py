"""Runs a program whose steps are one kernel by one call of C++: csrc/recurrent/host/run.cpp.

B batch, T time steps, n features.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hoconv.jit import CSRC, Library
from hoconv.recurrent.ir.evaluate import DTYPES

if TYPE_CHECKING:
    from hoconv.recurrent.codegen.storage import Buffer
    from hoconv.recurrent.runtime.clusters import Kernel
    from hoconv.recurrent.runtime.instructions import HostProgram, Instruction

LIBRARY = Library("recurrent_host", sorted(CSRC.glob("recurrent/host/*.cpp")), include=[CSRC])
# In the order of `Instruction::Kind`; C++ knows no others.
_KINDS = (
    "cat", "contiguous", "unsqueeze", "narrow", "columns", "cast", "linear", "linear_t", "outer",
    "sum", "zero_rows", "zeros", "zeros_like", "split", "loop",
)  # fmt: skip
_BUFFER_KINDS = ("once", "sequence", "step", "history")  # in the order of `Buffer::Kind`
_MADE, _ABSENT = -1, -2


class CompiledHost:
    """What the host does in a run of a program on a GPU, without autograd.

    Args:
        host: that :func:`suits`.
        kernel: runs the steps.

    Raises:
        hoconv.jit.BuildError: there is no compiler, or it failed.
    """

    def __init__(self, host: HostProgram, kernel: Kernel) -> None:
        library, numbers = _load(), encode(host, kernel)
        given = (ctypes.c_int64 * len(numbers))(*numbers)
        self._program = library.hoconv_recurrent_make_program(given)
        weakref.finalize(self, library.hoconv_recurrent_free_program, self._program)
        self._run = torch.ops.hoconv.recurrent.host

    def __call__(self, given: list[Tensor], seed: Tensor | None, stream: int) -> list[Tensor]:
        """Runs the program.

        Args:
            given: the sequences, states and parameters, of the current GPU, as of
                :class:`hoconv.recurrent.runtime.host.HostCode`.
            seed: int64 scalar, of the random masks.
            stream: the address of the current stream.

        Returns:
            As of ``HostCode``; nothing if the tensors are not what the program is for, which that
            class explains.
        """
        return self._run(self._program, given, seed, stream)


def view_zeros(like: Tensor, zero: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros (B, n) that are all the number at an address on the device of `like`."""
    return torch.ops.hoconv.recurrent.zeros(like, zero, *shape, dtype)


@functools.cache
def can_compile() -> bool:
    """Whether there is the C++ that runs programs; says why if there is not."""
    if reason := LIBRARY.load():
        first = reason.partition("\n")[0]
        said = f"hoconv: calls of recurrent layers on small inputs take longer here; {first}"
        print(said, file=sys.stderr)
    return not reason


def suits(host: HostProgram) -> bool:
    """Whether C++ knows all that the host does in a run of a program."""
    return all(each.kind in _KINDS for each in host.instructions)


def encode(host: HostProgram, kernel: Kernel) -> list[int]:
    """The numbers of a program, as ``Program`` of run.cpp reads them."""
    count = 1 + max(t for each in host.instructions for t in each.outputs)
    numbers = [count, host.inputs, len(host.instructions)]
    for each in host.instructions:
        numbers.append(_KINDS.index(each.kind))
        for of in (each.inputs, each.outputs, _encode_attributes(each)):
            numbers += _list(of)
        if each.kind == "loop":
            numbers += _encode_loop(host, each, kernel)
    return [*numbers, *_list(host.results), host.separate, kernel.zero]


def _encode_attributes(each: Instruction) -> list[int]:
    attrs = each.attrs
    match each.kind:
        case "columns":
            _, shape, first = attrs
            return [*shape, first]
        case "cast":
            return [_type(attrs[0])]
        case "sum":
            dims, dtype = attrs
            return [_type(dtype), *dims]
        case "zero_rows":
            n, dtype = attrs
            return [n, _type(dtype)]
        case "zeros":
            return [*attrs[0]]
        case "loop":
            return []
        case _:
            return [*attrs]


def _encode_loop(host: HostProgram, each: Instruction, kernel: Kernel) -> list[int]:
    """The numbers of the loop, as ``Loop`` of run.cpp reads them."""
    source, program, (values,) = kernel.source, host.program, each.attrs
    storage, shape = source.storage, source.layout.shape
    homes = {p.value: b for p, b in zip(program.params, storage.params, strict=True)}
    sequences = (*(v for _, v in program.sequences), *program.made_before)
    homes |= zip(sequences, storage.sequences, strict=True)
    given = {homes[v]: i for i, v in enumerate(values)}
    given |= {b: len(values) + i for i, b in enumerate(storage.first)}

    def encode_buffer(buffer: Buffer) -> list[int]:
        made = _ABSENT if buffer in storage.params else _MADE
        return [
            given.get(buffer, made),
            _BUFFER_KINDS.index(buffer.kind),
            _type(buffer.type.dtype),
            buffer in storage.strided,
            buffer in sums,
            *_list(buffer.type.shape),
        ]

    sums = [b for s, b in zip(program.states, storage.last, strict=True) if s.total is not None]
    at = {buffer: i for i, buffer in enumerate(storage.buffers)}
    return [
        next(i for i, v in enumerate(values) if v.type.rate == "sequence"),
        len(storage.buffers),
        *(number for buffer in storage.buffers for number in encode_buffer(buffer)),
        *_list(at[b] for b in storage.strided),
        *_list(at[b] for b in storage.yields),
        *_list(at[b] for b in storage.last),
        program.reverse,
        shape.rows, shape.blocks, shape.clusters, shape.threads,
        source.layout.shared_bytes, source.layout.mail_bytes, source.layout.own_bytes,
        kernel.launch, kernel.address,
    ]  # fmt: skip


def _list(items: Iterable[int]) -> list[int]:
    """A list after its length."""
    items = [*items]
    return [len(items), *items]


def _type(dtype: str) -> int:
    return [*DTYPES].index(dtype)


@functools.cache
def _load() -> ctypes.CDLL:
    library = LIBRARY.functions()
    library.hoconv_recurrent_make_program.restype = ctypes.c_void_p
    library.hoconv_recurrent_free_program.argtypes = [ctypes.c_void_p]
    return library
