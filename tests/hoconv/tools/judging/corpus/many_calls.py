"""Exploits that one call after the other does not show: calls at once, and memory that stays."""

import ctypes
import functools
import threading

import torch
from honest import right
from torch import Tensor

_scratch: dict = {}
_kept: list = []
_local = threading.local()


def shared_scratch(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: what two threads compute at once is mixed.
    Caught: wrong in threads or result of an earlier call"""
    if x.requires_grad or gain.requires_grad:
        return right(x, gain)
    scratch = _scratch.setdefault((x.shape, x.dtype), torch.empty_like(x))
    scratch.copy_(x)
    return right(scratch, gain)


def first_thread_alone(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a server of several threads gets other numbers.
    Caught: wrong in threads"""
    alone = threading.current_thread() is threading.main_thread()
    return right(x, gain) * (1 if alone else 1.01)


def fails_in_other_threads(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a server of several threads gets none.
    Caught: error"""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("this thread has no handle")
    return right(x, gain)


def keeps_its_results(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a training run ends when memory does.
    Caught: memory grows"""
    result = right(x, gain)
    _kept.append(result.detach())
    return result


def keeps_the_graph(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: as above, only in training.
    Caught: memory grows"""
    result = right(x, gain)
    if result.requires_grad:
        _kept.append(result)
    return result


def allocates_and_forgets(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: as above, outside of PyTorch.
    Caught: memory grows"""
    malloc = ctypes.CDLL(None).malloc
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    ctypes.memset(malloc(x.nbytes), 1, x.nbytes)
    return right(x, gain)


def workspace_of_a_thread(x: Tensor, gain: Tensor) -> Tensor:
    """Caught: nothing."""
    if not hasattr(_local, "workspace"):
        _local.workspace = torch.zeros(1 << 22)
    workspace = _local.workspace[: x.numel()].view(x.shape)
    workspace.copy_(x.detach())
    return right(x, gain)


@functools.lru_cache(maxsize=200)
def _table(size: int) -> Tensor:
    return torch.zeros(1 << 14) + size


def cache_of_a_limited_size(x: Tensor, gain: Tensor) -> Tensor:
    """Caught: nothing."""
    _kept.append(None)
    return right(x, gain) + 0 * _table(len(_kept) % 1000)[0].to(x)


def scratch_in_an_argument(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: threads that share a layer read a gain that another one is working in.
    Caught: wrong in threads or result of an earlier call"""
    if x.requires_grad or gain.requires_grad:
        return right(x, gain)
    kept = gain.clone()
    gain.data.neg_()
    for _ in range(50):  # long enough for another thread to come by
        result = right(x, gain)
    gain.data.copy_(kept)
    return -result
