"""Gradients of ops: in reverse and forward mode, and of every order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import Function, forward_ad
from torch.autograd.function import _SingleLevelFunction

from hoconv.dispatch.registration.batches import call_one_by_one
from hoconv.dispatch.registration.casts import register_autocast, without_autocast
from hoconv.dispatch.registration.eager import Op, flatten


def register_gradient(
    library: torch.library.Library,
    op: Op,
    differentiate: Callable[..., Any],
    save: Callable[..., None],
    with_tangents: Callable[..., Any] | None = None,
) -> None:
    """Registers an op's gradient for reverse mode, forward mode and the transforms of torch.func.

    ``torch.library.register_autograd`` drops tangents in silence and refuses ``torch.func.grad``.

    Args:
        differentiate: ``differentiate(ctx, *grads)`` returns the gradient of each argument, or
            None; of a single argument alone, or in a tuple.
        save: ``save(ctx, inputs, output)``, called after the op, saves what `differentiate` needs.
        with_tangents: computes the op from ops that propagate tangents; called with the op's
            arguments where one of them has a tangent. Without it such a call is refused.
    """

    overload = op.overload

    # Of a single level: the dispatcher chose the level of torch.func before it called this.
    class Gradient(_SingleLevelFunction):
        apply: Callable[..., Any]  # as PyTorch defines it
        # Which PyTorch gives to functions of every level alone; compiled autograd asks for it.
        _compiled_autograd_key = staticmethod(Function._compiled_autograd_key)

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            inputs, run = args[-2:]  # before them, the same tensors one by one, for autograd
            with torch._C._AutoDispatchBelowAutograd():
                output = run(*inputs)
            save(ctx, inputs, output)
            ctx.count = len(args) - 2
            return tuple(output) if returns_list else output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            with _without_autocast_of(grads):
                found = call_one_by_one(functools.partial(compute, ctx), grads)
            if len(found) < ctx.count:  # PyTorch would count two more, of what is passed beside
                names = ", ".join(each.name for each in overload._schema.arguments[: op.tensors])
                raise ValueError(
                    f"{overload.name()}: expected {ctx.count} gradients, of {names}; got "
                    f"{len(found)}"
                )
            return *found[: ctx.count], None, None

    def compute(ctx: Any, *grads: Any) -> Sequence[Any]:
        found = differentiate(ctx, *grads)
        found = found if isinstance(found, list | tuple) else (found,)
        return flatten(found) if op.takes_lists else found

    returns_list = str(overload._schema.returns[0].type) == "List[Tensor]"

    def gradient(args: tuple[Any, ...], run: Callable[..., Any]) -> Any:
        tensors = flatten(args) if op.takes_lists else args[: op.tensors]
        found = Gradient.apply(*tensors, args, run)
        return list(found) if returns_list else found

    op.gradient = gradient

    def call(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        def run(*args: Any) -> Any:
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

        def run_at_other_levels(*args: Any) -> Any:
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                return run(*args)

        if forward_ad._current_level >= 0 and any(map(has_tangent, _find_tensors(args))):
            if with_tangents is None:
                raise NotImplementedError(
                    f"{overload.name()} has no forward-mode derivative; use reverse mode "
                    f"(backward, torch.func.vjp, torch.func.jacrev), or impl='reference', which "
                    f"has both"
                )
            with _without_autocast_of(args):
                return with_tangents(*args)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            with torch._C._AutoDispatchBelowAutograd():
                return run(*args)
        with enable_single_level_autograd_function():
            return gradient(args, run_at_other_levels)

    name = overload.name().removeprefix(f"{overload.namespace}::")
    library.impl(name, call, "Autograd", with_keyset=True)


def register_layer(
    library: torch.library.Library,
    forward: Op,
    backward: Op,
    save: Callable[..., None],
    differentiate: Callable[..., Any],
    composed_forward: Callable[..., Any],
    composed_backward: Callable[..., Any],
) -> None:
    """Registers derivatives of every order, and autocast, of the two ops of a layer.

    Args:
        forward, backward: the layer, and the op of its gradients, whose tensors are its first
            arguments.
        save, differentiate: the gradient of `forward`, as :func:`register_gradient` takes it.
        composed_forward, composed_backward: compute what these ops compute, from their arguments,
            by ops that can be differentiated any number of times and in forward mode.
    """
    tensors = backward.tensors

    def save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options = inputs[tensors:]
        ctx.save_for_backward(*inputs[:tensors])
        ctx.set_materialize_grads(False)

    def differentiate_backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        args = *ctx.saved_tensors, *ctx.options
        return (*gradients(composed_backward, args, ctx.needs_input_grad[: len(args)], cotangents),)

    register_gradient(library, forward, differentiate, save, composed_forward)
    register_gradient(library, backward, differentiate_backward, save_backward, composed_backward)
    register_autocast(library, forward)


def _without_autocast_of(args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Returns a context without autocast, for the device of these arguments.

    A derivative is computed in the dtypes of the saved tensors, which autocast may have cast.
    """
    devices = (t.device.type for t in _find_tensors(args))
    return without_autocast(next(devices, "cpu"))


def _find_tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    return (each for each in flatten(args) if isinstance(each, Tensor))


def has_tangent(t: Tensor) -> bool:
    """Returns whether a tensor has a forward-mode tangent at the innermost level of torch.func."""
    return forward_ad.unpack_dual(t).tangent is not None


def gradients(
    function: Callable[..., Sequence[Tensor]],
    args: Sequence[Any],
    needed: Sequence[bool],
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Computes the gradient of ``function(*args)`` for each argument that needs one.

    Each argument counts as an independent variable, although one saved tensor may have been
    computed from another. Where grad mode is on, the gradients can be differentiated again.

    Args:
        function: computes several tensors by ops that can be differentiated.
        needed: whether each argument needs a gradient.
        cotangents: the gradient of each of these tensors, or None.

    Returns:
        A gradient for each argument; None for those that need none.
    """
    where = [i for i, need in enumerate(needed) if need]
    found: list[Tensor | None] = [None] * len(args)
    if not where or all(cotangent is None for cotangent in cotangents):
        return found

    def of_needed(*tensors: Tensor) -> tuple[Tensor, ...]:
        values = list(args)
        for i, tensor in zip(where, tensors, strict=True):
            values[i] = tensor
        pairs = zip(function(*values), cotangents, strict=True)
        return tuple(result for result, cotangent in pairs if cotangent is not None)

    pull_back = torch.func.vjp(of_needed, *(args[i] for i in where))[1]
    pulled = pull_back(tuple(cotangent for cotangent in cotangents if cotangent is not None))
    for i, gradient in zip(where, pulled, strict=True):
        found[i] = gradient
    return found


def gradient_layout(t: Tensor) -> tuple[list[int], list[int]]:
    """Returns the size and stride of a tensor's gradient.

    They are the tensor's own, so that the layer that generated the tensor gets a gradient of the
    same layout. A tensor that is not dense, an expanded one, say, has a dense gradient.
    """
    like = t if t.is_contiguous() else torch.empty_like(t, device="meta")
    return list(like.shape), list(like.stride())
