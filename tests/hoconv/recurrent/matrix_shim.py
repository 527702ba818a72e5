"""Runs generated kernels of matrix states on a CPU, by the fibers of cluster_shim.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hoconv.jit.driver import as_argument
from hoconv.jit.generated import compile_cpp
from hoconv.recurrent.codegen.matrix.kernel import LEAST_SHARED_BYTES, MatrixSource, emit_matrix
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.runtime.interpret import GroupLoops, Tensors, count_steps
from hoconv.recurrent.runtime.matrices import run_matrix
from tests.hoconv.recurrent.cluster_shim import as_function, with_fibers


def shim_matrices(
    programs: Mapping[str, Program], reversed: bool = False,
    shared_bytes: int = LEAST_SHARED_BYTES,
) -> dict[str, ShimMatrix]:  # fmt: skip
    """As :func:`hoconv.recurrent.runtime.cpp.compile_loops`, of kernels of matrix states.

    Args:
        reversed: whether the last thread runs first.
    """
    sources: dict[str, MatrixSource] = {}
    for name, program in programs.items():
        source = emit_matrix(program, shared_bytes)
        assert isinstance(source, MatrixSource), f"{name}: {source}"
        sources[name] = source
    text = "".join((
        with_fibers("recurrent/matrix.cuh"),
        *(_namespace(name, source) for name, source in sources.items()),
    ))  # fmt: skip
    library = ctypes.CDLL(str(compile_cpp("recurrent", text)))
    return {
        name: ShimMatrix(source, getattr(library, f"launch_{name}"), reversed)
        for name, source in sources.items()
    }


def _namespace(name: str, source: MatrixSource) -> str:
    sizes = f"1, {source.threads}, 1, {source.shared_bytes}"
    return f"""
namespace {name} {{
{as_function(source.text)}
}}
extern "C" void launch_{name}(const {name}::Call* call, int rows, bool reversed) {{
  hoconv::recurrent::run_clusters(rows, {source.blocks}, {sizes}, reversed,
                                  [=] {{ {name}::run_matrix(*call); }});
}}
"""


class ShimMatrix:
    """Runs the steps of one program, as ``hoconv.recurrent.runtime.cuda.CudaLoop``."""

    groups: GroupLoops = {}

    def __init__(self, source: MatrixSource, launch: Callable[..., None], reversed: bool) -> None:
        self.source = source
        self.launch = launch
        self.reversed = reversed

    def __call__(
        self, program: Program, values: Tensors, initial: list[Tensor], seed: Tensor | None
    ) -> tuple[Tensors, list[Tensor]]:
        T, B = count_steps(program, values)

        def launch(call: list[int]) -> None:
            self.launch(ctypes.byref(as_argument(call)), B, self.reversed)

        device = torch.device("cpu")
        return run_matrix(self.source, launch, program, values, initial, seed, T, B, device)
