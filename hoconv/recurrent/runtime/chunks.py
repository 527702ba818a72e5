"""Runs the time loop of a program on a GPU in chunks of steps, by tensor cores.

B batch, T time steps, n features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from hoconv.jit.driver import Cubin, as_argument, open_cubin
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent.codegen.matrix.chunks import (
    OPERANDS,
    Block,
    ChunkSource,
    aligned,
)
from hoconv.recurrent.ir.evaluate import DTYPES
from hoconv.recurrent.ir.program import SEGMENT, Program, count_segments
from hoconv.recurrent.passes.matrix.linear import Linear, Rows
from hoconv.recurrent.runtime.interpret import Tensors
from hoconv.recurrent.runtime.matrices import SHARED_BYTES

LEAST_STEPS = 128  # of fewer, one kernel that keeps the states in registers waits less
# On an H200, chunks of 16 keys are faster for 64 states in all, steps of 16 and 32 keys for 512.
_STATES_OF_MULTIPROCESSOR = 2
_ABSENT = [0] * 4
_WORD = 4  # floats that a thread reads at once
_AMPERE = (8, 0)  # the first with products in TF32

# Launches a kernel: its name, the rows and the blocks of its grid, each block, and its Call.
Launch = Callable[[str, int, int, Block, list[int]], None]


class ChunkLoop:
    """Runs the steps of one program."""

    def __init__(self, source: ChunkSource) -> None:
        self.source = source
        self._code = functools.cache(self._compile)
        self._kernels = functools.cache(self._load)

    def serves(self, T: int, B: int, device: torch.device) -> bool:
        """Returns whether the kernels run so many steps on a GPU, and are faster than steps.

        The inverse of a chunk's triangular system takes the same time however few the keys are,
        while a step takes less. With enough states to fill the GPU, steps are faster then.
        """
        gpu = torch.cuda.get_device_properties(device)
        if self.source.linear.solved and self.source.linear.keys.size < SEGMENT:
            states = B * self.source.heads
            if states > _STATES_OF_MULTIPROCESSOR * gpu.multi_processor_count:
                return False
        return T >= LEAST_STEPS and self._fits((gpu.major, gpu.minor))

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
        kernels = self._kernels(f"sm_{major}{minor}")

        def launch(name: str, rows: int, blocks: int, each: Block, call: list[int]) -> None:
            shared_bytes = each.shared_bytes
            kernels[name](
                name, rows, blocks, each.threads, as_argument(call), shared_bytes=shared_bytes
            )

        return run_chunks(self.source, launch, program, values, initial, T, B, device)

    def _fits(self, capability: tuple[int, int]) -> bool:
        most = 1024 * SHARED_BYTES.get("sm_{}{}".format(*capability), 0)
        blocks = self.source.blocks.values()
        return capability >= _AMPERE and all(block.shared_bytes <= most for block in blocks)

    def _compile(self, architecture: str) -> dict[str, Path]:
        """Compiles the kernels at once: the first call of a layer waits for them."""
        compile = functools.partial(compile_cuda, "recurrent", architecture=architecture)
        with ThreadPoolExecutor() as threads:
            return dict(zip(self.source.texts, threads.map(compile, self.source.texts.values())))

    def _load(self, architecture: str) -> dict[str, Cubin]:
        return {name: open_cubin(path) for name, path in self._code(architecture).items()}


def run_chunks(
    source: ChunkSource, launch: Launch, program: Program, values: Tensors, initial: list[Tensor],
    T: int, B: int, device: torch.device,
) -> tuple[Tensors, list[Tensor]]:  # fmt: skip
    """Gives the kernels their memory, launches them and adds what heads have written apart."""
    linear, chunks = source.linear, count_segments(T)
    size, backward = linear.state.value.type.size, linear.backward
    # A gradient runs from the last step of the sequence to the first; chunks are in its order.
    reverse = program.reverse != backward
    written: Tensors = {}
    call, used = [T, B, source.heads], []  # which stay until the kernels are launched
    # Of the gradient of shared decays: from the blocks that have keys, and from pairs of steps.
    parts = source.blocks["run_keys"].count + 1 if backward else 1
    part = 0
    for name in OPERANDS:
        rows = linear.find(name)
        if rows is None:
            call += _ABSENT
            continue
        if rows is linear.reads.get(name):
            tensor = _align(values[rows.value], aligned(linear, rows))
        else:
            shape = (T, B, *[source.heads] * linear.sums_heads(name), rows.value.type.size)
            each = parts if name == "d_d" and linear.shares_decays else 1
            to = torch.empty(each, *shape, dtype=DTYPES[rows.value.type.dtype], device=device)
            part = to.stride(0) if each > 1 else part
            tensor = to[0]
            if result := linear.writes.get(name):
                written[result.value] = to
        used.append(tensor)
        call += _describe(linear, rows, tensor, T, reverse)
    first = _align(initial[0].contiguous(), _WORD)
    last, between = first.new_empty(B, size), first.new_empty(chunks, B, size)
    states = _align(values[program.replays[0].value].contiguous(), _WORD) if backward else between
    reads = 1 + (linear.solved is not None)  # of the state, in a step
    pairs = first.new_empty(backward * reads, chunks, B, source.heads, SEGMENT, SEGMENT)
    solved = first.new_empty(reads - 1, chunks, B, source.heads, source.solved)
    call += [t.data_ptr() for t in (first, last, states, between, pairs, solved)] + [part]
    for name, block in source.blocks.items():
        rows = B if name == "run_states" else B * chunks
        launch(name, rows, source.heads * block.count, block, call)
    written = {value: _add_parts(t).to(DTYPES[value.type.dtype]) for value, t in written.items()}
    if rows := linear.writes.get("states"):
        written[rows.value] = between
    return written, [last]


def _add_parts(tensor: Tensor) -> Tensor:
    """Adds what blocks and heads have written apart: (parts, T, B, n) or (parts, T, B, heads, n)
    -> (T, B, n)."""
    if tensor.dim() == 5:
        return tensor.sum((0, 3))
    return tensor[0] if tensor.shape[0] == 1 else tensor.sum(0)


def _align(tensor: Tensor, number: int) -> Tensor:
    """Returns a tensor whose features follow each other, and whose rows begin with a word of some
    numbers."""
    bytes_of = number * tensor.element_size()
    apart = (stride for stride, n in zip(tensor.stride()[:-1], tensor.shape) if n > 1)
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        return tensor.contiguous()
    if tensor.data_ptr() % bytes_of or any(stride % number for stride in apart):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _describe(linear: Linear, rows: Rows, tensor: Tensor, T: int, reverse: bool) -> list[int]:
    """The fields of the kernels' ``Rows``: an address, and how far steps, rows of the batch and
    heads lie apart.

    Args:
        tensor: (T, B, n), (1, B, n) or (n,); (T, B, heads, n) of a sum that heads write apart. Its
            features follow each other.
    """
    step, row, *heads, _ = tensor.stride() if tensor.dim() > 1 else (0, 0, 1)
    head = heads[0] if heads else rows.stride(linear.heads)
    address = tensor.data_ptr() + rows.start * tensor.element_size()
    if rows.value.type.rate in ("once", "constant"):
        step = 0
    elif reverse:
        address += (T - 1) * step * tensor.element_size()
        step = -step
    return [address, step, row, head]
