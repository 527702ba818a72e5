"""Chooses how clusters of blocks keep a layer's weights on a GPU, and runs them.

B batch, T time steps.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from hoconv.jit import BuildError
from hoconv.jit.driver import Cubin, as_argument, open_cubin
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent.codegen.cluster.kernel import HEADER, NAME, ClusterSource, emit_cluster
from hoconv.recurrent.codegen.cluster.layout import SHARED_BYTES, ClusterLayout, ClusterShape
from hoconv.recurrent.ir.kinds import PRODUCTS, is_reduction
from hoconv.recurrent.ir.program import BYTES, Group, Program, flat
from hoconv.recurrent.passes.cluster.distribute import distribute, refuse
from hoconv.recurrent.runtime.buffers import bind, results
from hoconv.recurrent.runtime.interpret import LoopRun, Tensors, count_steps
from hoconv.recurrent.runtime.workspace import describe_call

# The first compute capability whose blocks form clusters.
CAPABILITY = (9, 0)
_BLOCKS = (1, 2, 4, 8, 16)
_WARPS = (8, 12)
# Rows of a cluster: a kernel is compiled for each number, so there are few.
_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 19, 22)
BESIDE = "hoconv compiles"  # the name of threads
# About the microseconds in which what a block posts reaches its partner and its cluster.
_HOP = 1.6
# Bytes that a product of a graph reads in a microsecond: its weights lie in the L2 cache.
_GRAPH_READS = 2.4e6
_PROBE = f'{HEADER}\nextern "C" __global__ void probe() {{}}\n'


@dataclass(frozen=True)
class Chip:
    """The resources of a GPU.

    Attributes:
        shared_bytes: the most shared memory of a block.
        resident: numbers of blocks, and how many clusters of so many run at the same time, with a
            block on each multiprocessor.
    """

    shared_bytes: int
    resident: tuple[tuple[int, int], ...]


# An H200's, as the driver says.
H200 = Chip(SHARED_BYTES, ((1, 132), (2, 66), (4, 30), (8, 15), (16, 7)))


class Clusters:
    """The kernels of one program that keep its weights on the chip.

    Args:
        always: whether they run wherever they can, and not only where they are faster than chunks
            of steps that CUDA graphs record.
        following: returns those of the program that runs after this one, if one does: its kernel is
            compiled beside this one's.
    """

    def __init__(
        self, program: Program, always: bool, following: Callable[[], Clusters | None] | None = None
    ) -> None:
        self.program = program
        self.always = always
        self._following = following
        self._refusal = refuse(program)
        self._distribute = functools.cache(functools.partial(distribute, program))
        self._lay_out = functools.cache(self._make_layout)
        self._emit = functools.cache(emit_cluster)
        self._load = functools.cache(lambda source, name: _load_cubin(source.text, name))
        self._found = functools.cache(self._find)

    def find(self, B: int, device: torch.device, runs: int = 1) -> ClusterLayout | str:
        """The layout for a batch on a GPU, or why there is none.

        Args:
            runs: the number of runs that share the GPU, of a batch each.
        """
        return self._found(B, device, runs)

    def _find(self, B: int, device: torch.device, runs: int) -> ClusterLayout | str:
        if torch.cuda.get_device_capability(device) < CAPABILITY:
            return "its blocks form no clusters"
        found = self.choose(B, _describe(device), runs)
        if self._following is not None and not isinstance(found, str):
            args = self._following, B, device, runs
            threading.Thread(target=_compile, args=args, name=BESIDE).start()
        return found

    def compile(self, B: int, device: torch.device, runs: int) -> None:
        """Compiles the kernel for a batch into the cache; `runs` as of :meth:`find`.

        Raises:
            hoconv.jit.BuildError: NVRTC fails.
        """
        if not isinstance(layout := self.find(B, device, runs), str):
            compile_cuda("recurrent", self._emit(layout, runs).text, _architecture(device))

    def choose(self, B: int, chip: Chip, runs: int = 1) -> ClusterLayout | str:
        """The layout for a batch on a chip, or why there is none; `runs` as of :meth:`find`."""
        if self._refusal:
            return self._refusal
        found = self._choose(B, chip, runs)
        if found is None:
            return f"what {_BLOCKS[-1]} multiprocessors exchange does not fit their shared memory"
        time, layout = found
        if time > runs * _estimate_graph(self.program, B) and not self.always:
            return "graphs are faster for so many rows"
        if runs > 1 and (alone := self._choose(B, chip, 1)) and time > runs * alone[0]:
            return "one after the other is faster"
        return layout

    def _choose(self, B: int, chip: Chip, runs: int) -> tuple[float, ClusterLayout] | None:
        """The layout that takes the least time, and about how many microseconds a step takes."""
        found: list[tuple[float, ClusterLayout]] = []
        for shape, rounds in _list_shapes(B, chip, runs):
            layout = self._lay_out(shape, chip.shared_bytes)
            if layout.shared_bytes <= chip.shared_bytes:
                found.append((rounds * _estimate(layout), layout))
        return min(found, key=lambda each: each[0], default=None)

    def run(
        self, layout: ClusterLayout, runs: Sequence[LoopRun], device: torch.device
    ) -> list[tuple[Tensors, list[Tensor]]]:
        """Launches one kernel for all steps of runs of the program, forwards or backwards in time.

        Args:
            layout: of :meth:`find`, for so many runs.
            runs: of the same T and B.
            device: the current one.
        """
        source, shape = self._emit(layout, len(runs)), layout.shape

        def launch(calls: list[int], clusters: int) -> None:
            self._load(source, _architecture(device)).launch_clusters(
                NAME, (clusters, len(runs)), shape.blocks, shape.threads, layout.shared_bytes,
                as_argument(calls), together=shape.clusters > 1,
            )  # fmt: skip

        return launch_runs(source, runs, launch)

    def _make_layout(self, shape: ClusterShape, shared_bytes: int) -> ClusterLayout:
        return ClusterLayout(self._distribute(shape.blocks == 1), shape, shared_bytes)


def _compile(
    following: Callable[[], Clusters | None], B: int, device: torch.device, runs: int
) -> None:
    with suppress(BuildError):  # as whoever runs the kernel is told
        if (clusters := following()) is not None:
            clusters.compile(B, device, runs)


def _list_shapes(B: int, chip: Chip, runs: int) -> Iterator[tuple[ClusterShape, int]]:
    """The shapes that may suit a batch, and in how many rounds a chip runs all clusters of each."""
    for blocks, resident in chip.resident:
        # Clusters of a team wait for each other: all teams run at the same time.
        for clusters in (1, 2) if blocks == _BLOCKS[-1] else (1,):
            teams = resident // clusters
            fitting = (n for n in _ROWS if runs * math.ceil(B / n) <= teams)
            rows = next(fitting, _ROWS[-1] if clusters == 1 and teams else None)
            if rows:
                rounds = math.ceil(runs * math.ceil(B / rows) / teams)
                for warps in _WARPS:
                    yield ClusterShape(blocks, rows, warps, clusters), rounds


def launch_runs(
    source: ClusterSource, runs: Sequence[LoopRun], launch: Callable[[list[int], int], None]
) -> list[tuple[Tensors, list[Tensor]]]:
    """Gives the kernel of some runs its memory, launches it and returns what it has written.

    Args:
        launch: given the fields of all calls, and the number of clusters of a run.
    """
    layout, storage, calls, bound = source.layout, source.storage, [], []
    T, B = count_steps(runs[0].program, runs[0].values)
    teams = -(-B // layout.shape.rows)
    blocks = teams * layout.shape.members
    for run in runs:
        tensors = bind(run.program, storage, T, B, run.values, run.initial, {})
        mail, bytes = blocks * layout.mail_bytes, blocks * (layout.mail_bytes + layout.own_bytes)
        x = run.values[run.program.sequences[0][1]]
        scratch = x.new_empty(bytes, dtype=torch.uint8) if bytes else None
        if scratch is not None and mail:
            scratch[:mail].zero_()  # exchanges have numbers from 1 on
        first = T - 1 if run.program.reverse else 0
        calls += describe_call(storage, T, B, run.seed, tensors, scratch, first)
        bound.append((tensors, scratch))
    if teams:  # else the batch is empty
        launch(calls, teams * layout.shape.clusters)
    return [
        results(run.program, storage, tensors, T)
        for run, (tensors, _) in zip(runs, bound, strict=True)
    ]


def _estimate(layout: ClusterLayout) -> float:
    """About how many microseconds a step of a cluster or team takes.

    Fitted to 125 kernels of clusters on an H200; later, what is of products of four warps together
    to the few that have them, and what is of copies from the L2 cache to copies by themselves.
    """
    exchange = 0.44 if layout.shape.blocks == 1 else 0.8
    pushed = 4.9e-5 * (layout.pushed_bytes - layout.spread_bytes) + 5e-6 * layout.spread_bytes
    slower = layout.shape.warps / _WARPS[0]
    together = [layout.together(each) for each in layout.slices]
    products = [
        (0.008 if fast else 0.016) * slower * layout.count_tile_products(each)
        for fast, each in zip(together, layout.slices, strict=True)
    ]
    plain = slower * (0.002 * layout.plain_products + 0.04)
    read = 13e-6 * layout.far_bytes + sum(
        (2.6e-6 if fast else 4e-6) * each.shared_bytes
        for fast, each in zip(together, layout.slices, strict=True)
    )
    hops = sum(layout.posted_bytes(k) > 0 for k in range(layout.shared.exchanges))
    early = sum(
        time / 2
        for product, time in zip(layout.shared.products, products, strict=True)
        if layout.halves(product)
    )
    waits = max(0.0, _HOP * hops - early)
    return exchange * layout.shared.exchanges + waits + pushed + sum(products) + plain + read


def _estimate_graph(program: Program, B: int) -> float:
    """The same of a step that a CUDA graph records: a kernel for each product and each group."""
    ops = list(flat(program.step))
    products = [op for op in ops if op.kind in PRODUCTS]
    kernels = len(products) + max(sum(isinstance(item, Group) for item in program.step) - 1, 1)
    reductions = sum(is_reduction(op.kind) for op in ops)
    dtype = products[0].values[0].type.dtype
    rate = 30e6 if dtype in ("f32", "f64") else 300e6
    numbers = sum(math.prod(op.values[1].type.shape) for op in products)
    multiplying = max(2 * B * numbers / rate, numbers * BYTES[dtype] / _GRAPH_READS)
    return 2.5 * kernels + 0.45 * reductions + multiplying


@functools.cache
def _describe(device: torch.device) -> Chip:
    most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    probe = _load_cubin(_PROBE, _architecture(device))
    with torch.cuda.device(device):
        threads = 32 * _WARPS[0]
        counts = (probe.count_clusters("probe", blocks, threads, most) for blocks in _BLOCKS)
        return Chip(most, tuple(zip(_BLOCKS, counts)))


def _load_cubin(text: str, architecture: str) -> Cubin:
    return open_cubin(compile_cuda("recurrent", text, architecture))


@functools.cache
def _architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    # With what only this one has: products of four warps together, fast copies to many blocks.
    return f"sm_{major}{minor}a"
