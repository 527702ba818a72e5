"""The expected results of an operator: those of its reference for each of its samples."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hoconv.dispatch.declaration import Operator, Sample
from hoconv.tools.testing.call_forms import Form, forms
from hoconv.tools.testing.comparison import (
    is_floating,
    named,
    on_cpu,
    output_and_gradients,
)

_SMALL = 2.0**-10  # times the other values; exact in every dtype


class BrokenDefinitionError(Exception):
    """The samples, or the reference's results for one, cannot be computed; says which and why."""


@dataclass(frozen=True)
class Case:
    """A sample, the gradient of its output, and the reference's results for both.

    Attributes:
        cotangent: the gradient of the output, in its structure.
        dtypes: the dtype of each tensor of the reference's output, by name.
        expected: output and gradients of the reference, by name.
        forms: other forms of the call, and what is expected of each.
        shares_memory: whether an output of the reference is in the memory of an argument.
    """

    sample: Sample
    cotangent: Any
    dtypes: dict[str, torch.dtype]
    expected: dict[str, Tensor]
    forms: list[tuple[Form, dict[str, Tensor]]]
    shares_memory: bool


def make_cases(operator: Operator, device: str, dtype: torch.dtype) -> list[Case]:
    """Computes the cases of an operator with new random values.

    Raises:
        BrokenDefinitionError: the samples or the reference raise an error.
    """
    cases, what = [], "samples"
    try:
        for sample in operator.samples(torch.device(device), dtype):
            what = sample.name
            cases.append(make_case(operator, device, sample))
            what = f"the sample after {sample.name}"
    except (Exception, SystemExit) as error:  # the other operators are still checked
        raise BrokenDefinitionError(f"{what}: {type(error).__name__}: {error}") from error
    return cases


def make_case(operator: Operator, device: str, sample: Sample, with_forms: bool = True) -> Case:
    """Computes a case on the CPU, independently of the device that is checked."""
    reference = functools.partial(operator.function, impl="reference")
    call = sample.args, dict(sample.kwargs)
    args, kwargs = on_cpu(call, in_float64=False)
    with torch.no_grad():
        like = reference(*args, **kwargs)
    cotangent = tree_map(lambda t: torch.randn(t.shape, dtype=torch.float64).to(t.dtype), like)
    dtypes = {name: t.dtype for name, t in named(like).items()}
    given = {address(a) for a in args if isinstance(a, Tensor)}
    shares_memory = any(address(t) in given for t in named(like).values())
    args, kwargs = on_cpu(call, in_float64=not operator.bitwise)

    def expect(cotangent: Any) -> dict[str, Tensor]:
        return output_and_gradients(reference, args, kwargs, cotangent)

    expected = expect(cotangent)
    on_device = tree_map(lambda t: t.to(device), cotangent)
    others = [
        (form, form.of(expected if form.same_values else expect(form.cotangent)))
        for form in (forms(sample, on_device) if with_forms else ())
    ]
    return Case(sample, on_device, dtypes, expected, others, shares_memory)


def of_other_scales(sample: Sample) -> Iterator[Sample]:
    """Yields a call for each dimension, in which every other index of it has small values: an error
    there is small beside the other values, not beside its own."""
    tensors = [a for a in sample.args if is_floating(a)]
    for dim in range(max((t.dim() for t in tensors), default=0)):
        args = [_scaled(a, dim) if is_floating(a) else a for a in sample.args]
        name = f"{sample.name}, small values at every other index of dimension {dim}"
        yield Sample(tuple(args), sample.kwargs, name)


def of_special_values(sample: Sample) -> Iterator[Sample]:
    """Yields calls whose values random ones never are: zeros everywhere, and NaN everywhere in one
    argument. A single NaN may be multiplied by a zero outside an image, or left out there."""
    zeros = tuple(torch.zeros_like(a) if is_floating(a) else a for a in sample.args)
    yield Sample(zeros, sample.kwargs, f"{sample.name}, zeros everywhere")
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


def address(t: Tensor) -> int:
    """Returns where the memory of a tensor begins, of which it may be a view."""
    return t.untyped_storage().data_ptr()
