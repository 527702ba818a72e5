"""Compiles and runs the time loop of a program in C++ on the CPU.

B batch, T time steps, n features.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hoconv import jit
from hoconv.jit.generated import compile_cpp
from hoconv.recurrent.codegen.cpp import HEADER, CppSource, emit_cpp
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.passes.rows import make_row_programs
from hoconv.recurrent.runtime import products
from hoconv.recurrent.runtime.buffers import bind, results
from hoconv.recurrent.runtime.interpret import GroupLoops, Tensors, count_steps
from hoconv.recurrent.runtime.pages import allocate_aligned


def obstacle() -> str | None:
    """Says why loops cannot be compiled here, and the fix. Compiles nothing."""
    try:
        jit.compiler("cpu")
    except jit.BuildError as error:
        return str(error)
    return None


def load() -> None:
    """Checks the compiler and the cache by compiling a library without loops.

    Raises:
        hoconv.jit.BuildError: one of them does not work.
    """
    compile_loops({})


def has_rows(B: int) -> bool:
    """Returns whether threads take so many of B rows that a product of one step takes them no
    longer, by row, than a product of all steps: csrc/recurrent/product.h has its speed with 32
    rows."""
    return 32 * torch.get_num_threads() <= B


def compile_loops(programs: Mapping[str, Program]) -> dict[str, CppLoop]:
    """Compiles named programs into one library: their time loops, and the groups around these.

    Raises:
        hoconv.jit.BuildError: there is no compiler, or it failed.
    """
    products.load()  # they multiply before and after the loops
    groups = {
        name: {
            f"{name}_group{i}": each for i, each in enumerate(make_row_programs(program).items())
        }
        for name, program in programs.items()
    }
    named = dict(programs)
    named |= {name: each for of in groups.values() for name, (_, each) in of.items()}
    sources = {name: emit_cpp(program, name) for name, program in named.items()}
    text = "\n\n".join((HEADER, *(source.text for source in sources.values())))
    library = ctypes.CDLL(str(compile_cpp("recurrent", text)))

    def loop(name: str) -> CppLoop:
        of = groups.get(name, {}).items()
        found = {group: (program, loop(each)) for each, (group, program) in of}
        return CppLoop(sources[name], library[name], found)

    return {name: loop(name) for name in programs}


class CppLoop:
    """Runs the steps of one program.

    Attributes:
        groups: what runs the groups around the loop.
    """

    def __init__(self, source: CppSource, function: Any, groups: GroupLoops) -> None:
        self.source = source
        self.groups = groups
        self.function = function
        # Bytes, which a call makes in a third of the time of an array of ctypes.
        self._addresses = struct.Struct(f"{len(source.storage.buffers)}P")
        self._strides = struct.Struct(f"{2 * len(source.storage.strided)}q")
        self.function.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 4

    def __call__(
        self, program: Program, values: Tensors, initial: list[Tensor], seed: Tensor | None
    ) -> tuple[Tensors, list[Tensor]]:
        """As :data:`hoconv.recurrent.runtime.interpret.Loop`."""
        storage = self.source.storage
        T, B = count_steps(program, values)
        tensors = bind(program, storage, T, B, values, initial, {})
        addresses = [tensors[b].data_ptr() if b in tensors else 0 for b in storage.buffers]
        strides = [stride for b in storage.strided for stride in tensors[b].stride()]
        packed_bytes, row_bytes = self.source.packed_bytes, self.source.row_bytes
        _memory, packed = allocate_aligned(packed_bytes + B * row_bytes)
        failed = self.function(
            T, B, 0 if seed is None else int(seed), self._addresses.pack(*addresses),
            self._strides.pack(*strides), packed, packed + packed_bytes,
        )  # fmt: skip
        if failed:
            raise RuntimeError(f"{program.name}: PyTorch's product or threads failed in the loop")
        return results(program, storage, tensors, T)
