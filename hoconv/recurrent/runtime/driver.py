"""Loads a cubin and launches its kernels through the C interface of the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any


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

    def __call__(self, name: str, rows: int, blocks: int, threads: int, *arguments: Any) -> None:
        """As :data:`hoconv.recurrent.runtime.workspace.Launcher`."""
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        grid, block, stream = (rows, blocks, 1), (threads, 1, 1), ctypes.c_void_p(self.stream())
        self._check(
            self.driver.cuLaunchKernel(
                self._function(name), *grid, *block, 0, stream, addresses, None
            )
        )

    def _find_kernel(self, name: str) -> ctypes.c_void_p:
        kernel = ctypes.c_void_p()  # cuLaunchKernel takes it as a function
        made = ctypes.byref(kernel)
        self._check(self.driver.cuLibraryGetKernel(made, self.library, name.encode()))
        return kernel

    def _check(self, status: int) -> None:
        if status:
            name = ctypes.c_char_p()
            self.driver.cuGetErrorName(status, ctypes.byref(name))
            said = (name.value or b"%d" % status).decode()
            raise RuntimeError(f"a kernel of a recurrent cell: the CUDA driver says {said}")
