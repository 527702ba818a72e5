"""What a call of an operator gives, output and gradients, and how far it is from what it should.

An output is a tensor, or a pytree of tensors: a tuple or a dict, say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_structure,
)


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def differentiable(args: Iterable[Any]) -> list[Any]:
    """The arguments; floating-point tensors among them, with their strides, require a gradient."""
    return [a.detach().requires_grad_() if is_floating(a) else a for a in args]


def named(output: Any) -> dict[str, Tensor]:
    """The tensors of an output by name: ``output``; of several ``output[0]``, ``output['h']``."""
    return {f"output{keystr(path)}": t for path, t in tree_flatten_with_path(output)[0]}


def output_and_gradients(
    function: Callable[..., Any],
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
    cotangent: Any = None,
    rounded_to: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Calls a function, and differentiates it with respect to its floating-point arguments.

    Args:
        function: ``function(*args, **kwargs)`` returns a tensor or a pytree of tensors.
        args: those of floating point at the top level are differentiated.
        cotangent: the gradient of the output, in its structure; by default :func:`cotangent_of`.
        rounded_to: the dtype that the default is rounded to: where the result is compared with a
            call in that dtype, not the output's own.

    Returns:
        The tensors of the output, named as :func:`named` does, and ``gradient of argument <i>``.

    Raises:
        ValueError: the output has another structure than `cotangent`.
    """
    args = differentiable(args)
    output = function(*args, **kwargs)
    if cotangent is None:
        cotangent = cotangent_of(output, rounded_to)
    if (got := tree_structure(output)) != (expected := tree_structure(cotangent)):
        raise ValueError(f"output: expected the structure {expected}, got {got}")
    wanted = {i: a for i, a in enumerate(args) if is_floating(a)}
    results = {name: t.detach() for name, t in named(output).items()}
    pairs = zip(tree_leaves(output), tree_leaves(cotangent), strict=True)
    pairs = [(t, c.to(t)) for t, c in pairs if is_floating(t)]
    if not wanted or not pairs:
        return results
    gradients = torch.autograd.grad(
        [t for t, _ in pairs], [*wanted.values()], [c for _, c in pairs], materialize_grads=True
    )
    of_arguments = zip(wanted, gradients, strict=True)
    return results | {f"gradient of argument {i}": g for i, g in of_arguments}


def cotangent_of(output: Any, dtype: torch.dtype, seed: int = 1) -> Any:
    """A random gradient of an output: the same for the same seed, on every device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator, dtype=torch.float64).to(dtype).to(t)

    return tree_map(draw, output)


def on_cpu(values: Any, in_float64: bool) -> Any:
    """A pytree with its tensors on the CPU; those of floating point in float64, if asked for."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.detach().cpu()
        return value.double() if in_float64 and value.is_floating_point() else value

    return tree_map(convert, values)


def relative_error(result: Tensor, exact: Tensor) -> float:
    """``|result - exact| / |exact|``, Euclidean norms in float64; NaN where either has one.

    0 where they are equal, and infinite where only `exact` is all zeros.
    """
    error = (result.cpu().double() - exact.cpu().double()).norm()
    return 0.0 if error == 0 else (error / exact.cpu().double().norm()).item()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits: -0 is not 0, and NaN may be NaN."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))
