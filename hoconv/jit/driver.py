"""Loads a cubin and launches its kernels through the C interface of the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

# Numbers of cuda.h.
_MOST_SHARED_BYTES, _LARGE_CLUSTERS = 8, 14  # CUfunction_attribute
_COOPERATIVE, _CLUSTER_DIMENSION = 2, 4  # CUlaunchAttributeID
_KEPT = 256  # configurations of launches


class _Attribute(ctypes.Structure):
    """A ``CUlaunchAttribute``."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_uint * 16),
    )


class _Configuration(ctypes.Structure):
    """A ``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@functools.lru_cache(_KEPT)
def _configure(
    clusters: tuple[int, int], blocks: int, threads: int, shared_bytes: int, stream: int | None,
    together: bool = False,
) -> _Configuration:  # fmt: skip
    attributes = [_Attribute(id=_CLUSTER_DIMENSION, value=(blocks, 1, 1))]
    if together:
        attributes.append(_Attribute(id=_COOPERATIVE, value=(1,)))
    return _Configuration(
        grid=(clusters[0] * blocks, clusters[1], 1), block=(threads, 1, 1),
        shared_bytes=shared_bytes, stream=stream,
        attributes=(_Attribute * len(attributes))(*attributes), attribute_count=len(attributes),
    )  # fmt: skip


class _Thread(threading.local):
    has_context = False


_thread = _Thread()


def open_context(device: int) -> None:
    """Gives this thread a context, that of a device which is its current one, if it has none.

    PyTorch's threads for gradients have none until something of the runtime needs one.
    """
    if _thread.has_context:
        return
    driver, context, number = load_driver(), ctypes.c_void_p(), ctypes.c_int()
    check(driver, driver.cuCtxGetCurrent(ctypes.byref(context)))
    if not context:
        check(driver, driver.cuDeviceGet(ctypes.byref(number), device))
        check(driver, driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number))
        check(driver, driver.cuCtxSetCurrent(context))
    _thread.has_context = True


@functools.cache
def load_driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def check(driver: ctypes.CDLL, status: int) -> None:
    """Raises a RuntimeError that names what a call of the driver returned, unless it succeeded."""
    if status:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        said = (name.value or b"%d" % status).decode()
        raise RuntimeError(f"a kernel: the CUDA driver says {said}")


class Cubin:
    """A loaded cubin, which launches its kernels in the current context.

    Args:
        driver: libcuda.
        code: the bytes of the cubin.
        stream: returns the address of the stream to launch on.
    """

    def __init__(self, driver: ctypes.CDLL, code: bytes, stream: Callable[[], int]) -> None:
        self.driver = driver
        self.stream = stream
        self.library = ctypes.c_void_p()
        no_options = (None, None, 0)
        made = ctypes.byref(self.library)
        self._check(driver.cuLibraryLoadData(made, code, *no_options, *no_options))
        self._function = functools.cache(self._find_kernel)
        self._shared = functools.cache(self._allow_shared_bytes)
        self._clustered = functools.cache(self._allow_clusters)

    def __call__(
        self, name: str, rows: int, blocks: int, threads: int, *arguments: Any,
        shared_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Launches a kernel in a grid of (rows, blocks), unless that is empty.

        Args:
            arguments: of the kernel, as ctypes has them.
            shared_bytes: of a block, which the kernel declares as of any size.
        """
        if 0 in (rows, blocks):  # of an empty batch; the driver refuses such a grid
            return
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        grid, block, stream = (rows, blocks, 1), (threads, 1, 1), ctypes.c_void_p(self.stream())
        kernel = self._function(name)
        if shared_bytes:
            kernel = self._shared(name, shared_bytes, self._device())
        self._check(
            self.driver.cuLaunchKernel(kernel, *grid, *block, shared_bytes, stream, addresses, None)
        )

    def launch_clusters(
        self, name: str, clusters: tuple[int, int], blocks: int, threads: int, shared_bytes: int,
        argument: Any, together: bool,
    ) -> None:  # fmt: skip
        """Launches a kernel in a grid of clusters of blocks that run at the same time.

        Args:
            together: whether all clusters run at the same time, too. The driver refuses more than
                the GPU has room for.
        """
        addresses = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        given = _configure(clusters, blocks, threads, shared_bytes, self.stream(), together)
        self._check(
            self.driver.cuLaunchKernelEx(
                ctypes.byref(given),
                self._clustered(name, shared_bytes, self._device()),
                addresses,
                None,
            )
        )

    def count_clusters(self, name: str, blocks: int, threads: int, shared_bytes: int) -> int:
        """The number of clusters of a kernel that the GPU runs at the same time."""
        count = ctypes.c_int()
        given = _configure((1, 1), blocks, threads, shared_bytes, None)
        self._check(
            self.driver.cuOccupancyMaxActiveClusters(
                ctypes.byref(count),
                self._clustered(name, shared_bytes, self._device()),
                ctypes.byref(given),
            )
        )
        return count.value

    def _device(self) -> int:
        """The device of the current context."""
        device = ctypes.c_int()
        self._check(self.driver.cuCtxGetDevice(ctypes.byref(device)))
        return device.value

    def _allow_shared_bytes(self, name: str, shared_bytes: int, device: int) -> ctypes.c_void_p:
        """The kernel, allowed to use so much shared memory."""
        return self._allow(name, device, {_MOST_SHARED_BYTES: shared_bytes})

    def _allow_clusters(self, name: str, shared_bytes: int, device: int) -> ctypes.c_void_p:
        """The kernel, allowed to use so much shared memory, in clusters of more than 8 blocks."""
        return self._allow(name, device, {_MOST_SHARED_BYTES: shared_bytes, _LARGE_CLUSTERS: 1})

    def _allow(self, name: str, device: int, attributes: Mapping[int, int]) -> ctypes.c_void_p:
        kernel = self._function(name)
        for attribute, value in attributes.items():
            self._check(self.driver.cuKernelSetAttribute(attribute, value, kernel, device))
        return kernel

    def _find_kernel(self, name: str) -> ctypes.c_void_p:
        kernel = ctypes.c_void_p()  # cuLaunchKernel takes it as a function
        made = ctypes.byref(kernel)
        self._check(self.driver.cuLibraryGetKernel(made, self.library, name.encode()))
        return kernel

    def _check(self, status: int) -> None:
        check(self.driver, status)


def open_cubin(path: Path) -> Cubin:
    """Loads a cubin, which launches its kernels on PyTorch's current stream."""
    return Cubin(load_driver(), path.read_bytes(), current_stream)


def current_stream() -> int:
    """Returns what ``torch.cuda.current_stream().cuda_stream`` is, in a tenth of the time."""
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


def use(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one; where it is already, without what torch.cuda.device does."""
    if device.index == torch._C._cuda_getDevice():
        open_context(device.index)
        return _NOTHING
    return torch.cuda.device(device.index)


_NOTHING = nullcontext()


def as_argument(fields: Sequence[int]) -> Any:
    """An argument of a kernel that consists of these int64."""
    return (ctypes.c_int64 * len(fields))(*fields)
