"""Programs that do more with a call than to read its results. Each usage makes a function of the
same arguments and the same output of a function; whatever computes the function right computes the
program right."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hoconv.tools.testing.comparison import is_floating

Function = Callable[..., Any]
_DENORMAL = 2.0**-1040  # of float64
_DENORMALS = "the treatment of denormal numbers"


def called_twice(function: Function) -> Function:
    """Adds the outputs of two calls, both made before either is differentiated."""

    def program(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        others = (0.75 * a + 0.25 if is_floating(a) else a for a in args)
        other = function(*others, **kwargs)
        return tree_map(lambda a, b: a + b if is_floating(a) else a, output, other)

    return program


def differentiated_again(function: Function) -> Function:
    """Differentiates the output, keeps the graph, and returns the output to be differentiated."""

    def program(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        _gradients(output, args, retain_graph=True)
        return output

    return program


def with_penalty(function: Function) -> Function:
    """Adds the mean squares of the gradients to the output, as a penalty of gradients does."""

    def program(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        found = [g for g in _gradients(output, args, create_graph=True) if g.numel()]
        # The node of once_differentiable, which raises in a backward pass; torch.autograd.grad with
        # respect to other tensors does not run it.
        if any(type(g.grad_fn).__name__ == "Error" for g in found):
            raise RuntimeError("it can be differentiated once")
        return _add(output, [g.square().mean() for g in found])

    return program


def used_elsewhere(function: Function) -> Function:
    """Adds another use of the arguments; they have gradients of an earlier batch, which must
    stay."""

    def program(*args: Any, **kwargs: Any) -> Any:
        leaves = [a for a in args if is_floating(a) and a.requires_grad]
        for a in leaves:
            a.grad = torch.ones_like(a)
        output = function(*args, **kwargs)
        if any(a.grad is None or not bool((a.grad == 1).all()) for a in leaves):
            raise RuntimeError("it changes the .grad of an argument")
        return _add(output, [1.5 * a.sum() for a in leaves])

    return program


def changed_in_place(function: Function) -> Function:
    """Changes the output in place before it is differentiated."""

    def program(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        return tree_map(lambda t: t.mul_(2) if is_floating(t) else t, output)

    return program


def in_a_process(function: Function) -> Function:
    """Looks whether settings and random numbers of the process stay what they were."""

    def program(*args: Any, **kwargs: Any) -> Any:
        _draw()  # so that seeding the same numbers again is a change
        before = _settings() | {_DENORMALS: True}  # an earlier call may have changed that
        output = function(*args, **kwargs)
        changed = [name for name, value in _settings().items() if value != before[name]]
        if changed:
            raise RuntimeError(f"it changes {changed[0]} of the process")
        return output

    return program


PENALTY = "with a penalty of its gradients"
_CHANGED = "with its output changed in place"
# Name -> usage. Two calls at once come first: after other usages a kernel may have room for two.
USAGES = {
    "called twice before it is differentiated": called_twice,
    _CHANGED: changed_in_place,
    PENALTY: with_penalty,
    "differentiated twice in one graph": differentiated_again,
    "with its arguments used elsewhere": used_elsewhere,
    "beside other work in its process": in_a_process,
}
# What a kernel may refuse with an error, but not compute wrong.
REFUSABLE = _CHANGED, PENALTY


def _gradients(output: Any, args: Sequence[Any], **options: bool) -> Sequence[Tensor]:
    """Returns the gradients of the sum of an output."""
    tensors = [t for t in tree_leaves(output) if is_floating(t) and t.requires_grad]
    leaves = [a for a in args if is_floating(a) and a.requires_grad]
    if not tensors:
        return []
    # As in any derivative of a derivative: once_differentiable refuses by them.
    grads = [torch.ones_like(t).requires_grad_() for t in tensors]
    return torch.autograd.grad(tensors, leaves, grads, materialize_grads=True, **options)


def _add(output: Any, numbers: Sequence[Tensor]) -> Any:
    """Adds numbers to every number of an output."""

    def add(t: Any) -> Any:
        return sum((n.to(t.dtype) for n in numbers), t) if is_floating(t) else t

    return tree_map(add, output)


def _draw() -> None:
    """Draws random numbers of each generator that a process has."""
    torch.rand(())
    random.random()
    if numpy := sys.modules.get("numpy"):
        numpy.random.random()


def _settings() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {
        "PyTorch's random numbers": torch.get_rng_state().tolist(),
        "Python's random numbers": random.getstate(),
        "NumPy's random numbers": numpy and pickle.dumps(numpy.random.get_state()),
        "the default dtype": torch.get_default_dtype(),
        "the number of threads": torch.get_num_threads(),
        "the precision of products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        _DENORMALS: bool(torch.tensor(_DENORMAL, dtype=torch.float64) * 2),
        "autograd's mode": torch.is_grad_enabled(),
    }
