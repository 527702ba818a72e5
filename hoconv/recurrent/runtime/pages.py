"""Allocates large tensors on the CPU from huge pages, where the system has them.

Memory that is new to the process is cleared by the system when it is first written, a page at a
time. In pages of 4 KiB the clearing takes several times as long as the writing: 52 MiB take 28 ms
to write where they are new, 7 ms in pages of 2 MiB, and 1.5 ms where they are not new.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import (
    _empty_strided_cpu,  # pyright: ignore[reportAttributeAccessIssue]
)

from hoconv.recurrent.codegen.cpp import ALIGNMENT

_HUGE = 1 << 21  # bytes of a huge page: of x86-64, and of AArch64 with pages of 4 KiB
_LARGE = _HUGE >> 2  # smaller tensors have few pages of any size


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the CPU."""
    tensor = _empty_strided_cpu(shape, strides, dtype)  # in a third of torch.empty's time
    if tensor.nbytes >= _LARGE and (advise := _find_advise()):
        # It is advice, on memory around the tensor, too: a page may hold several tensors that were
        # allocated one after another. Where it is not taken, pages are small.
        start = tensor.data_ptr() // _HUGE * _HUGE
        stop = -(-(tensor.data_ptr() + tensor.nbytes) // _HUGE) * _HUGE
        advise(start, stop - start, mmap.MADV_HUGEPAGE)
    return tensor


def allocate_aligned(count: int) -> tuple[Tensor, int]:
    """Uninitialised memory, and the address of so many of its bytes, where the widest vector
    register can be loaded."""
    memory = _empty_strided_cpu((count + ALIGNMENT,), (1,), torch.uint8)
    address = memory.data_ptr()
    return memory, address + -address % ALIGNMENT


@functools.cache
def _find_advise() -> Callable[..., Any] | None:
    """The system's madvise; None where it has no huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise
