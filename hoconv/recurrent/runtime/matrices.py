"""Runs the time loop of a program on a GPU as one kernel that keeps matrix states in registers.

B batch, T time steps, n features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hoconv.jit.driver import Cubin, as_argument, open_cubin
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent.codegen.matrix.kernel import LEAST_SHARED_BYTES, MatrixSource, emit_matrix
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.runtime.buffers import bind, results
from hoconv.recurrent.runtime.interpret import Tensors
from hoconv.recurrent.runtime.workspace import describe_call

# That a block may have, by the first architecture of which this holds; CUDA keeps 1 KB of each.
SHARED_BYTES = {
    "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227,
    "sm_103": 227,
}  # fmt: skip


class MatrixLoop:
    """Runs the steps of one program, whose states are matrices of independent columns."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.source = functools.cache(self._emit)
        self._code = functools.cache(self._compile)
        self._kernels = functools.cache(self._load)

    def prepare(self, architecture: str) -> None:
        """Compiles the kernel.

        Raises:
            hoconv.jit.BuildError: NVRTC fails.
        """
        self._code(architecture)

    def run(
        self, program: Program, values: Tensors, initial: list[Tensor], seed: Tensor | None,
        T: int, B: int, device: torch.device,
    ) -> tuple[Tensors, list[Tensor]]:  # fmt: skip
        """As :data:`hoconv.recurrent.runtime.interpret.Loop`, on the current device."""
        major, minor = torch.cuda.get_device_capability(device)
        architecture = f"sm_{major}{minor}"
        source, launch = self.source(architecture), self._kernels(architecture)

        def run(call: list[int]) -> None:
            launch(
                "run_matrix", B, source.blocks, source.threads, as_argument(call),
                shared_bytes=source.shared_bytes,
            )  # fmt: skip

        return run_matrix(source, run, program, values, initial, seed, T, B, device)

    def _emit(self, architecture: str) -> MatrixSource:
        shared_bytes = 1024 * SHARED_BYTES.get(architecture, LEAST_SHARED_BYTES // 1024)
        source = emit_matrix(self.program, shared_bytes)
        assert isinstance(source, MatrixSource), source  # what fits in less fits in more
        return source

    def _compile(self, architecture: str) -> Path:
        return compile_cuda("recurrent", self.source(architecture).text, architecture)

    def _load(self, architecture: str) -> Cubin:
        return open_cubin(self._code(architecture))


def run_matrix(
    source: MatrixSource, launch: Callable[[list[int]], None], program: Program, values: Tensors,
    initial: list[Tensor], seed: Tensor | None, T: int, B: int, device: torch.device,
) -> tuple[Tensors, list[Tensor]]:  # fmt: skip
    """Gives the kernel its memory, launches it and adds what blocks have written in parts.

    Args:
        launch: launches the kernel, given the fields of its ``Call``.
    """
    storage = source.storage
    tensors = bind(program, storage, T, B, values, initial, {})
    blocks = B * source.blocks
    scratch = torch.empty(blocks * source.scratch_bytes, dtype=torch.uint8, device=device)
    launch(describe_call(storage, T, B, seed, tensors, scratch))
    written, final = results(program, storage, tensors, T)
    for each, parts in source.parts:
        found = written[each.sequence].view(T, B, parts, each.sequence.type.size)
        written[each.sequence] = found.sum(2)
    return written, final
