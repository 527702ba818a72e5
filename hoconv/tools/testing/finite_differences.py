"""Compares gradients, and their gradients, with finite differences; says in a line where they
differ."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck, gradgradcheck
from torch.utils._pytree import tree_leaves

from hoconv.dispatch.declaration import Sample
from hoconv.tools.testing.comparison import differentiable
from hoconv.tools.testing.variants import Variant

_STEP = 1e-6  # to both sides, of values about 1
_CURES = {
    "gradient": "mend it, or declare surrogate_gradient=True if the definition's is no derivative "
    "either",
    "second gradient": "mend what differentiates the gradient, or declare first_order=True and "
    "let that be an error",
}


def disagreement(variant: Variant, sample: Sample, *, fast: bool, second: bool) -> str | None:
    """Compares the gradients of a call with finite differences.

    Args:
        sample: in float64, few elements.
        fast: whether to compare in random directions, not element by element.
        second: whether gradients of gradients are compared, too.

    Returns:
        A line with the call, the argument whose gradient is wrong, the largest difference and what
        to do; None if there is no difference.
    """
    copies = [a.clone() if isinstance(a, Tensor) else a for a in sample.args]
    arguments = differentiable(copies)

    def function(*args: Any) -> tuple[Tensor, ...]:
        return tuple(tree_leaves(variant.call(*args, **sample.kwargs)))

    what = "gradient"
    try:
        gradcheck(function, arguments, fast_mode=fast)
        what = "second gradient"
        if second:
            gradgradcheck(function, arguments, fast_mode=fast)
        return None
    except GradcheckError as error:
        said = next(iter(str(error).splitlines()), "")
    if "mismatch" in said:
        if what == "second gradient":
            function, arguments = _gradient_of(function, arguments)
        position, difference, size = _largest_difference(function, arguments)
        said = (
            f"{what} of {_name(variant, sample, position)}: it differs from finite differences by "
            f"up to {difference:.1e}, where they are up to {size:.1e}"
        )
    else:
        said = f"{what}: {said.rstrip('.')}"
    where = f"{variant.operator.name} {variant.impl} {variant.device}: {sample.name}"
    return f"{where}: {said}; {_CURES[what]}"


def _gradient_of(
    function: Callable[..., tuple[Tensor, ...]], arguments: Sequence[Any]
) -> tuple[Callable[..., tuple[Tensor, ...]], list[Any]]:
    """Returns the gradient as a function of the arguments and of the gradients of the outputs, and
    these arguments."""
    cotangents = [torch.randn_like(t).requires_grad_() for t in function(*arguments)]

    def gradient(*given: Any) -> tuple[Tensor, ...]:
        args, weights = given[: len(arguments)], given[len(arguments) :]
        return torch.autograd.grad(
            function(*args), _leaves(args), weights, create_graph=True, materialize_grads=True
        )

    return gradient, [*arguments, *cotangents]


def _largest_difference(
    function: Callable[..., tuple[Tensor, ...]], arguments: Sequence[Any]
) -> tuple[int, float, float]:
    """Differentiates a random sum of all outputs.

    Returns:
        The position of the argument with the largest difference between gradient and finite
        differences, this difference, and the largest magnitude of these finite differences.
    """
    weights = [torch.randn_like(t) for t in function(*arguments)]

    def weighted() -> Tensor:
        outputs = function(*arguments)
        return torch.stack([(t * w).sum() for t, w in zip(outputs, weights, strict=True)]).sum()

    gradients = torch.autograd.grad(weighted(), _leaves(arguments), materialize_grads=True)
    found = []
    for leaf, gradient in zip(_leaves(arguments), gradients, strict=True):
        values, slopes = leaf.detach(), torch.zeros_like(gradient)
        for index in itertools.product(*map(range, leaf.shape)):
            middle, sums = values[index].item(), []
            for step in (_STEP, -_STEP):
                values[index] = middle + step
                sums.append(weighted().item())
            values[index] = middle
            slopes[index] = (sums[0] - sums[1]) / (2 * _STEP)
        position = next(i for i, a in enumerate(arguments) if a is leaf)
        if leaf.numel():
            difference = (gradient - slopes).abs().nan_to_num(torch.inf).max().item()
            found.append((difference, position, slopes.abs().max().item()))
    difference, position, size = max(found)
    return position, difference, size


def _leaves(arguments: Sequence[Any]) -> list[Tensor]:
    return [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]


def _name(variant: Variant, sample: Sample, position: int) -> str:
    if position >= len(sample.args):
        return "the gradient of the output"
    parameters = [*inspect.signature(variant.operator.function).parameters.values()]
    named = (
        position < len(parameters) and parameters[position].kind != inspect.Parameter.VAR_POSITIONAL
    )
    return f"argument {position}" + (f" ({parameters[position].name})" if named else "")
