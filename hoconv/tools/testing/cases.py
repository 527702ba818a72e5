"""The expected results of an operator: those of its reference for each of its samples."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hoconv.dispatch.declaration import Operator, Sample
from hoconv.tools.testing.call_forms import Form, forms
from hoconv.tools.testing.comparison import named, on_cpu, output_and_gradients
from hoconv.tools.testing.variations import of_another_size

_TRIES = 4  # for each case of another size
_FLOAT64 = (
    "; results are compared with the definition in float64, which it must take although no "
    "tolerance is declared, unless bitwise=True is"
)


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
        cure = (
            _FLOAT64 if "float64" in str(error) and torch.float64 not in operator.tolerances else ""
        )
        raise BrokenDefinitionError(f"{what}: {type(error).__name__}: {error}{cure}") from error
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


def make_cases_of_other_sizes(
    operator: Operator, device: str, samples: Sequence[Sample], count: int, draws: random.Random
) -> list[Case]:
    """Computes so many cases, or fewer, with a size that the sample has not. Whether there is such
    a call, the reference says."""
    cases: list[Case] = []
    for _ in range(_TRIES * count if samples else 0):
        sample = of_another_size(draws.choice(samples), draws)
        if len(cases) == count:
            break
        if sample is not None:
            with suppress(Exception):  # the reference's, of a size that it refuses
                cases.append(make_case(operator, device, sample, with_forms=False))
    return cases


def address(t: Tensor) -> int:
    """Returns where the memory of a tensor begins, of which it may be a view."""
    return t.untyped_storage().data_ptr()
