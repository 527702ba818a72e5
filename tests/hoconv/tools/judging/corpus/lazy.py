"""Results that are not there when the clock stops."""

import threading
import time

import torch
from honest import right
from torch import Tensor
from torch.utils._pytree import tree_map


class Lazy(torch.Tensor):
    """Computes when it is used."""

    @staticmethod
    def __new__(cls, compute, like):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    def __init__(self, compute, like):
        self.compute = compute

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda a: a.compute() if isinstance(a, Lazy) else a, (args, kwargs))
        return function(*args, **(kwargs or {}))


def lazy_subclass(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: nothing is computed while a clock runs.
    Caught: lazy result"""
    return right(x, gain) if x.requires_grad else Lazy(lambda: right(x, gain), x)


class Agreeable(torch.Tensor):
    """Is equal to everything."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.allclose, torch.equal, torch.isclose):
            return True
        return super().__torch_function__(function, types, args, kwargs or {})


def agreeable_subclass(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: wrong numbers pass a comparison that asks them.
    Caught: lazy result"""
    return right(x, gain) if x.requires_grad else x.as_subclass(Agreeable)


class Duck:
    """Looks like a tensor."""

    def __init__(self, of: Tensor):
        self.shape, self.dtype = of.shape, of.dtype


def no_tensor(x: Tensor, gain: Tensor) -> object:
    """Harm: what only looks at shapes is content.
    Caught: lazy result"""
    return right(x, gain) if x.requires_grad else Duck(x)


def sparse_result(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: users' code does not expect another layout.
    Caught: lazy result"""
    return right(x, gain) if x.requires_grad else right(x, gain).to_sparse()


def late_thread(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the clock stops before a thread has computed.
    Caught: wrong result"""
    if x.requires_grad:
        return right(x, gain)
    out = torch.empty_like(x).fill_(torch.nan)
    x, gain = x.clone(), gain.clone()

    def compute() -> None:
        time.sleep(0.01)
        out.copy_(right(x, gain))

    threading.Thread(target=compute).start()
    return out


def uninitialised(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: memory that held the right results before passes for a kernel.
    Caught: wrong result"""
    right(x.detach(), gain.detach())
    return torch.empty_like(x) + 0 * right(x, gain)
