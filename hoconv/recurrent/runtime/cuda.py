"""The time loop of a program on a GPU: kernels compiled at run time, products by PyTorch.

Chunks of steps are recorded as CUDA graphs, and launched again for the next steps and for other
tensors: a new length or batch compiles nothing. What is recorded has fixed addresses: all that
products read and write is in memory that stays from call to call, a workspace. Kernels read where
everything else is from memory, which a kernel writes when a call begins: nothing waits for the GPU.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoconv import jit
from hoconv.jit import nvrtc
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent.codegen.cuda import HEADER, emit_cuda
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.runtime.buffers import bind, results
from hoconv.recurrent.runtime.driver import Kernels
from hoconv.recurrent.runtime.interpret import Tensors, steps
from hoconv.recurrent.runtime.workspace import Recorder, Workspace

# How many batch sizes, streams and precisions have a workspace at a time, of each program.
_KEPT = 8


def obstacle() -> str | None:
    """Why loops cannot run on a GPU here, with the fix. Compiles nothing."""
    return nvrtc.obstacle() if torch.cuda.is_available() else jit.no_gpu()


def load() -> None:
    """Compiles a source without kernels: NVRTC and the cache work.

    Raises:
        hoconv.jit.BuildError: they do not.
    """
    for architecture in _architectures():
        compile_cuda("recurrent", HEADER, architecture)


def _architectures() -> list[str]:
    """Those of the GPUs here, as NVRTC names them."""
    return [f"sm_{capability.replace('.', '')}" for capability in jit.visible_gpus()]


class CudaLoop:
    """Runs the steps of one program.

    Args:
        program: the only one that it is called with.
        recorded: whether chunks of steps are recorded, or every step is launched by itself.
    """

    def __init__(self, program: Program, recorded: bool) -> None:
        self.source = emit_cuda(program)
        self.recorded = recorded
        self._code = functools.cache(functools.partial(compile_cuda, "recurrent", self.source.text))
        self._kernels = functools.cache(self._loaded)
        self._kept = functools.lru_cache(_KEPT)(self._lasting)
        self._lock = threading.Lock()

    def __call__(
        self, program: Program, values: Tensors, initial: list[Tensor], seed: Tensor | None
    ) -> tuple[Tensors, list[Tensor]]:
        """As :data:`hoconv.recurrent.runtime.interpret.Loop`."""
        storage = self.source.steps.storage
        T, B, device = steps(program, values), initial[0].shape[0], initial[0].device
        with torch.cuda.device(device), self._lock:
            stream = torch.cuda.current_stream().cuda_stream
            # Into a graph that is being captured, whose memory is its own, steps go one by one; and
            # where memory is that of graphs to come, as when torch.compile warms up.
            try:
                if torch.cuda.is_current_stream_capturing():
                    raise _Borrowed
                workspace = self._kept(B, device, stream, _precision())
            except _Borrowed:
                workspace = self._workspace(B, device, None)
            tensors = bind(program, storage, values, initial, workspace.resident)
            workspace.run(T, seed, tensors)
            return results(program, storage, tensors, T)

    def prepare(self) -> None:
        """Compiles its kernels for the GPUs here.

        Raises:
            hoconv.jit.BuildError: NVRTC fails.
        """
        for architecture in _architectures():
            self._code(architecture)

    def _loaded(self, architecture: str) -> Kernels:
        code = self._code(architecture).read_bytes()
        driver = ctypes.CDLL("libcuda.so.1")
        return Kernels(driver, code, lambda: torch.cuda.current_stream().cuda_stream)

    def _lasting(self, B: int, device: torch.device, stream: int, _precision: Any) -> Workspace:
        """One to keep for this stream and precision of products."""
        if _borrowed(device):
            raise _Borrowed
        return self._workspace(B, device, _recorder(device, stream) if self.recorded else None)

    def _workspace(self, B: int, device: torch.device, record: Recorder | None) -> Workspace:
        major, minor = torch.cuda.get_device_capability(device)
        kernels = self._kernels(f"sm_{major}{minor}")
        return Workspace(self.source, kernels, B, device, record)


class _Borrowed(Exception):
    """What is allocated now may not be kept."""


def _borrowed(device: torch.device) -> bool:
    """Whether what is allocated now belongs to a pool of someone's graphs."""
    if torch.cuda.get_allocator_backend() != "native":
        return False
    address = torch.empty(1, device=device).data_ptr()
    return any(
        segment["address"] <= address < segment["address"] + segment["total_size"]
        and tuple(segment["segment_pool_id"]) != (0, 0)
        for segment in torch.cuda.memory_snapshot()
    )


@functools.cache
def _recorder(device: torch.device, stream: int) -> Recorder:
    """Records graphs to run on a stream.

    They run one after another, and share what cuBLAS works in, which belongs to their pool of
    memory; those of two streams may run at the same time.
    """

    def place() -> tuple[torch.cuda.Stream, Any, None]:
        return torch.cuda.Stream(device), torch.cuda.graph_pool_handle(), None

    side, pool, first = place()

    def record(launch: Callable[[], None]) -> Callable[[], None]:
        nonlocal side, pool, first
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(side):
                # Only launches are recorded; what else happens meanwhile, such as the loading of
                # a product's kernel or an object's end, is not part of the graph, and allowed.
                graph.capture_begin(pool, capture_error_mode="relaxed")
                try:
                    launch()
                finally:
                    graph.capture_end()
        except BaseException:
            side, pool, first = place()  # where recording failed, it may not begin again
            raise
        first = first or graph  # a pool none of whose graphs is left takes no other
        return graph.replay

    return record


def _precision() -> tuple[Any, ...]:
    """The settings that decide how products are computed."""
    matmul = torch.backends.cuda.matmul
    return (
        matmul.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )
