"""Computes the output and gradients of a call, and compares them with those of another call.

An output is a tensor, or a pytree of tensors: a tuple or a dict, say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import starmap
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

_PART = 1 << 24  # elements of large tensors that are in float64 at once


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def differentiable(args: Iterable[Any], positions: Collection[int] | None = None) -> list[Any]:
    """Detaches floating-point tensors, which keep their strides, and makes them require a gradient:
    all, or those at some positions.

    Returns:
        All arguments, those that are no such tensors unchanged.
    """
    return [
        a.detach().requires_grad_(positions is None or i in positions) if is_floating(a) else a
        for i, a in enumerate(args)
    ]


def named(output: Any) -> dict[str, Tensor]:
    """Names the tensors of an output: ``output``; of several, ``output[0]`` or ``output['h']``."""
    return {f"output{keystr(path)}": t for path, t in tree_flatten_with_path(output)[0]}


def output_and_gradients(
    function: Callable[..., Any],
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
    cotangent: Any = None,
    rounded_to: torch.dtype = torch.float64,
    positions: Collection[int] | None = None,
) -> dict[str, Tensor]:
    """Calls a function, and differentiates it with respect to its floating-point arguments.

    Args:
        function: ``function(*args, **kwargs)`` returns a tensor or a pytree of tensors.
        args: the arguments; floating-point tensors among them are differentiated, those inside a
            list or another container are not.
        cotangent: the gradient of the output, in its structure; by default :func:`cotangent_of`.
        rounded_to: the dtype to which the default cotangent is rounded, so that it has the same
            values for a call in this dtype and for one in a wider dtype.
        positions: of the arguments that are differentiated; by default all that can be.

    Returns:
        The tensors of the output, named as :func:`named` does, and ``gradient of argument <i>``.

    Raises:
        ValueError: the output has another structure than `cotangent`.
    """
    args = differentiable(args, positions)
    output = function(*args, **kwargs)
    if cotangent is None:
        cotangent = cotangent_of(output, rounded_to)
    if (got := tree_structure(output)) != (expected := tree_structure(cotangent)):
        raise ValueError(f"output: expected the structure {expected}, got {got}")
    wanted = {i: a for i, a in enumerate(args) if is_floating(a) and a.requires_grad}
    results = {name: t.detach() for name, t in named(output).items()}
    pairs = zip(tree_leaves(output), tree_leaves(cotangent), strict=True)
    pairs = [(t, c.to(t)) for t, c in pairs if is_floating(t)]
    if not wanted or not pairs:
        return results
    # Of several outputs, some may depend on none of these arguments.
    pairs = [pair for pair in pairs if pair[0].requires_grad] or pairs
    if pairs[0][0].requires_grad or positions is None:
        gradients = torch.autograd.grad(
            [t for t, _ in pairs], [*wanted.values()], [c for _, c in pairs], materialize_grads=True
        )
    else:  # the output does not depend on these arguments
        gradients = map(torch.zeros_like, wanted.values())
    of_arguments = zip(wanted, gradients, strict=True)
    return results | {gradient_name(i): g for i, g in of_arguments}


def gradient_name(position: int) -> str:
    """Names the gradient of an argument, as in the results of :func:`output_and_gradients`."""
    return f"gradient of argument {position}"


def cotangent_of(output: Any, dtype: torch.dtype, seed: int = 1) -> Any:
    """Draws a random gradient of an output: the same for the same seed, on every device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator, dtype=torch.float64).to(dtype).to(t)

    return tree_map(draw, output)


def on_cpu(values: Any, in_float64: bool) -> Any:
    """Copies a pytree's tensors to the CPU, and floating-point ones to float64 if asked for."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.detach().cpu()
        return value.double() if in_float64 and value.is_floating_point() else value

    return tree_map(convert, values)


def relative_error(
    result: Tensor, exact: Tensor, typical: Tensor | None = None, order: float = 2
) -> float:
    """Returns ``|result - exact| / |exact|``, Euclidean norms in float64.

    It is NaN if either has a NaN, 0 if they are equal, but for the sign of a zero, and infinite if
    only `exact` is all zeros. An infinity is right where `exact` has it, and counts for neither
    norm there. Either may be sparse. It is computed where `exact` is.

    Args:
        typical: takes the place of `exact` in the denominator where it is larger: errors may cancel
            out less than what they are errors of.
        order: of the norms; ``math.inf`` for the largest magnitude of an element.
    """
    if not exact.numel():
        return 0.0

    def parts_of(t: Tensor) -> Iterator[Tensor]:
        return (part.to(exact.device).double() for part in t.reshape(-1).split(_PART))

    def norm(parts: Iterable[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(part, order) for part in parts]
        return torch.linalg.vector_norm(torch.stack(norms), order)

    exact = exact.to_dense()
    same_shape = torch.broadcast_tensors(result.to(exact.device).to_dense(), exact)
    pairs = zip(*map(parts_of, same_shape), strict=True)
    error, size = norm(starmap(difference, pairs)), norm(map(without_infinities, parts_of(exact)))
    if typical is not None:
        size = torch.maximum(size, norm(map(without_infinities, parts_of(typical))))
    return 0.0 if error == 0 else (error / size).item()


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Returns a - b, zero where both are the same infinity."""
    return torch.where(a == b, 0, a - b)


def without_infinities(t: Tensor) -> Tensor:
    """Returns a tensor with zeros in place of infinities: no error is small beside these."""
    return torch.where(t.isinf(), 0, t)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors have the same shape, dtype and bits: -0 is not 0, and NaN may be
    NaN. They are compared where b is."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    a = a.to(b.device)
    return torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))
