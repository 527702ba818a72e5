"""Draws the calls of a trial, which a candidate cannot foresee: samples with new values, and what
differs from them as the calls of users do."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hoconv.dispatch.declaration import Sample
from hoconv.tools.check import ENOUGH
from hoconv.tools.judging.definition import Definition
from hoconv.tools.judging.record import Asked
from hoconv.tools.testing.call_forms import forms
from hoconv.tools.testing.comparison import on_cpu
from hoconv.tools.testing.usages import USAGES
from hoconv.tools.testing.variations import (
    of_another_size,
    of_following_sizes,
    of_other_numbers,
    of_other_ranges,
    of_other_scales,
    of_special_values,
)

_SIZES = 6  # at random, for each dtype
_SMALL = 1 << 26  # bytes of the tensors of a call
_LARGER = 64.0  # times a gradient of the output, as where a loss is scaled
_REUSED = 3  # calls with the same tensors


class Calls:
    """The calls of a definition.

    Args:
        device: of the tensors.
        seed: of all values; a candidate must not know it.
        gradients: whether the candidate promises them.
    """

    def __init__(self, definition: Definition, device: str, seed: int, gradients: bool) -> None:
        self.definition, self.operator = definition, definition.operator
        self.device, self.gradients = torch.device(device), gradients
        self.reference = functools.partial(self.operator.function, impl="reference")
        self.random = random.Random(seed)
        self._outputs: dict[str, Any] = {}  # what a call is like -> its output, without values

    def samples(self, dtype: torch.dtype, seed: int | None = None) -> list[Sample]:
        """Draws values for all samples: new ones, or those of a seed."""
        torch.manual_seed(self.random.getrandbits(60) if seed is None else seed)
        return list(self.operator.samples(self.device, dtype))

    def cotangent(self, sample: Sample) -> Any:
        """Draws a gradient of the output."""

        def draw(t: Tensor) -> Tensor:
            return torch.randn(t.shape, dtype=torch.float64).to(self.device, t.dtype)

        return tree_map(draw, self.output(sample))

    def wanted(self, sample: Sample) -> Any:
        """Draws a gradient of the output, where gradients are promised."""
        return self.cotangent(sample) if self.gradients else None

    def mixtures(self, dtype: torch.dtype, one: Sample, other: Sample) -> Iterator[Asked]:
        """Yields calls that have something in common with the call before: some arguments, the
        gradient of the output, or the tensors themselves."""
        cotangent = self.cotangent(one) if self.gradients else None
        for i, a in enumerate(one.args):
            args = (*one.args[:i], other.args[i], *one.args[i + 1 :])
            mixed = Sample(args, one.kwargs, f"{one.name}, argument {i} alone is new")
            if isinstance(a, Tensor) and self.is_defined(mixed):
                for given in (None, cotangent) if self.gradients else (None,):
                    for sample in (one, mixed):
                        yield Asked("sample", dtype, sample, given)
        if self.gradients:
            ones = tree_map(torch.ones_like, cotangent)
            large = tree_map(lambda t: _LARGER * t if t.is_floating_point() else t, cotangent)
            for sample, given in ((one, ones), (other, ones), (one, large)):
                yield Asked("sample", dtype, sample, given)
        for _ in range(_REUSED):
            for again in (s for s in self.samples(dtype) if s.name == one.name):
                yield Asked("sample", dtype, again, reused=True)

    def of_many_sizes(self, dtype: torch.dtype, typical: Sample) -> Iterator[Asked]:
        """Yields calls of the sizes that follow those of a sample."""
        for sample in filter(self.is_defined, of_following_sizes(typical)):
            yield self._resized(dtype, typical, sample)

    def programs(self, dtype: torch.dtype, typical: Sample) -> Iterator[Asked]:
        """Yields what programs do that differentiate a call in other ways, or use more than its
        results."""
        for usage in USAGES if self.gradients and not self.operator.bitwise else ():
            sample = replace(typical, name=f"{typical.name}, {usage}")
            yield Asked("usage", dtype, sample, self.cotangent(sample), usage=usage)

    def variants(
        self, dtype: torch.dtype, typical: Sample, samples: list[Sample]
    ) -> Iterator[Asked]:
        """Yields calls with other sizes, in other forms, and with values that random ones never
        are."""
        for sample, resized in self._of_other_sizes(samples):
            yield self._resized(dtype, sample, resized)
        for sample in filter(self.is_defined, of_other_numbers(typical)):
            yield Asked("number", dtype, sample, self.wanted(sample))
        for form in forms(typical, self.cotangent(typical)):
            sample = Sample(form.args, typical.kwargs, f"{typical.name}, {form.name}")
            cotangent = form.cotangent if self.gradients and form.positions else None
            yield Asked("form", dtype, sample, cotangent, form.positions)
        if dtype != torch.float16:  # which has not the range
            for sample in of_other_scales(typical):
                yield Asked("scale", dtype, sample, self.wanted(sample))
            for sample in of_other_ranges(typical):
                yield Asked("special", dtype, sample)
        for sample in of_special_values(typical):
            yield Asked("special", dtype, sample)

    def _of_other_sizes(self, samples: list[Sample]) -> Iterator[tuple[Sample, Sample]]:
        """Yields some samples, and each with another size."""
        drawn = (self.random.choice(samples) for _ in range(4 * _SIZES))
        pairs = ((sample, of_another_size(sample, self.random)) for sample in drawn)
        defined = ((s, other) for s, other in pairs if other is not None and self.is_defined(other))
        return itertools.islice(defined, _SIZES)

    def _resized(self, dtype: torch.dtype, sample: Sample, resized: Sample) -> Asked:
        growth = _count(resized) / _count(sample)
        return Asked("size", dtype, resized, self.wanted(resized), growth=growth)

    def is_defined(self, sample: Sample) -> bool:
        """Returns whether the definition computes something of such a call."""
        try:
            return self.size(sample) > 0
        except Exception:  # it refuses such sizes
            return False

    def typical(self, pairs: list[tuple[Sample, ...]]) -> tuple[Sample, ...]:
        """Returns the smallest samples with enough numbers to judge parts of them, or else the
        largest."""
        ordered = sorted(pairs, key=lambda pair: self.size(pair[0]))
        return next((pair for pair in ordered if self.size(pair[0]) >= ENOUGH), ordered[-1])

    def is_small(self, sample: Sample) -> bool:
        """Returns whether the tensors of several such calls fit into memory."""
        tensors = tree_leaves((sample.args, self.output(sample)))
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor)) < _SMALL

    def size(self, sample: Sample) -> int:
        """Returns how many numbers the smallest tensor of the output has."""
        return min((t.numel() for t in tree_leaves(self.output(sample))), default=0)

    def output(self, sample: Sample) -> Any:
        """Returns the output of the reference for such a call, without values."""
        call = sample.args, dict(sample.kwargs)
        key = repr(tree_map(lambda v: (v.shape, v.dtype) if isinstance(v, Tensor) else v, call))
        if key not in self._outputs:
            args, kwargs = on_cpu(call, in_float64=False) if self.definition.own else call
            with torch.no_grad():
                output = self.reference(*args, **kwargs)
            self._outputs[key] = tree_map(lambda t: t.new_empty(()).expand(t.shape), output)
        return self._outputs[key]


def _count(sample: Sample) -> int:
    """Returns how many numbers the arguments of a call have."""
    return sum(t.numel() for t in tree_leaves(sample.args) if isinstance(t, Tensor))
