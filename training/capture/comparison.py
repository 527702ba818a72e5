"""Comparing what a captured step leaves with what an eager one does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from training.callbacks.values import tensors_of
from training.capture.frozen import heard
from training.capture.graph import StepGraph

# Where two captured steps differ, as with kernels that add in any order, the eager one may differ
# from them so many times as much.
NOISE_FACTOR = 16.0
Result = TypeVar("Result")
NO_MEMORY = "the GPU has no memory left to compare a captured step with an eager one"


def compare(
    graph: StepGraph, batch: Any, run_eagerly: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], str | None]:
    """Runs a step eagerly, which counts, and as its graph from the same state.

    Returns:
        What the eager step returns, and why the graph is not to be used, or None.
    """
    fit = graph.fit
    gradients, written = fit.gradients(), fit.state()
    # Of the gradients before the step only those count to which it adds: graphs share memory.
    state = [*written, *_present({*gradients, *graph.gradients_before})]
    memory = _Memory()
    before = memory.attempt(lambda: (copies(state), fit.gpu.random_state()))
    with fit.gpu.beside(), heard(fit.model) as logged:
        result = run_eagerly()
    gradients_after = fit.gradients()
    after = memory.attempt(lambda: (copies(state), fit.gpu.random_state()))
    tensors = [*written, *_present(gradients_after), *tensors_of(result), *logged]
    eager = memory.attempt(lambda: copies(tensors))

    def replay() -> list[Tensor]:
        """Runs the graph from the state before the step; returns what is to be as in `eager`."""
        assert before is not None
        fit.restore(state, *before, gradients)
        returned = graph.launch(batch)
        left = _present(fit.gradients())
        values = (each.value for each in graph.logged)
        return copies([*written, *left, *tensors_of(returned), *values])

    why = None
    error = memory.attempt(lambda: _difference(replay(), eager or []))
    # Processes agree in the same order, also where one of them has no memory left.
    if not fit.agree(error == 0):
        # Kernels may add in any order: then two replays differ, too.
        noise = memory.attempt(lambda: _difference(replay(), replay()))
        near = error is not None and noise is not None and error <= NOISE_FACTOR * noise
        if not fit.agree(near):
            why = NO_MEMORY if memory.lacks else (
                f"a captured step differs from an eager one by {error:.1g}, and from another "
                f"captured one by {noise:.1g}"
            )  # fmt: skip
    if after is not None and before is not None:  # else no replay has changed anything
        fit.restore(state, *after, gradients_after)
    return result, why


class _Memory:
    """Attempts what takes memory on the GPU.

    Attributes:
        lacks: whether an attempt found too little; later ones are not made.
    """

    lacks = False

    def attempt(self, function: Callable[[], Result]) -> Result | None:
        """What a function returns; None where there is too little memory."""
        if self.lacks:
            return None
        try:
            return function()
        except torch.OutOfMemoryError:
            self.lacks = True
            return None


def _present(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the largest difference of an element, relative to the largest of its tensor."""
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in expected]:
        return math.inf
    largest = 0.0
    for a, b in zip(found, expected, strict=True):
        same = (a == b) | ((a != a) & (b != b))  # or both are NaN
        if bool(same.all()):
            continue
        if not a.is_floating_point():
            return math.inf
        relative = (a.double() - b.double()).abs().max() / b.double().abs().max()
        if not relative.isfinite():
            return math.inf
        largest = max(largest, float(relative))
    return largest
