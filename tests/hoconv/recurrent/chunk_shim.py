"""Runs kernels that take chunks of steps on a CPU, by the fibers of cluster_shim.py."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hoconv.jit.driver import as_argument
from hoconv.jit.generated import compile_cpp
from hoconv.recurrent.codegen.matrix.chunks import Block, ChunkSource, emit_chunks
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.runtime.chunks import run_chunks
from hoconv.recurrent.runtime.interpret import GroupLoops, Tensors, count_steps
from tests.hoconv.recurrent.cluster_shim import as_function, with_fibers

# Each after those that it includes.
_FILES = (
    "rows", "products", "steps", "shared_steps", "states", "solve", "columns", "keys",
    "shared_states", "shared_columns", "shared_keys",
)  # fmt: skip


def shim_chunks(programs: Mapping[str, Program], reversed: bool = False) -> dict[str, ShimChunks]:
    """As :func:`hoconv.recurrent.runtime.cpp.compile_loops`, of kernels that take chunks.

    Args:
        reversed: whether the last thread runs first.
    """
    sources: dict[str, ChunkSource] = {}
    for name, program in programs.items():
        source = emit_chunks(program)
        assert isinstance(source, ChunkSource), f"{name}: {source}"
        sources[name] = source
    text = with_fibers(*(f"recurrent/chunks/{name}.cuh" for name in _FILES))
    text += "".join(_namespace(name, source) for name, source in sources.items())
    library = ctypes.CDLL(str(compile_cpp("recurrent", text, ["-O1"])))
    return {name: ShimChunks(name, each, library, reversed) for name, each in sources.items()}


def _namespace(name: str, source: ChunkSource) -> str:
    return "".join(
        f"""
namespace {name}_{kernel} {{
{as_function(source.texts[kernel])}
}}
extern "C" void launch_{name}_{kernel}(const {name}_{kernel}::Call* call, int rows, int blocks,
                                       int bytes, bool reversed) {{
  hoconv::recurrent::run_clusters(rows, blocks, 1, {block.threads}, 1, bytes, reversed,
                                  [=] {{ {name}_{kernel}::{kernel}(*call); }});
}}
"""
        for kernel, block in source.blocks.items()
    )


class ShimChunks:
    """Runs the steps of one program, as ``hoconv.recurrent.runtime.cuda.CudaLoop``."""

    groups: GroupLoops = {}

    def __init__(self, name: str, source: ChunkSource, library: Any, reversed: bool) -> None:
        self.name, self.source, self.library, self.reversed = name, source, library, reversed

    def __call__(
        self, program: Program, values: Tensors, initial: list[Tensor], seed: Tensor | None
    ) -> tuple[Tensors, list[Tensor]]:
        T, B = count_steps(program, values)

        def launch(kernel: str, rows: int, blocks: int, each: Block, call: list[int]) -> None:
            function = self.library[f"launch_{self.name}_{kernel}"]
            shared = each.shared_bytes
            function(ctypes.byref(as_argument(call)), rows, blocks, shared, self.reversed)

        device = torch.device("cpu")
        return run_chunks(self.source, launch, program, values, initial, T, B, device)
