"""Runs the time loop of a program on a GPU: NVRTC compiles kernels, PyTorch computes products.

CUDA graphs record chunks of steps. They are launched again for later steps and for other tensors,
so that a new length or batch compiles nothing. A graph holds the addresses of the products'
operands: these lie in a workspace, which is kept from call to call. Kernels read all other
addresses from a table in GPU memory, which a kernel writes at the start of a call: the CPU never
waits for the GPU.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hoconv import cuda_graphs, jit
from hoconv.jit import nvrtc
from hoconv.jit.driver import Cubin, current_stream, open_cubin, use
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent.codegen.cuda import HEADER, emit_cuda
from hoconv.recurrent.codegen.matrix.chunks import ChunkSource, emit_chunks
from hoconv.recurrent.codegen.matrix.kernel import emit_matrix
from hoconv.recurrent.codegen.scan import emit_scan
from hoconv.recurrent.ir.program import Group, Program
from hoconv.recurrent.passes.rows import make_row_programs
from hoconv.recurrent.runtime.buffers import bind, results
from hoconv.recurrent.runtime.chunks import ChunkLoop
from hoconv.recurrent.runtime.clusters import CAPABILITY, Clusters
from hoconv.recurrent.runtime.interpret import LoopRun, Tensors, count_steps
from hoconv.recurrent.runtime.matrices import MatrixLoop
from hoconv.recurrent.runtime.scans import ScanLoop
from hoconv.recurrent.runtime.workspace import Recorder, Workspace, run_whole

# Workspaces that a program keeps: one for each batch size, stream and precision of products.
_MOST_WORKSPACES = 8


def obstacle() -> str | None:
    """Says why loops cannot run on a GPU here, and the fix. Compiles nothing."""
    return nvrtc.obstacle() if torch.cuda.is_available() else jit.no_gpu()


def load() -> None:
    """Checks NVRTC and the cache by compiling a source without kernels of its own.

    Raises:
        hoconv.jit.BuildError: one of them does not work.
    """
    for architecture in _architectures():
        compile_cuda("recurrent", HEADER, architecture)


def _architectures() -> list[str]:
    """The architectures of the GPUs here, as NVRTC names them."""
    return [f"sm_{capability.replace('.', '')}" for capability in jit.visible_gpus()]


def _capability(architecture: str) -> tuple[int, int]:
    digits = architecture.removeprefix("sm_")
    return int(digits[:-1]), int(digits[-1])


class CudaLoop:
    """Runs the steps of one program.

    Args:
        program: the only one that it is called with.
        recorded: whether CUDA graphs record chunks of steps, and one kernel runs steps that have no
            product, a scan where it can, or what keeps matrix states in registers, or takes them in
            chunks; otherwise kernels are launched one by one.
        clusters: keep the weights on the chip for all steps, where they can.

    Attributes:
        groups: as of :class:`hoconv.recurrent.runtime.interpret.Loop`.
    """

    def __init__(self, program: Program, recorded: bool, clusters: Clusters | None = None) -> None:
        self.source = emit_cuda(program, whole=recorded)
        self.recorded = recorded
        self.clusters = clusters
        scan = emit_scan(program) if self.source.whole else None
        self.scan = None if scan is None else ScanLoop(scan)
        fits = recorded and not isinstance(emit_matrix(program), str)
        self.matrices = MatrixLoop(program) if fits else None
        chunks = emit_chunks(program) if fits else None
        self.chunks = ChunkLoop(chunks) if isinstance(chunks, ChunkSource) else None
        # Kernels that are launched one by one write, and read, the states of all steps; of those
        # recorded, this one alone writes and reads what is saved once a segment.
        sparse = bool(program.replays) or any(y.sparse for y in program.yields)
        assert self.matrices or not (recorded and sparse)
        self.groups: dict[Group, tuple[Program, CudaLoop]] = {
            group: (each, CudaLoop(each, recorded))
            for group, each in (make_row_programs(program) if recorded else {}).items()
        }
        self._code = functools.cache(functools.partial(compile_cuda, "recurrent", self.source.text))
        self._kernels = functools.cache(self._load)
        self._workspaces = functools.lru_cache(_MOST_WORKSPACES)(self._kept_workspace)
        self._lock = threading.Lock()

    def __call__(
        self, program: Program, values: Tensors, initial: list[Tensor], seed: Tensor | None
    ) -> tuple[Tensors, list[Tensor]]:
        """As :data:`hoconv.recurrent.runtime.interpret.Loop`."""
        storage = self.source.steps.storage
        (T, B), device = count_steps(program, values), values[program.sequences[0][1]].device
        if self.clusters and not isinstance(found := self.clusters.find(B, device), str):
            with use(device):
                runs = [LoopRun(program, values, initial, seed)]
                return self.clusters.run(found, runs, device)[0]
        if self.chunks and self.chunks.serves(T, B, device):
            with use(device):
                return self.chunks.run(program, values, initial, T, B, device)
        if self.matrices:
            with use(device):
                return self.matrices.run(program, values, initial, seed, T, B, device)
        if self.source.whole:
            with use(device):
                if self.scan and (divided := self.scan.divide_steps(T, B, device)):
                    return self.scan.run(program, values, initial, seed, T, B, divided, device)
                tensors = bind(program, storage, T, B, values, initial, {})
                run_whole(self.source, self._load_for(device), T, B, seed, tensors, device)
                return results(program, storage, tensors, T)
        with use(device), self._lock:
            stream = current_stream()
            # A graph that the caller captures, or allocates for (as torch.compile does to warm up),
            # owns the memory allocated now: the workspace is not kept, and records no graphs.
            try:
                if torch.cuda.is_current_stream_capturing():
                    raise _CannotKeep
                inference = torch.is_inference_mode_enabled()  # its tensors are written there only
                workspace = self._workspaces(B, device, stream, inference, _precision())
            except _CannotKeep:
                workspace = self._new_workspace(B, device, None)
            tensors = bind(program, storage, T, B, values, initial, workspace.resident)
            workspace.run(T, seed, tensors)
            return results(program, storage, tensors, T)

    def run_together(self, runs: Sequence[LoopRun]) -> list[tuple[Tensors, list[Tensor]]]:
        """Runs both directions of the program in one kernel; returns what each call would.

        Args:
            runs: for whose batch and number the loop keeps the weights on the GPU.
        """
        assert self.clusters is not None
        device = runs[0].values[runs[0].program.sequences[0][1]].device
        _, B = count_steps(runs[0].program, runs[0].values)
        layout = self.clusters.find(B, device, len(runs))
        assert not isinstance(layout, str), layout
        with use(device):
            return self.clusters.run(layout, runs, device)

    def keeps_weights(self, B: int, device: torch.device, runs: int = 1) -> bool:
        """Returns whether one kernel keeps the weights on a GPU, for some runs of a batch each."""
        if self.clusters is None:
            return False
        return not isinstance(self.clusters.find(B, device, runs), str)

    def prepare(self) -> None:
        """Compiles the kernels for the GPUs here.

        Raises:
            hoconv.jit.BuildError: NVRTC fails.
        """
        for architecture in _architectures():
            if self.chunks:
                self.chunks.prepare(architecture)
            if self.matrices:
                self.matrices.prepare(architecture)
                continue
            self._code(architecture)
            if self.scan and _capability(architecture) >= CAPABILITY:
                self.scan.prepare(architecture)
        for _, loop in self.groups.values():
            loop.prepare()

    def _load(self, architecture: str) -> Cubin:
        return open_cubin(self._code(architecture))

    def _kept_workspace(
        self, B: int, device: torch.device, stream: int, _inference: bool, _precision: Any
    ) -> Workspace:
        """Returns one to keep for this stream, and for what else PyTorch is set to."""
        if _is_in_graph_pool(device):
            raise _CannotKeep
        return self._new_workspace(
            B, device, _make_recorder(device, stream) if self.recorded else None
        )

    def _new_workspace(self, B: int, device: torch.device, record: Recorder | None) -> Workspace:
        return Workspace(self.source, self._load_for(device), B, device, record)

    def _load_for(self, device: torch.device) -> Cubin:
        major, minor = torch.cuda.get_device_capability(device)
        return self._kernels(f"sm_{major}{minor}")


class _CannotKeep(Exception):
    """Memory that is allocated now belongs to a CUDA graph of the caller."""


def _is_in_graph_pool(device: torch.device) -> bool:
    """Returns whether memory that is allocated now comes from the memory pool of CUDA graphs."""
    if torch.cuda.get_allocator_backend() != "native":
        return False
    address = torch.empty(1, device=device).data_ptr()
    return any(
        segment["address"] <= address < segment["address"] + segment["total_size"]
        and tuple(segment["segment_pool_id"]) != (0, 0)
        for segment in torch.cuda.memory_snapshot()
    )


@functools.cache
def _make_recorder(device: torch.device, stream: int) -> Recorder:
    """Makes a function that records graphs for a stream.

    The graphs of one stream run one after another: they share a memory pool, and in it the
    workspace of cuBLAS. Graphs of two streams may run at the same time and have a pool each.
    """

    def new_pool() -> tuple[torch.cuda.Stream, Any, None]:
        return torch.cuda.Stream(device), torch.cuda.graph_pool_handle(), None

    side, pool, first = new_pool()

    def record(launch: Callable[[], None]) -> Callable[[], None]:
        nonlocal side, pool, first
        graph = torch.cuda.CUDAGraph()
        try:
            with cuda_graphs.failures_ended(device, pool), torch.cuda.stream(side):
                # "relaxed" permits calls that a graph cannot record, such as loading the kernel of
                # a product or freeing an object; they run at once.
                graph.capture_begin(pool, capture_error_mode="relaxed")
                try:
                    launch()
                finally:
                    graph.capture_end()
        except BaseException:
            side, pool, first = new_pool()  # a failed capture leaves the old ones unusable
            raise
        first = first or graph  # keeps the pool alive: without graphs it takes no new one
        return graph.replay

    return record


def _precision() -> tuple[Any, ...]:
    """PyTorch's settings for the precision of products; graphs record their effect."""
    matmul = torch.backends.cuda.matmul
    return (
        matmul.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )
