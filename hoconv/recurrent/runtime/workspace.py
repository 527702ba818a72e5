"""Keeps memory at fixed addresses, and the CUDA graphs that use it, between calls of a GPU's loop.

B batch, T time steps, n features.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hoconv.jit.driver import as_argument
from hoconv.recurrent.codegen.cuda import CudaSource, Launch
from hoconv.recurrent.codegen.storage import Buffer, Location, Storage
from hoconv.recurrent.ir.evaluate import DTYPES
from hoconv.recurrent.ir.program import Op

# Launches a kernel: (name, rows and blocks of its grid, threads of a block, arguments of ctypes).
Launcher = Callable[..., None]
# Records what a function launches, without running it; returns a function that runs the record.
Recorder = Callable[[Callable[[], None]], Callable[[], None]]
# Steps of the longest chunk, a power of two. Smaller powers of two cover the remaining steps.
CHUNK = 32
_THREADS = 132 * 2048  # that an H100 runs at the same time


def describe_call(
    storage: Storage, T: int, B: int, seed: Tensor | None, tensors: Mapping[Buffer, Tensor],
    scratch: Tensor | None = None, begin: int = 0,
) -> list[int]:  # fmt: skip
    """The fields of a kernel's ``Call``.

    Args:
        begin: the third field.
    """
    addresses = [tensors[b].data_ptr() if b in tensors else 0 for b in storage.buffers]
    last = 0 if scratch is None else scratch.data_ptr()
    strides = (stride for b in storage.strided for stride in tensors[b].stride())
    return [T, B, begin, 0 if seed is None else seed.data_ptr(), *addresses, last, *strides]


def run_whole(
    source: CudaSource, launcher: Launcher, T: int, B: int, seed: Tensor | None,
    tensors: Mapping[Buffer, Tensor], device: torch.device,
) -> None:  # fmt: skip
    """Launches the kernel that runs all steps. It needs no workspace: nothing is recorded."""
    whole = source.whole
    assert whole is not None
    scratch_bytes = source.steps.scratch_bytes
    rows = whole.count_rows(T, B)
    if scratch_bytes:  # that of so few blocks stays in the cache
        rows = min(rows, -(-_THREADS // whole.threads))
    scratch = torch.empty(rows * scratch_bytes, dtype=torch.uint8, device=device)
    call = describe_call(source.steps.storage, T, B, seed, tensors, scratch)
    launcher(whole.name, rows, whole.blocks, whole.threads, as_argument(call))


class Workspace:
    """Runs the steps of one program for one batch size, one call after another.

    Args:
        record: records chunks of steps, one for each power of two; without it steps are launched
            one by one.

    Attributes:
        resident: the tensors that products read and write, weights included.
    """

    def __init__(
        self,
        source: CudaSource,
        launcher: Launcher,
        B: int,
        device: torch.device,
        record: Recorder | None,
    ) -> None:
        self.source = source
        self.launcher = launcher
        self.B = B
        self.record = record
        self.chunks: dict[int, Callable[[], None]] = {}
        storage = source.steps.storage
        products = [item for item in source.launches if isinstance(item, Op)]
        weights = {storage.homes[v].buffer for op in products for v in op.values[1:]}
        self.resident = {
            buffer: torch.empty(buffer.shape(0, B), dtype=DTYPES[buffer.type.dtype], device=device)
            for buffer in storage.buffers
            if buffer.kind in ("state", "step", "constant") or buffer in weights
        }
        self.scratch = torch.empty(B * source.steps.scratch_bytes, dtype=torch.uint8, device=device)
        # T, B, begin, the seed, the buffers, the scratch.
        self.call = torch.empty(len(storage.buffers) + 5, dtype=torch.int64, device=device)
        self.items = [
            [self._product(item, parity) if isinstance(item, Op) else item
             for item in source.launches]
            for parity in (0, 1)
        ]  # fmt: skip

        if record:  # a first run loads kernels and sets libraries up, which graphs cannot record
            self._start(0, None, {})
            self._chunk(2)

    def run(self, T: int, seed: Tensor | None, tensors: Mapping[Buffer, Tensor]) -> None:
        """Runs T steps, and at most one more, whose kernels return at once.

        Args:
            seed: int64 scalar, of the random masks.
            tensors: the tensors of all buffers; the initial states are written.
        """
        self._start(T, seed, tensors)
        if self.record is None:
            self._steps(T)
            return
        size, left = CHUNK, T
        while left > 0:
            while size > max(left, 2):
                size //= 2
            if size not in self.chunks:
                self.chunks[size] = self.record(functools.partial(self._chunk, size))
            self.chunks[size]()
            left -= size

    def _start(self, T: int, seed: Tensor | None, tensors: Mapping[Buffer, Tensor]) -> None:
        storage = self.source.steps.storage
        call = describe_call(storage, T, self.B, seed, tensors, self.scratch)
        self._once("start", as_argument(call))
        for launch in self.source.before:
            self._launch(launch, 0)

    def _steps(self, count: int) -> None:
        for ahead in range(count):
            for item in self.items[ahead % 2]:
                if isinstance(item, Launch):
                    self._launch(item, ahead)
                else:
                    item()

    def _chunk(self, size: int) -> None:
        self._steps(size)
        self._once("advance", ctypes.c_int64(size))

    def _once(self, name: str, argument: Any) -> None:
        self.launcher(name, 1, 1, 1, ctypes.c_void_p(self.call.data_ptr()), argument)

    def _launch(self, launch: Launch, ahead: int) -> None:
        call = ctypes.c_void_p(self.call.data_ptr())
        self.launcher(
            launch.name, self.B, launch.blocks, launch.threads, call, ctypes.c_int64(ahead)
        )

    def _product(self, op: Op, parity: int) -> Callable[[], Any]:
        """A function that computes a product, of even steps (parity 0) or of odd ones (1)."""
        homes = self.source.steps.storage.homes

        def at(location: Location) -> Tensor:
            tensor = self.resident[location.buffer]
            match location.buffer.kind:
                case "state":
                    return tensor[(parity + location.after) % 2]
                case "constant":
                    return tensor[0]
            return tensor

        x, by, *bias = (at(homes[v]) for v in op.values)
        if op.kind == "linear":
            by = by.t()
        function = torch.addmm if bias else torch.mm
        return functools.partial(function, *bias, x, by, out=at(homes[op.result]))
