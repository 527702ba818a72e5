"""Runs the time loop of a program on a GPU in chunks of steps, by tensor cores.

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
from hoconv.recurrent.codegen.matrix.chunks import READ, WRITTEN, ChunkSource
from hoconv.recurrent.ir.evaluate import DTYPES
from hoconv.recurrent.ir.program import Program, count_segments
from hoconv.recurrent.passes.matrix.linear import Linear, Rows
from hoconv.recurrent.runtime.interpret import Tensors
from hoconv.recurrent.runtime.matrices import SHARED_BYTES

LEAST_STEPS = 128  # of fewer, one kernel that keeps the states in registers waits less
_ABSENT = [0] * 5
_AMPERE = (8, 0)  # the first with products in TF32

# Launches a kernel: its name, the rows and the blocks of its grid, shared bytes, and its Call.
Launch = Callable[[str, int, int, int, list[int]], None]


class ChunkLoop:
    """Runs the steps of one program."""

    def __init__(self, source: ChunkSource) -> None:
        self.source = source
        compile = functools.partial(compile_cuda, "recurrent", source.text)
        self._code: Callable[[str], Path] = functools.cache(compile)
        self._kernels = functools.cache(self._load)

    def serves(self, T: int, device: torch.device) -> bool:
        """Returns whether the kernels run so many steps on a GPU, and are faster than steps."""
        return T >= LEAST_STEPS and self._fits(torch.cuda.get_device_capability(device))

    def prepare(self, architecture: str) -> None:
        """Compiles the kernels, where a GPU can run them.

        Raises:
            hoconv.jit.BuildError: NVRTC fails.
        """
        digits = architecture.removeprefix("sm_")
        if self._fits((int(digits[:-1]), int(digits[-1]))):
            self._code(architecture)

    def run(
        self, program: Program, values: Tensors, initial: list[Tensor], T: int, B: int,
        device: torch.device,
    ) -> tuple[Tensors, list[Tensor]]:  # fmt: skip
        """As :data:`hoconv.recurrent.runtime.interpret.Loop`, on the current device."""
        major, minor = torch.cuda.get_device_capability(device)
        kernels, threads = self._kernels(f"sm_{major}{minor}"), self.source.threads

        def launch(name: str, rows: int, blocks: int, shared_bytes: int, call: list[int]) -> None:
            kernels(name, rows, blocks, threads, as_argument(call), shared_bytes=shared_bytes)

        return run_chunks(self.source, launch, program, values, initial, T, B, device)

    def _fits(self, capability: tuple[int, int]) -> bool:
        most = 1024 * SHARED_BYTES.get("sm_{}{}".format(*capability), 0)
        return capability >= _AMPERE and self.source.step_bytes <= most

    def _load(self, architecture: str) -> Cubin:
        return open_cubin(self._code(architecture))


def run_chunks(
    source: ChunkSource, launch: Launch, program: Program, values: Tensors, initial: list[Tensor],
    T: int, B: int, device: torch.device,
) -> tuple[Tensors, list[Tensor]]:  # fmt: skip
    """Gives the kernels their memory, launches them and adds what heads have written apart."""
    linear, chunks = source.linear, count_segments(T)
    size = linear.state.value.type.size
    backward = "d_q" in linear.writes
    # A gradient runs from the last step of the sequence to the first; chunks are in its order.
    reverse = program.reverse != backward
    written: Tensors = {}
    call = [T, B, source.heads]
    for rows in map(linear.reads.get, READ):
        call += _describe(linear, rows, values[rows.value], T, reverse) if rows else _ABSENT
    for name, rows in ((name, linear.writes.get(name)) for name in WRITTEN):
        if rows is None:
            call += _ABSENT
            continue
        heads = [source.heads] * linear.sums_heads(name)
        dtype, shape = DTYPES[rows.value.type.dtype], (T, B, *heads, rows.value.type.size)
        written[rows.value] = torch.empty(shape, dtype=dtype, device=device)
        call += _describe(linear, rows, written[rows.value], T, reverse)
    first = initial[0].contiguous()
    last, between = first.new_empty(B, size), first.new_empty(chunks, B, size)
    states = values[program.replays[0].value].contiguous() if backward else between
    call += [first.data_ptr(), last.data_ptr()]
    launch("run_states", B, source.heads * source.slabs, source.state_bytes,
           [*call, between.data_ptr(), 0])  # fmt: skip
    launch("run_steps", B * chunks, source.heads, source.step_bytes,
           [*call, states.data_ptr(), between.data_ptr()])  # fmt: skip
    written = {value: t.sum(2) if t.dim() == 4 else t for value, t in written.items()}
    if rows := linear.writes.get("states"):
        written[rows.value] = between
    return written, [last]


def _describe(linear: Linear, rows: Rows, tensor: Tensor, T: int, reverse: bool) -> list[int]:
    """The fields of the kernels' ``Rows``: an address, and how far steps, rows of the batch, heads
    and features lie apart.

    Args:
        tensor: (T, B, n), (1, B, n) or (n,); (T, B, heads, n) of a sum that heads write apart.
    """
    *leading, feature = tensor.stride()
    step, row, *heads = leading or (0, 0)
    along = linear.columns if linear.columns in rows.axes else linear.keys
    head = heads[0] if heads else rows.stride(linear.heads) * feature
    address = tensor.data_ptr() + rows.start * feature * tensor.element_size()
    if rows.value.type.rate != "sequence":
        step = 0
    elif reverse:
        address += (T - 1) * step * tensor.element_size()
        step = -step
    return [address, step, row, head, rows.stride(along) * feature]
