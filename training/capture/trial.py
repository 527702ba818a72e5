"""Comparing what a captured step leaves with what an eager one does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from training.capture.fit import copy_all, set_gradients
from training.capture.graph import StepGraph
from training.lightning_loop import recorded

# Where two captured steps differ, as with kernels that add in any order, the eager one may differ
# from them so many times as much.
NOISE_FACTOR = 16.0
Result = TypeVar("Result")
NO_MEMORY = "the GPU has no memory left to compare a captured step with an eager one"


def compare(
    graph: StepGraph, tensors: list[Tensor], run_eagerly: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], str | None]:
    """Runs a step eagerly, which counts, and as its graph from the same state.

    Args:
        tensors: of the batch.

    Returns:
        What the eager step returns, and why the graph is not to be used, or None.
    """
    fit = graph.fit
    gradients = [p.grad for p in fit.parameters]
    written = fit.state()
    # Of the gradients before the step only those count to which it adds: graphs share memory.
    kept = {id(t): t for t in [*gradients, *graph.gradients_before] if t is not None}
    state = [*written.values(), *kept.values()]
    before = _attempt(lambda: (_copies(state), fit.gpu.random_state()))
    with fit.gpu.beside(), recorded(fit.model, also_log=True) as logged:
        result = run_eagerly()
    gradients_after = [p.grad for p in fit.parameters]
    after = _attempt(lambda: (_copies(state), fit.gpu.random_state()))

    def left(result: dict[str, Any], logged: list[Any]) -> dict[str, Tensor]:
        """Returns copies of all that a step has written, by name."""
        found = dict(written)
        names = {id(p): name for name, p in fit.model.named_parameters()}
        for p in fit.parameters:
            if p.grad is not None:
                found[f"the gradient of {names.get(id(p), 'a parameter')}"] = p.grad
        found |= {f"{name} (logged)": torch.as_tensor(value) for name, value, _ in logged}
        found |= {f"{name} (returned)": t for name, v in result.items()
                  for t in tree_leaves(v) if isinstance(t, Tensor)}  # fmt: skip
        return dict(zip(found, _copies([*found.values()])))

    def restore(values: tuple[list[Tensor], Tensor], gradients: list[Tensor | None]) -> None:
        # Only what has changed: the rest may be memory that cannot be written to.
        pairs = [pair for pair in zip(state, values[0]) if not torch.equal(*pair)]
        if pairs:
            copy_all([t for t, _ in pairs], [value for _, value in pairs])
        fit.gpu.set_random_state(values[1])
        set_gradients(fit.parameters, gradients)

    def replay() -> dict[str, Tensor]:
        assert before is not None
        restore(before, gradients)
        graph.launch(tensors)
        return left(graph.result, graph.logged)

    why = None
    with torch.no_grad():
        eager = _attempt(lambda: left(result, logged))
        whole = before is not None and after is not None and eager is not None
        found = _attempt(lambda: _difference(replay(), eager or {})) if whole else None
        # Processes agree in the same order, also where one of them has no memory left.
        if not fit.agree(found is not None and found[0] == 0):
            # Kernels may add in any order: then two replays differ, too.
            noise = found and _attempt(lambda: _difference(replay(), replay()))
            near = found and noise and found[0] <= NOISE_FACTOR * noise[0]
            if not fit.agree(bool(near)):
                why = NO_MEMORY
                if found and noise:
                    why = (
                        f"a captured step differs from an eager one by {found[0]:.1g} in "
                        f"{found[1]}, and from another captured one by {noise[0]:.1g}"
                    )
        if before is not None and after is not None:  # else no replay has changed anything
            restore(after, gradients_after)
    graph.replays, graph.compared = 0, (fit.trainer.global_step, time.time())
    return result, why


def _attempt(function: Callable[[], Result]) -> Result | None:
    """Returns what a function returns; None where there is too little memory on the GPU."""
    try:
        return function()
    except torch.OutOfMemoryError:
        return None


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Returns the largest difference of an element, relative to the largest of its tensor, and the
    name of that; infinity for another shape, or other integers."""
    names = dict.fromkeys([*found, *expected])
    return max(((_error(found.get(n), expected.get(n)), n) for n in names), default=(0.0, ""))


def _error(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None or a.shape != b.shape:
        return math.inf
    same = (a == b) | ((a != a) & (b != b))  # or both are NaN
    if bool(same.all()):
        return 0.0
    if not a.is_floating_point():
        return math.inf
    relative = (a.double() - b.double()).abs().max() / b.double().abs().max()
    return float(relative) if relative.isfinite() else math.inf
