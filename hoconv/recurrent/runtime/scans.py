"""Runs the time loop of a program on a GPU as a scan, where steps one by one would leave it idle.

B batch, T time steps.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hoconv.jit.driver import Cubin, as_argument, open_cubin
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent.codegen.scan import LANES, MOST_BLOCKS, ScanSource
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.runtime.buffers import bind, results
from hoconv.recurrent.runtime.clusters import CAPABILITY
from hoconv.recurrent.runtime.interpret import Tensors
from hoconv.recurrent.runtime.workspace import describe_call

# A thread for each feature has this many bytes on their way from memory. With so many threads that
# makes 3 MB, what an H100 needs to read as fast as it can: then steps need not be divided.
_BYTES_OF_THREAD = 64
MOST_FEATURES = 3 * 2**20 // _BYTES_OF_THREAD
LEAST_STEPS = 64  # with fewer, a kernel mostly starts and ends
LEAST_WARPS = 4  # of a block: one for each scheduler
_WARPS_OF_MULTIPROCESSOR = 6  # that keep as many bytes on their way


def divide_steps(
    features: int, T: int, steps_of_warp: int, most_warps: int, multiprocessors: int
) -> tuple[int, int] | None:
    """Returns how many blocks divide the steps of the same features, and how many warps of each
    block; None for steps one by one.

    An example, on a GPU of 132 multiprocessors: 1,024 features are 32 clusters. With blocks of 4
    warps, 8 of them divide the steps: 1,024 warps, more than 6 x 132. With 256 features 8 blocks
    are 256 warps, so a block has 16. More warps than are needed wait for each other.

    Args:
        features: of all rows.
        steps_of_warp, most_warps: as of :class:`hoconv.recurrent.codegen.scan.ScanSource`.
        multiprocessors: of the GPU.
    """
    if not 0 < features <= MOST_FEATURES or T < LEAST_STEPS:
        return None
    wanted = _WARPS_OF_MULTIPROCESSOR * multiprocessors // -(-features // LANES)
    wanted = min(wanted, T // (2 * steps_of_warp) + 1)  # at least a round of steps for each
    blocks, warps = 1, LEAST_WARPS
    while blocks < MOST_BLOCKS and blocks * warps < wanted:
        blocks *= 2
    while warps < most_warps and blocks * warps < wanted:
        warps *= 2
    return blocks, warps


@functools.cache  # PyTorch takes microseconds to say
def _count_multiprocessors(device: torch.device) -> int:
    """Returns the number of a GPU whose blocks form clusters; 0 for others."""
    properties = torch.cuda.get_device_properties(device)
    capable = (properties.major, properties.minor) >= CAPABILITY
    return properties.multi_processor_count if capable else 0


class ScanLoop:
    """Runs the steps of one program as a scan."""

    def __init__(self, source: ScanSource) -> None:
        self.source = source
        self._code = functools.cache(functools.partial(compile_cuda, "recurrent", source.text))
        self._kernels = functools.cache(self._load)

    def divide_steps(self, T: int, B: int, device: torch.device) -> tuple[int, int] | None:
        """Returns the blocks of a cluster and the warps of a block; None where no scan is faster,
        or possible."""
        if not (count := _count_multiprocessors(device)):
            return None
        source = self.source
        return divide_steps(B * source.features, T, source.steps_of_warp, source.most_warps, count)

    def prepare(self, architecture: str) -> None:
        """Compiles the kernel.

        Raises:
            hoconv.jit.BuildError: NVRTC fails.
        """
        self._code(architecture)

    def run(
        self, program: Program, values: Tensors, initial: list[Tensor], seed: Tensor | None,
        T: int, B: int, divided: tuple[int, int], device: torch.device,
    ) -> tuple[Tensors, list[Tensor]]:  # fmt: skip
        """As :data:`hoconv.recurrent.runtime.interpret.Loop`, on the current device.

        Args:
            divided: as by :meth:`divide_steps`.
        """
        source, (blocks, warps) = self.source, divided
        storage = source.steps.storage
        tensors = bind(program, storage, T, B, values, initial, {})
        call = describe_call(storage, T, B, seed, tensors, begin=blocks)
        clusters = -(-B * source.features // LANES)
        self._kernels(device).launch_clusters(
            "scan", (clusters, 1), blocks, warps * LANES, source.shared_bytes,
            as_argument(call), together=False,
        )  # fmt: skip
        return results(program, storage, tensors, T)

    def _load(self, device: torch.device) -> Cubin:
        major, minor = torch.cuda.get_device_capability(device)
        return open_cubin(self._code(f"sm_{major}{minor}"))
