"""Compiles and runs the time loop of a program in C++ on the CPU.

B batch, T time steps, n features.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hoconv.jit import MissingCompilerError
from hoconv.jit.generated import compile_cpp
from hoconv.recurrent.codegen.cpp import HEADER, CppSource, emit_cpp
from hoconv.recurrent.codegen.sizes import Lifted, lift
from hoconv.recurrent.ir.program import Group, Program
from hoconv.recurrent.passes.rows import make_row_programs
from hoconv.recurrent.runtime import products
from hoconv.recurrent.runtime.buffers import bind, results
from hoconv.recurrent.runtime.interpret import GroupLoops, Tensors, count_steps
from hoconv.recurrent.runtime.libraries import READY
from hoconv.recurrent.runtime.pages import allocate_aligned


def has_rows(B: int) -> bool:
    """Returns whether threads take so many of B rows that a product of one step takes them no
    longer, by row, than a product of all steps: csrc/recurrent/product.h has its speed with 32
    rows."""
    return 32 * torch.get_num_threads() <= B


def with_groups(
    programs: Mapping[str, Program],
) -> tuple[dict[str, Program], dict[str, dict[Group, str]]]:
    """Returns named programs and those of the groups around their loops; and the names of these, by
    the name of their program."""
    named, groups = dict(programs), {}
    for name, program in programs.items():
        found = make_row_programs(program)
        groups[name] = {group: f"{name}_group{i}" for i, group in enumerate(found)}
        named |= zip(groups[name].values(), found.values())
    return named, groups


def compile_loops(programs: Mapping[str, Program]) -> dict[str, CppLoop]:
    """Compiles named programs into one library, their time loops and the groups around these;
    unless they are those of ready cells that a wheel brings compiled.

    Raises:
        hoconv.jit.BuildError: there is no compiler, or it failed.
    """
    products.load()  # they multiply before and after the loops
    named, groups = with_groups(programs)
    sources = {name: emit_cpp(program, name) for name, program in named.items()}
    functions = _find_ready(sources) or _compile(sources)

    def loop(name: str) -> CppLoop:
        of = groups.get(name, {}).items()
        found = {group: (named[each], loop(each)) for group, each in of}
        return CppLoop(sources[name], functions[name], found)

    return {name: loop(name) for name in programs}


def _compile(sources: Mapping[str, CppSource]) -> dict[str, Function]:
    text = "\n\n".join((HEADER, *(source.text for source in sources.values())))
    try:
        library = ctypes.CDLL(str(compile_cpp("recurrent", text)))
    except MissingCompilerError as error:
        if _load_ready() is None:
            raise
        raise MissingCompilerError(
            f"hoconv's wheel brings no compiled loops of this layer's cell and options; {error}"
        ) from None
    return {name: Function(library[name]) for name in sources}


def _find_ready(sources: Mapping[str, CppSource]) -> dict[str, Function] | None:
    """Finds the loops among those of a wheel's ready cells; None where one is not there."""
    if (library := _load_ready()) is None:
        return None
    found = {}
    for name, source in sources.items():
        lifted = lift(source.marked)
        if not hasattr(library, lifted.name):
            return None
        found[name] = Function(library[lifted.name], lifted)
    return found


@functools.cache
def _load_ready() -> ctypes.CDLL | None:
    found = READY and READY.prebuilt()  # once: its sources are 9 MB to read
    return ctypes.CDLL(str(found)) if found else None


class Function:
    """A compiled loop, and its sizes and numbers where it serves all."""

    def __init__(self, call: Any, lifted: Lifted | None = None) -> None:
        sizes, numbers = (lifted.sizes, lifted.numbers) if lifted else ((), ())
        self.call = call
        self.sizes = struct.pack(f"{len(sizes)}q", *sizes)
        self.numbers = struct.pack(f"{len(numbers)}d", *numbers)


class CppLoop:
    """Runs the steps of one program.

    Attributes:
        groups: what runs the groups around the loop.
    """

    def __init__(self, source: CppSource, function: Function, groups: GroupLoops) -> None:
        self.source = source
        self.groups = groups
        self.function = function.call
        self._arrays = function.sizes, function.numbers
        # Bytes, which a call makes in a third of the time of an array of ctypes.
        self._addresses = struct.Struct(f"{len(source.storage.buffers)}P")
        self._strides = struct.Struct(f"{2 * len(source.storage.strided)}q")
        self.function.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 6

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
            self._strides.pack(*strides), packed, packed + packed_bytes, *self._arrays,
        )  # fmt: skip
        if failed:
            raise RuntimeError(f"{program.name}: PyTorch's product or threads failed in the loop")
        return results(program, storage, tensors, T)
