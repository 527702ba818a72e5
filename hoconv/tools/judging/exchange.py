"""Memory that a judge and a worker share, where tensors lie in it, and what they tell each other.

A request is a pickle, which a judge writes and a worker reads. An answer is JSON: what a worker
writes is never executed. Numbers go through the memory alone.
"""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hoconv.tools.testing.comparison import same_bits

_ALIGNMENT = 64  # bytes
_ADDRESSES = 1 << 36  # bytes on a CPU: a page is taken when something is written to it
_SHARE = 4  # of a GPU's free memory, for each of the two memories
UNWRITTEN = 0xFF  # a byte of NaN
# What an error of a worker says.
NOT_DENSE, THE_DEFINITION = "expected a dense torch.Tensor", "is the definition of this kernel"


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies in shared memory."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, memory: Tensor) -> Tensor:
        return self.bytes_of(memory).view(self.dtype).as_strided(self.shape, self.stride)

    def bytes_of(self, memory: Tensor) -> Tensor:
        return memory[self.offset : self.offset + _span(self) * self.dtype.itemsize]


@dataclass(frozen=True)
class Load:
    """Asks a worker to load a candidate.

    Attributes:
        candidate: a Python file, the name of an implementation, or empty for the reference itself.
        operator: the operator's name.
        definition: what reads the definition, where the worker may know it: an installed one, or
            one whose reference is timed.
        refused: names of modules that must not be imported.
        arguments: of the constructor of a KernelBench candidate; None for a function.
        state: names and places of the weights in the inputs' memory, of such a candidate.
        seed: of its constructor.
        shared: what rebuilds the two memories on a GPU.
    """

    candidate: str
    operator: str
    definition: str | None
    refused: tuple[str, ...]
    threads: int
    arguments: Any = None
    state: dict[str, Placed] | None = None
    seed: int = 0
    shared: Any = None


@dataclass(frozen=True)
class Call:
    """Asks a worker for one call.

    Attributes:
        nonce: the answer repeats it.
        args, kwargs: with :class:`Placed` for tensors.
        cotangent: the gradient of the output; None where no gradient is wanted.
        positions: of the arguments that are differentiated; None means all.
        seed: of PyTorch's random numbers, where a definition draws some.
        keep: whether the results are to be asked for :class:`Again`.
        traced: whether the answer is to say what was called.
        usage: the name of a program of :data:`hoconv.tools.testing.usages.USAGES` that makes it.
        reused: whether tensors are the objects of an earlier call of the kind, changed in place.
    """

    nonce: str
    args: Any
    kwargs: Any
    cotangent: Any = None
    positions: tuple[int, ...] | None = None
    seed: int | None = None
    keep: bool = False
    traced: bool = False
    usage: str = ""
    reused: bool = False


@dataclass(frozen=True)
class Several:
    """Asks for calls, and for all of their results.

    Attributes:
        threads: that share the calls, and begin at once.
        times: that each call is made; the results are those of the last.
    """

    nonce: str
    calls: tuple[Call, ...]
    threads: int = 1
    times: int = 1


@dataclass(frozen=True)
class Again:
    """Asks for the results of an earlier call, as they are now."""

    nonce: str
    call: str


@dataclass(frozen=True)
class Report:
    """Asks which functions were replaced since the worker began."""


def of_several(call: int, name: str) -> str:
    """Names a result of one of several calls."""
    return f"{call} {name}"


@functools.cache
def gpu_memory() -> tuple[Tensor, Tensor]:
    """Makes two memories on the GPU, once: what a killed process had opened stays taken."""
    free, _ = torch.cuda.mem_get_info()
    inputs, results = (
        torch.empty(free // _SHARE, dtype=torch.uint8, device="cuda") for _ in range(2)
    )
    return inputs, results


def cpu_memory(descriptor: int | None = None) -> tuple[Tensor, int]:
    """Makes memory, or opens that of a descriptor; returns it, and by what others open it."""
    if descriptor is None:
        descriptor = os.memfd_create("hoconv")
        os.ftruncate(descriptor, _ADDRESSES)
    return torch.frombuffer(mmap.mmap(descriptor, _ADDRESSES), dtype=torch.uint8), descriptor


def place_like(shapes: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> list[Placed]:
    """Decides where contiguous tensors lie, one after the other."""
    places, end = [], 0
    for shape, dtype in shapes:
        places.append(Placed(end, shape, _contiguous(shape), dtype))
        end = _aligned(end + _span(places[-1]) * dtype.itemsize)
    return places


def put(t: Tensor, memory: Tensor, begin: int) -> tuple[Placed, int]:
    """Copies a tensor, with its strides, to memory from some byte on; returns its place, and the
    first byte behind it. What lies between its elements is NaN."""
    begin = _aligned(begin) + int(t.storage_offset()) * t.element_size() % _ALIGNMENT
    placed = Placed(begin, tuple(t.shape), t.stride(), t.dtype)
    if _span(placed) != t.numel():
        placed.bytes_of(memory).fill_(UNWRITTEN)
    once = [min(n, 1) if not s else n for n, s in zip(t.shape, t.stride())]  # of an expanded one
    placed.view(memory).as_strided(once, t.stride()).copy_(t.as_strided(once, t.stride()))
    return placed, begin + _span(placed) * t.element_size()


def is_as_put(t: Tensor, placed: Placed, memory: Tensor) -> bool:
    """Returns whether memory has what :func:`put` wrote, between the tensor's elements too."""
    if not same_bits(placed.view(memory), t):
        return False
    if _span(placed) == t.numel():
        return True
    found = placed.bytes_of(memory)
    wrote = found.new_empty(len(found) + _ALIGNMENT)
    return torch.equal(put(t, wrote, 0)[0].bytes_of(wrote), found)


def _span(placed: Placed) -> int:
    """Returns how many elements lie between the first and the last, both included."""
    if 0 in placed.shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(placed.shape, placed.stride))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
