"""Runs the time loop of a program on a GPU as a scan, where steps one by one would leave it idle.

B batch, T time steps.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hoconv.jit.generated import compile_cuda
from hoconv.recurrent.codegen.scan import LANES, MOST_BLOCKS, ScanSource
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.runtime.buffers import bind, results
from hoconv.recurrent.runtime.clusters import CAPABILITY, open_cubin
from hoconv.recurrent.runtime.driver import Cubin
from hoconv.recurrent.runtime.interpret import Tensors
from hoconv.recurrent.runtime.workspace import as_argument, describe_call

# A thread for each feature has this many bytes on their way from memory. With so many threads that
# makes 3 MB, what an H100 needs to read as fast as it can: then steps need not be divided.
_BYTES_OF_THREAD = 64
MOST_FEATURES = 3 * 2**20 // _BYTES_OF_THREAD
LEAST_STEPS = 64  # with fewer, a kernel mostly starts and ends
_BLOCKS_OF_MULTIPROCESSOR = 2  # of so many threads and registers


def choose_blocks(features: int, T: int, steps_of_block: int, multiprocessors: int) -> int:
    """Returns how many blocks divide the steps of the same features; 0 for steps one by one.

    Args:
        features: of all rows.
        steps_of_block: which a block runs between two exchanges with others.
        multiprocessors: of the GPU.
    """
    if not 0 < features <= MOST_FEATURES or T < LEAST_STEPS:
        return 0
    clusters, blocks = -(-features // LANES), 1
    while (
        2 * blocks <= MOST_BLOCKS
        and 2 * blocks * steps_of_block <= T
        and blocks * clusters < _BLOCKS_OF_MULTIPROCESSOR * multiprocessors
    ):
        blocks *= 2
    return blocks


class ScanLoop:
    """Runs the steps of one program as a scan."""

    def __init__(self, source: ScanSource) -> None:
        self.source = source
        self._code = functools.cache(functools.partial(compile_cuda, "recurrent", source.text))
        self._kernels = functools.cache(self._load)

    def choose_blocks(self, T: int, B: int, device: torch.device) -> int:
        """Returns the number of blocks of a cluster; 0 where no scan is faster, or possible."""
        if torch.cuda.get_device_capability(device) < CAPABILITY:
            return 0
        count = torch.cuda.get_device_properties(device).multi_processor_count
        return choose_blocks(B * self.source.features, T, self.source.steps_of_block, count)

    def prepare(self, architecture: str) -> None:
        """Compiles the kernel.

        Raises:
            hoconv.jit.BuildError: NVRTC fails.
        """
        self._code(architecture)

    def run(
        self, program: Program, values: Tensors, initial: list[Tensor], seed: Tensor | None,
        T: int, B: int, blocks: int, device: torch.device,
    ) -> tuple[Tensors, list[Tensor]]:  # fmt: skip
        """As :data:`hoconv.recurrent.runtime.interpret.Loop`, on the current device.

        Args:
            blocks: as of :meth:`choose_blocks`.
        """
        source = self.source
        storage = source.steps.storage
        tensors = bind(program, storage, T, B, values, initial, {})
        call = describe_call(storage, T, B, seed, tensors, begin=blocks)
        clusters = -(-B * source.features // LANES)
        self._kernels(device).launch_clusters(
            "scan", (clusters, 1), blocks, source.threads, source.shared_bytes,
            as_argument(call), together=False,
        )  # fmt: skip
        return results(program, storage, tensors, T)

    def _load(self, device: torch.device) -> Cubin:
        major, minor = torch.cuda.get_device_capability(device)
        return open_cubin(self._code(f"sm_{major}{minor}"))
