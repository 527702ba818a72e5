"""Runs generated scans on a CPU, by the fibers of cluster_shim.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

from torch import Tensor

from hoconv.jit.driver import as_argument
from hoconv.jit.generated import compile_cpp
from hoconv.recurrent.codegen.scan import LANES, ScanSource, emit_scan
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.runtime.buffers import bind, results
from hoconv.recurrent.runtime.interpret import GroupLoops, Tensors, count_steps
from hoconv.recurrent.runtime.workspace import describe_call
from tests.hoconv.recurrent.cluster_shim import as_function, with_fibers


def shim_scans(
    programs: Mapping[str, Program], warps: int, blocks: int, reversed: bool = False
) -> dict[str, ShimScan]:
    """As :func:`hoconv.recurrent.runtime.cpp.compile_loops`, of kernels that scan.

    Args:
        warps: of a block.
        blocks: of a cluster.
        reversed: whether the last thread runs first.
    """
    sources: dict[str, ScanSource] = {}
    for name, program in programs.items():
        source = emit_scan(program)
        assert source is not None, f"{name}: not scanned"
        sources[name] = source
    text = "".join((
        with_fibers("recurrent/scan.cuh"),
        *(_namespace(name, source, blocks, warps) for name, source in sources.items()),
    ))  # fmt: skip
    library = ctypes.CDLL(str(compile_cpp("recurrent", text)))
    return {
        name: ShimScan(source, getattr(library, f"launch_{name}"), blocks, reversed)
        for name, source in sources.items()
    }


def _namespace(name: str, source: ScanSource, blocks: int, warps: int) -> str:
    sizes = f"{blocks}, {warps * LANES}, 1, {source.shared_bytes}"
    return f"""
namespace {name} {{
{as_function(source.text)}
}}
extern "C" void launch_{name}(const {name}::Call* call, int clusters, bool reversed) {{
  hoconv::recurrent::run_clusters(clusters, 1, {sizes}, reversed, [=] {{ {name}::scan(*call); }});
}}
"""


class ShimScan:
    """Runs the steps of one program, as ``hoconv.recurrent.runtime.cuda.CudaLoop``."""

    groups: GroupLoops = {}

    def __init__(
        self, source: ScanSource, launch: Callable[..., None], blocks: int, reversed: bool
    ) -> None:
        self.source = source
        self.launch = launch
        self.blocks = blocks
        self.reversed = reversed

    def __call__(
        self, program: Program, values: Tensors, initial: list[Tensor], seed: Tensor | None
    ) -> tuple[Tensors, list[Tensor]]:
        T, B = count_steps(program, values)
        storage = self.source.steps.storage
        tensors = bind(program, storage, T, B, values, initial, {})
        call = describe_call(storage, T, B, seed, tensors, begin=self.blocks)
        clusters = -(-B * self.source.features // LANES)
        self.launch(ctypes.byref(as_argument(call)), clusters, self.reversed)
        return results(program, storage, tensors, T)
