"""The expected results of an operator: those of its reference for each of its samples."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hoconv.dispatch.declaration import Operator, Sample
from hoconv.tools.testing.call_forms import Form, forms
from hoconv.tools.testing.comparison import named, on_cpu, output_and_gradients


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
    """

    sample: Sample
    cotangent: Any
    dtypes: dict[str, torch.dtype]
    expected: dict[str, Tensor]
    forms: list[tuple[Form, dict[str, Tensor]]]


def make_cases(operator: Operator, device: str, dtype: torch.dtype) -> list[Case]:
    """Computes the cases of an operator with new random values.

    Raises:
        BrokenDefinitionError: the samples or the reference raise an error.
    """
    cases, what = [], "samples"
    try:
        for sample in operator.samples(torch.device(device), dtype):
            what = sample.name
            cases.append(_make_case(operator, device, sample))
            what = f"the sample after {sample.name}"
    except Exception as error:  # the other operators are still checked
        raise BrokenDefinitionError(f"{what}: {type(error).__name__}: {error}") from error
    return cases


def _make_case(operator: Operator, device: str, sample: Sample) -> Case:
    """Computes a case on the CPU, independently of the device that is checked."""
    reference = functools.partial(operator.function, impl="reference")
    call = sample.args, dict(sample.kwargs)
    args, kwargs = on_cpu(call, in_float64=False)
    with torch.no_grad():
        like = reference(*args, **kwargs)
    cotangent = tree_map(lambda t: torch.randn(t.shape, dtype=torch.float64).to(t.dtype), like)
    dtypes = {name: t.dtype for name, t in named(like).items()}
    args, kwargs = on_cpu(call, in_float64=not operator.bitwise)

    def expect(cotangent: Any) -> dict[str, Tensor]:
        return output_and_gradients(reference, args, kwargs, cotangent)

    expected = expect(cotangent)
    on_device = tree_map(lambda t: t.to(device), cotangent)
    others = [
        (form, form.of(expected if form.same_values else expect(form.cotangent)))
        for form in forms(sample, on_device)
    ]
    return Case(sample, on_device, dtypes, expected, others)
