"""The time loop of a program as compiled C++, on the CPU.

B batch, T time steps, n features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hoconv.build.generated import compile_text
from hoconv.recurrent.emit.cpp import HEADER, Source, emit_cpp
from hoconv.recurrent.emit.storage import Buffer, outside_made
from hoconv.recurrent.evaluate import DTYPES
from hoconv.recurrent.interpret import Tensors, steps
from hoconv.recurrent.ir import Program


def compile_loops(programs: Mapping[str, Program]) -> dict[str, CppLoop]:
    """Compiles the time loops of programs, under their names, into one library.

    Raises:
        hoconv.build.BuildError: there is no compiler, or it failed.
    """
    sources = {name: emit_cpp(program, name) for name, program in programs.items()}
    text = "\n\n".join((HEADER, *(source.text for source in sources.values())))
    library = ctypes.CDLL(str(compile_text("recurrent", text)))
    return {name: CppLoop(source, library[name]) for name, source in sources.items()}


class CppLoop:
    """Runs the steps of one program."""

    def __init__(self, source: Source, function: Any) -> None:
        self.source = source
        self.function = function
        self.function.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 2

    def __call__(
        self, program: Program, values: Tensors, initial: list[Tensor], seed: Tensor | None
    ) -> tuple[Tensors, list[Tensor]]:
        """As :data:`hoconv.recurrent.interpret.Loop`."""
        storage = self.source.storage
        T, B = steps(program, values), initial[0].shape[0]
        given = [p.value for p in program.params] + [v for _, v in program.sequences]
        given += outside_made(program)
        tensors: dict[Buffer, Tensor] = {
            buffer: values[value].contiguous()
            for buffer, value in zip((*storage.params, *storage.sequences), given, strict=True)
        }
        for buffer in (*storage.states, *storage.yields, *storage.temporaries):
            if buffer not in tensors:
                tensors[buffer] = torch.empty(shape(buffer, T, B), dtype=DTYPES[buffer.type.dtype])
        for buffer, state in zip(storage.states, initial, strict=True):
            tensors[buffer][T - 1 if buffer.kind == "history" and program.reverse else 0] = state

        ordered = [tensors[buffer] for buffer in storage.buffers]
        pointers = (ctypes.c_void_p * len(ordered))(*(t.data_ptr() for t in ordered))
        scratch = torch.empty(B * self.source.scratch_bytes + 64, dtype=torch.uint8)
        start = (scratch.data_ptr() + 63) // 64 * 64
        if self.function(T, B, 0 if seed is None else int(seed), pointers, start):
            raise RuntimeError(f"{program.name}: PyTorch's matrix product failed in the time loop")

        written: Tensors = {}
        for each, buffer in zip(program.yields, storage.yields, strict=True):
            written[each.sequence] = tensors[buffer][:T]
        final = [tensors[b][T if b.kind == "history" else T % 2].clone() for b in storage.states]
        return written, final


def shape(buffer: Buffer, T: int, B: int) -> tuple[int, ...]:
    """The shape of the tensor that a buffer is."""
    leading = {"sequence": (T, B), "step": (B,), "state": (2, B), "history": (T + 1, B)}
    return (*leading[buffer.kind], buffer.type.size)
