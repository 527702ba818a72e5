"""Chooses how clusters of blocks keep a layer's weights on a GPU, and runs them.

B batch, T time steps.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hoconv.jit.generated import compile_cuda
from hoconv.recurrent.codegen.cluster import HEADER, NAME, ClusterShape, ClusterSource, emit_cluster
from hoconv.recurrent.codegen.storage import Buffer
from hoconv.recurrent.ir.kinds import PRODUCTS
from hoconv.recurrent.ir.program import Group, Program, flat
from hoconv.recurrent.passes.distribute import refuse
from hoconv.recurrent.runtime.driver import Cubin
from hoconv.recurrent.runtime.workspace import describe_call

# The first compute capability whose blocks form clusters.
CAPABILITY = (9, 0)
_BLOCKS = (1, 2, 4, 8, 16)
_WARPS = (8, 12)
# Rows of a cluster: a kernel is compiled for each number, so there are few.
_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_PROBE = f'{HEADER}\nextern "C" __global__ void probe() {{}}\n'


@dataclass(frozen=True)
class Chip:
    """What a GPU has.

    Attributes:
        shared_bytes: the most shared memory of a block.
        resident: numbers of blocks, and how many clusters of so many run at the same time, with a
            block on each multiprocessor.
    """

    shared_bytes: int
    resident: tuple[tuple[int, int], ...]


# An H200's, as the driver says.
H200 = Chip(232448, ((1, 132), (2, 66), (4, 30), (8, 15), (16, 7)))


class Clusters:
    """The kernels of one program that keep its weights on the chip.

    Args:
        always: whether they run wherever they can, and not only where they are faster than chunks
            of steps that CUDA graphs record.
    """

    def __init__(self, program: Program, always: bool) -> None:
        self.program = program
        self.always = always
        self._refusal = refuse(program)
        self._emit = functools.cache(functools.partial(emit_cluster, program))
        self._load = functools.cache(lambda source, name: _load_cubin(source.text, name))
        self._chosen = functools.cache(self.choose)

    def find(self, B: int, device: torch.device) -> ClusterSource | str:
        """The kernel for a batch on a GPU, or why there is none."""
        if torch.cuda.get_device_capability(device) < CAPABILITY:
            return "its blocks form no clusters"
        return self._chosen(B, _describe(device))

    def choose(self, B: int, chip: Chip) -> ClusterSource | str:
        """The kernel for a batch on a chip, or why there is none."""
        if self._refusal:
            return self._refusal
        found: list[tuple[float, ClusterSource]] = []
        for blocks, resident in chip.resident:
            if not resident:
                continue
            rows = next((n for n in _ROWS if n * resident >= B), _ROWS[-1])
            for warps in _WARPS:
                source = self._emit(ClusterShape(blocks, rows, warps))
                if source.shared_bytes <= chip.shared_bytes:
                    rounds = math.ceil(B / rows / resident)
                    found.append((rounds * _estimate(source), source))
        if not found:
            return f"the weights do not fit {_BLOCKS[-1]} multiprocessors"
        fastest, source = min(found, key=lambda each: each[0])
        if fastest > _estimate_graph(self.program, B) and not self.always:
            return "graphs are faster for so many rows"
        return source

    def run(
        self, source: ClusterSource, T: int, B: int, seed: Tensor | None,
        tensors: Mapping[Buffer, Tensor], device: torch.device,
    ) -> None:  # fmt: skip
        """Launches a kernel for all steps; the current device is `device`."""
        shape = source.shape
        call = describe_call(source.storage, T, B, seed, tensors)
        self._load(source, _architecture(device)).launch_clusters(
            NAME, -(-B // shape.rows), shape.blocks, shape.threads, source.shared_bytes, call
        )


def _estimate(source: ClusterSource) -> float:
    """About how many microseconds a step of a cluster takes; fitted to an H200."""
    alone = source.shape.blocks == 1
    exchanges = source.exchanges * (0.1 if alone else 0.45) + source.pushed_bytes * 3e-5
    tiles = 0.008 * source.tile_products * source.shape.warps / 8
    plain = 0.0009 * source.plain_products * source.shape.warps / 8
    rest = 4.6e-6 * (source.weight_bytes - source.register_bytes)
    return 0.4 + exchanges + tiles + plain + rest + 0.15 * source.pairs


def _estimate_graph(program: Program, B: int) -> float:
    """The same of a step that a CUDA graph records: a kernel for each product and each group."""
    products = [op for op in flat(program.step) if op.kind in PRODUCTS]
    groups = sum(isinstance(item, Group) for item in program.step)
    plain = products[0].values[0].type.dtype in ("f32", "f64")
    flops = sum(2 * B * op.values[1].type.shape[0] * op.values[1].type.shape[1] for op in products)
    return 2.5 * (len(products) + max(groups - 1, 1)) + flops / (20e6 if plain else 300e6)


@functools.cache
def _describe(device: torch.device) -> Chip:
    most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    probe = _load_cubin(_PROBE, _architecture(device))
    with torch.cuda.device(device):
        threads = 32 * _WARPS[0]
        counts = (probe.count_clusters("probe", blocks, threads, most) for blocks in _BLOCKS)
        return Chip(most, tuple(zip(_BLOCKS, counts)))


def _load_cubin(text: str, architecture: str) -> Cubin:
    code = compile_cuda("recurrent", text, architecture).read_bytes()
    driver = ctypes.CDLL("libcuda.so.1")
    return Cubin(driver, code, lambda: torch.cuda.current_stream().cuda_stream)


def _architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
