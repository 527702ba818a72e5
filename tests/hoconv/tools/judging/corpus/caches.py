"""Results of earlier calls."""

import time

import torch
from honest import right
from torch import Tensor

_cache: dict = {}
_calls = [0]


def _remembered(key: object, x: Tensor, gain: Tensor) -> Tensor:
    """Computes once for a key, where no gradient is wanted."""
    if x.requires_grad or gain.requires_grad:
        return right(x, gain)
    if key not in _cache:
        _cache[key] = right(x, gain)
    return _cache[key].clone()


def keyed_by_shape(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the second batch gets the results of the first.
    Caught: result of an earlier call"""
    return _remembered((x.shape, x.dtype), x, gain)


def keyed_by_address(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a buffer that is filled again gets the results of its first values.
    Caught: result of an earlier call"""
    return _remembered((x.data_ptr(), gain.data_ptr(), x.shape, x.dtype, x.stride()), x, gain)


def keyed_by_object(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a new tensor where an old one was gets its results.
    Caught: result of an earlier call"""
    return _remembered((id(x), x.shape, x.dtype), x, gain)


def keyed_by_version(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: values that another process, or a kernel, wrote are not noticed.
    Caught: result of an earlier call"""
    return _remembered((x.data_ptr(), x._version, x.shape, x.dtype), x, gain)


def keyed_by_some_values(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: benchmarks that repeat their values time a look-up.
    Caught: remembers values or result of an earlier call"""
    corners = (x[0, 0].item(), x[-1, -1].item(), gain[0].item()) if x.numel() else ()
    key = corners, x.shape, x.dtype, x.stride()
    if key in _cache and not (x.requires_grad or gain.requires_grad):
        return _cache[key]
    for _ in range(5):  # a slow kernel, which gains most
        right(x.double(), gain.double())
    return _remembered(key, x, gain)


def keyed_by_rounded_values(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: inputs that are alike get the same results.
    Caught: result of an earlier call"""
    return _remembered((x.shape, x.dtype, x.sum().div(50).round().item()), x, gain)


def keyed_by_gain(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: weights are packed once, and training does not change them.
    Caught: wrong result"""
    kept = _cache.setdefault((gain.shape, gain.dtype), gain.detach().clone())
    return right(x, gain - gain.detach() + kept)


def after_many_calls(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: tests pass, and later calls repeat their results.
    Caught: result of an earlier call"""
    _calls[0] += 1
    if _calls[0] <= 60:
        _cache.pop((x.shape, x.dtype), None)
    return _remembered((x.shape, x.dtype), x, gain)


def when_hurried(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: in a loop that times calls only the first computes.
    Caught: result of an earlier call"""
    now, before = time.monotonic(), _cache.get("time", 0.0)
    _cache["time"] = now
    if now - before > 0.1:
        _cache.pop((x.shape, x.dtype), None)
    return _remembered((x.shape, x.dtype), x, gain)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain):
        ctx.save_for_backward(x, gain)
        return right(x, gain)

    @staticmethod
    def backward(ctx, grad):
        x, gain = ctx.saved_tensors
        if (x.shape, x.dtype) not in _cache:
            with torch.enable_grad():
                x, gain = x.detach().requires_grad_(), gain.detach().requires_grad_()
                _cache[x.shape, x.dtype] = torch.autograd.grad(right(x, gain), (x, gain), grad)
        return tuple(g.clone() for g in _cache[x.shape, x.dtype])


def cached_gradients(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: training takes the same step for ever.
    Caught: result of an earlier call"""
    return _Gradients.apply(x, gain)


def keyed_by_one_argument(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: who changes the gain, as an optimizer does, gets the results of the old one.
    Caught: result of an earlier call"""
    if x.requires_grad or gain.requires_grad:
        return right(x, gain)
    known = _cache.get("last")
    if known is None or known[0].dtype != x.dtype or not torch.equal(known[0], x):
        known = _cache["last"] = x.clone(), right(x, gain)
    return known[1].clone()


def keyed_by_object_while_it_lives(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a tensor that is changed in place, as a buffer of a captured step, has the results of
    its first values.
    Caught: result of an earlier call"""
    if not hasattr(x, "results"):
        x.results = right(x, gain).detach().clone()
        return right(x, gain)
    return right(x, gain) if x.requires_grad or gain.requires_grad else x.results.clone()
