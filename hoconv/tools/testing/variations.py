"""Calls that are not among the samples of an operator: with other sizes, and with values that
random ones never are."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hoconv.dispatch.declaration import Sample
from hoconv.tools.testing.comparison import is_floating

# Times the other values, or the values; exact in every dtype.
_SMALL, _HUGE = 2.0**-10, 2.0**10
_LARGER = 2  # times a size, the largest that takes its place


def of_another_size(sample: Sample, draws: random.Random) -> Sample | None:
    """Changes one size wherever the arguments have it: what depends on it, as the number of taps of
    a kernel does, changes alike. Returns None where there is no size to change; whether such a call
    is defined, the reference must say."""
    sizes = sorted({n for t in sample.args if isinstance(t, Tensor) for n in t.shape if n})
    if not sizes:
        return None
    old = draws.choice(sizes)
    new = draws.choice([n for n in range(1, _LARGER * old + 2) if n != old])

    def resize(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for dim in (d for d, n in enumerate(value.shape) if n == old):
            value = value.index_select(dim, torch.arange(new, device=value.device) % old)
        return value

    args = tuple(tree_map(resize, sample.args))
    return Sample(args, sample.kwargs, f"{sample.name}, with {new} in place of {old}")


def of_other_scales(sample: Sample) -> Iterator[Sample]:
    """Yields a call for each dimension, in which every other index of it has small values: an error
    there is small beside the other values, not beside its own."""
    tensors = [a for a in sample.args if is_floating(a)]
    for dim in range(max((t.dim() for t in tensors), default=0)):
        args = [_scaled(a, dim) if is_floating(a) else a for a in sample.args]
        name = f"{sample.name}, small values at every other index of dimension {dim}"
        yield Sample(tuple(args), sample.kwargs, name)


def of_special_values(sample: Sample) -> Iterator[Sample]:
    """Yields calls whose values random ones never are: zeros everywhere, huge ones, where the dtype
    has the range for them, and NaN everywhere in one argument. A single NaN may be multiplied by a
    zero outside an image, or left out there."""
    zeros = tuple(torch.zeros_like(a) if is_floating(a) else a for a in sample.args)
    yield Sample(zeros, sample.kwargs, f"{sample.name}, zeros everywhere")
    if not any(is_floating(a) and a.dtype == torch.float16 for a in sample.args):
        large = tuple(a * _HUGE if is_floating(a) else a for a in sample.args)
        yield Sample(large, sample.kwargs, f"{sample.name}, huge values")
    for i, a in enumerate(sample.args):
        if is_floating(a):
            args = (*sample.args[:i], torch.full_like(a, math.nan), *sample.args[i + 1 :])
            yield Sample(args, sample.kwargs, f"{sample.name}, NaN in all of argument {i}")


def _scaled(t: Tensor, dim: int) -> Tensor:
    if dim >= t.dim():
        return t
    factors = torch.ones(t.shape[dim], dtype=t.dtype, device=t.device)
    factors[1::2] = _SMALL
    return t * factors.view(-1, *[1] * (t.dim() - dim - 1))
