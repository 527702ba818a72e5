"""Verifying what is timed: new values before every call, and results of some calls compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hoconv.dispatch.declaration import Operator, Sample
from hoconv.tools.benchmarking.measurement import (
    OUT_OF_MEMORY,
    Contender,
    Timed,
    failure,
    time_apart,
)
from hoconv.tools.testing.comparison import difference, is_floating, without_infinities

METHOD = (
    " Before every turn the values of floating-point arguments that are not expanded are moved by "
    "a random number of elements. The output and gradients of the first turn, and of others chosen "
    "at random, are compared with those of the reference in the same dtype."
)
# The share of the timed calls whose results are compared, in addition to the first: a contender
# does not know which.
_COMPARED = 1 / 16
# Times the tolerance: both results may be wrong by one.
_TWO_ERRORS = 2


class Verified:
    """Times a turn as `time_apart` does, of values that are new in every turn; compares the output
    and the gradients of some turns with the reference's.

    Attributes:
        compared: contender -> how many of its turns were compared.

    Raises, when it is called:
        RuntimeError: a result is wrong.
    """

    def __init__(self, operator: Operator, sample: Sample, dtype: torch.dtype) -> None:
        def define(*args: Any, **kwargs: Any) -> Any:
            return operator.function(*args, impl="reference", **kwargs)

        self.reference = Contender("reference", define, sample)
        self.tolerance = _TWO_ERRORS * operator.tolerances[dtype]
        self.compared: dict[str, int] = {}

    def __call__(self, contender: Contender, timed: Timed) -> dict[str, float]:
        results: list[Any] = []

        def keeping(call: Callable[[], Any]) -> tuple[Any, float]:
            result, milliseconds = timed(call)
            results.append(result)
            return result, milliseconds

        for leaf in contender.leaves:
            _roll(leaf)
        times = time_apart(contender, keeping)
        if contender.name not in self.compared or random.random() < _COMPARED:
            self._compare(contender, results)
        return times

    def _compare(self, contender: Contender, results: list[Any]) -> None:
        exact: list[Any] = []
        self.reference.grads = contender.grads
        reason = failure(lambda: exact.extend(self.reference.both()))
        self.compared.setdefault(contender.name, 0)
        if reason == OUT_OF_MEMORY:
            return
        if reason:
            raise RuntimeError(f"the reference failed: {reason}")
        for what, got, expected in zip(("output", "gradient"), results, exact, strict=True):
            for t, other in zip(tree_leaves(got), tree_leaves(expected), strict=True):
                error = _error(t, other) if is_floating(t) else 0.0
                if not error <= self.tolerance:
                    raise RuntimeError(f"wrong: {what}: error {error:.1e} in a timed call")
        self.compared[contender.name] += 1


def _roll(t: Tensor) -> None:
    """Moves the values of a tensor, so that they are new in their places; not of one that is
    expanded, whose places share values."""
    if t.numel() and all(t.stride()):
        flat = t.detach().reshape(-1)
        t.detach().copy_(flat.roll(random.randrange(1, 1 + t.numel())).view(t.shape))


def _error(result: Tensor, exact: Tensor) -> float:
    """Returns ``|result - exact| / |exact|``, computed on the tensors' device."""
    result, exact = result.detach().double(), exact.detach().double()
    error = torch.linalg.vector_norm(difference(result, exact))
    size = torch.linalg.vector_norm(without_infinities(exact))
    return 0.0 if error == 0 else (error / size).item()
