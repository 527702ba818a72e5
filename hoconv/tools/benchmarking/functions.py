"""The functions that ``hoconv benchmark`` times of an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hoconv.dispatch.declaration import Operator
from hoconv.dispatch.implementations import BrokenImplementationError, ImplementationError, choose

COMPILED = "torch.compile"


def timed_functions(
    operator: Operator, device_type: str
) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """Returns contender -> function, and implementation -> why it cannot run."""

    def public(impl: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: operator.function(*args, impl=impl, **kwargs)

    functions, unavailable = {"reference": public("reference")}, {}
    functions |= operator.benchmark.baselines
    functions[COMPILED] = torch.compile(public("reference"), dynamic=False, fullgraph=True)
    for impl in operator.implementations:
        try:
            choose(operator, impl, device_type)
        except ImplementationError as error:
            if not isinstance(error, BrokenImplementationError):  # each of its rows will say why
                unavailable[impl] = str(error)
                continue
        functions[impl] = public(impl)
    return functions, unavailable
