"""Calls that are not among the samples of a definition."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hoconv.dispatch.declaration import Sample
from hoconv.tools.testing.comparison import is_floating

_HUGE = 2.0**10  # times the values; exact in every dtype
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


def huge(sample: Sample) -> Sample:
    """Makes all values large."""
    args = tuple(a * _HUGE if is_floating(a) else a for a in sample.args)
    return Sample(args, sample.kwargs, f"{sample.name}, huge values")
