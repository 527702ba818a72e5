"""Calls that are not among the samples of an operator: with other sizes, and with values that
random ones never are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hoconv.dispatch.declaration import Sample
from hoconv.tools.testing.comparison import is_floating

# Times the other values, or the values; exact in every dtype.
_SMALL, _HUGE = 2.0**-10, 2.0**10
_LARGER = 2  # times a size, the largest that takes its place
_RESIDUES = 16  # sizes one after the other: every remainder of the elements that a register has
# More than a block of threads has, and no multiple of anything. What grows with its square fits.
_LARGE = 4099
_MOST_BYTES = 1 << 25  # of a tensor of another size
_FACTORS = 0.6, 1.7  # of a number
_OFFSET, _NEGATIVE, _SPARSE = 1000.0, -64.0, 1 / 4


def of_another_size(sample: Sample, draws: random.Random) -> Sample | None:
    """Changes one size wherever the arguments have it: what depends on it, as the number of taps of
    a kernel does, changes alike. Returns None where there is no size to change, or where a tensor
    would be too large; whether such a call is defined, the reference must say."""
    sizes = _sizes(sample)
    if not sizes:
        return None
    old = draws.choice(sizes)
    return _resized(sample, old, draws.choice([n for n in range(1, _LARGER * old + 2) if n != old]))


def of_following_sizes(sample: Sample) -> Iterator[Sample]:
    """Yields a call for each of the sizes that follow one that the arguments have, of every
    remainder that a kernel may treat by itself; and then those of a size that is large."""
    sizes = _sizes(sample)
    pairs = [(old, old + n) for old in sizes for n in range(1, 1 + _RESIDUES)]
    for old, new in (*pairs, *((old, _LARGE) for old in sizes)):
        if resized := _resized(sample, old, new):
            yield resized


def of_other_numbers(sample: Sample) -> Iterator[Sample]:
    """Yields calls in which one of the arguments that are Python floats is another number."""
    given = [*enumerate(sample.args), *sample.kwargs.items()]
    for place, value in given:
        for factor in _FACTORS if isinstance(value, float) else ():
            changed = {place: factor * value}
            args = tuple(changed.get(i, a) for i, a in enumerate(sample.args))
            kwargs = {name: changed.get(name, v) for name, v in sample.kwargs.items()}
            said = f"argument {place}" if isinstance(place, int) else place
            yield Sample(args, kwargs, f"{sample.name}, with {factor * value:g} as {said}")


def of_other_ranges(sample: Sample) -> Iterator[Sample]:
    """Yields calls whose values are in a range of their own: far from zero, as of pixels; mostly
    zeros, as behind a ReLU; those of one argument negative and large, all others positive, so that
    their products are negative, as the logarithms of small probabilities."""

    def changed(said: str, change: Callable[[int, Tensor], Tensor]) -> Sample:
        args = (change(i, a).to(a.dtype) if is_floating(a) else a
                for i, a in enumerate(sample.args))  # fmt: skip
        return Sample(tuple(args), sample.kwargs, f"{sample.name}, {said}")

    def sparse(_: int, a: Tensor) -> Tensor:
        return torch.where(torch.rand(a.shape, device=a.device) < _SPARSE, a, 0)

    yield changed("far from zero", lambda _, a: a + _OFFSET)
    yield changed("mostly zeros", sparse)
    for negative in (i for i, a in enumerate(sample.args) if is_floating(a)):
        said = f"argument {negative} negative and large, the others positive"
        yield changed(said, lambda i, a, n=negative: (_NEGATIVE if i == n else 1) * a.abs())


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


def _sizes(sample: Sample) -> list[int]:
    return sorted({n for t in sample.args if isinstance(t, Tensor) for n in t.shape if n})


def _resized(sample: Sample, old: int, new: int) -> Sample | None:
    """Puts one size in the place of another, wherever the arguments have it; None where a tensor
    would be too large."""

    def resize(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for dim in (d for d, n in enumerate(value.shape) if n == old):
            value = value.index_select(dim, torch.arange(new, device=value.device) % old)
        return value

    def is_large(value: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        numbers = math.prod(new if n == old else n for n in value.shape)
        return numbers * value.element_size() > _MOST_BYTES

    if any(map(is_large, tree_leaves(sample.args))):
        return None
    args = tuple(tree_map(resize, sample.args))
    return Sample(args, sample.kwargs, f"{sample.name}, with {new} in place of {old}")
