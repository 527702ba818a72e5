"""The calls and the findings of a trial."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hoconv.dispatch.declaration import Sample

# The name of a result that is wrong in a call of each kind.
WRONG = {
    "sample": "wrong result",
    "size": "wrong at another size",
    "form": "wrong with other strides",
    "special": "wrong for special values",
    "scale": "wrong for small values",
    "number": "wrong for another number",
    "usage": "wrong in a program",
    "more": "wrong in one of many calls",
    "threads": "wrong in threads",
    "many": "wrong after many calls",
    "timed": "wrong in a timed call",
}


class Ended(Exception):
    """Nothing more can be asked, or need be."""


@dataclass(frozen=True)
class Finding:
    """A fault: its name, the call that shows it, and the details."""

    name: str
    call: str
    detail: str


@dataclass(frozen=True)
class Asked:
    """A call: its kind, of those in `WRONG`, its dtype, and what is passed.

    Attributes:
        cotangent: the gradient of the output; None where no gradient is wanted.
        positions: of the arguments that are differentiated; None means all.
        seed: of PyTorch's random numbers, for a definition that may draw some.
        usage: the name of the program that makes the call, or empty.
        reused: whether its tensors are those of the call before, changed in place.
        growth: of the numbers of the arguments, from the sample that was given another size.
    """

    kind: str
    dtype: torch.dtype
    sample: Sample
    cotangent: Any = None
    positions: tuple[int, ...] | None = None
    seed: int | None = None
    usage: str = ""
    reused: bool = False
    growth: float = 1.0


@dataclass
class Record:
    """The findings, counts and errors of a trial.

    Attributes:
        calls, compared: how many there were, and how many of them were compared.
        errors: dtype -> ``output``, ``gradient`` and ``tolerance``, relative.
        more: how many calls were made of one sample, to find rare faults.
        operations: what was called, as the worker says.
    """

    findings: list[Finding] = field(default_factory=list)
    calls: int = 0
    compared: int = 0
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    more: int = 0
    operations: list[str] = field(default_factory=list)
