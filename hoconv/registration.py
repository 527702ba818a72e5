"""Functions that every operator uses: they define its ops, register gradients and autocast, check
dtypes and devices, and describe the layout of a gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._library.autograd import supports_tensorlist
from torch._library.utils import is_tensorlist_like_type
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._pytree import (
    tree_any_only,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

from hoconv import jit
from hoconv.declaration import Implementation

# Implementation -> the compiled library that has its kernels.
LIBRARIES = {"cpp": "cpu", "cuda": "cuda"}


def compiled(
    impl: str, function: Callable[..., Tensor], devices: tuple[str, ...]
) -> Implementation:
    """The declaration of an implementation whose kernels are in a compiled library."""
    library = LIBRARIES[impl]
    return Implementation(
        function,
        devices,
        load=functools.partial(jit.load, library),
        obstacle=functools.partial(jit.obstacle, library),
    )


def define(
    library: torch.library.Library, name: str, impl: str, schema: str, fake: Callable[..., Any]
) -> torch._ops.OpOverload:
    """Defines an implementation's overload of an op, and returns it.

    Its first call loads kernels that come with a compiled library, so that a process which imported
    the definition alone runs a saved program.

    Args:
        fake: what it returns, called with tensors without data.
    """
    overload = f"{name}.{impl}"
    library.define(overload + schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{library.ns}::{overload}", fake)
    op = getattr(getattr(getattr(torch.ops, library.ns), name), impl)

    def load_and_call(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if reason := jit.load(LIBRARIES[impl]):
            raise RuntimeError(f"{op.name()} cannot run here: {reason}")
        key = keyset.highestPriorityTypeId()
        if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key.name):
            raise RuntimeError(f"{op.name()} has no kernel for {key.name} tensors")
        return op.redispatch(keyset, *args)

    if impl in LIBRARIES:  # of lower precedence than the kernels that it loads
        library.impl(overload, load_and_call, "CompositeExplicitAutograd", with_keyset=True)
    register_vmap(library, op)
    return op


def register_vmap(library: torch.library.Library, op: torch._ops.OpOverload) -> None:
    """Lets torch.func.vmap call an op once for each example.

    PyTorch's own loop refuses arguments that are lists, and a batch without examples. For such a
    batch this calls the op with zeros, and returns none of the results but their shapes.
    """

    def call_one_by_one(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        found = [
            tree_flatten(op(*_example(args, in_dims, i, info.batch_size)))
            for i in range(max(info.batch_size, 1))
        ]
        each = zip(*(results for results, _ in found), strict=True)
        stacked = [torch.stack(results)[: info.batch_size] for results in each]
        outputs = tree_unflatten(stacked, found[0][1])
        return outputs, tree_map(lambda _: 0, outputs)

    torch.library.register_vmap(op, call_one_by_one, lib=library)


def _example(value: Any, dim: Any, i: int, count: int) -> Any:
    """The i-th of `count` examples that a value holds along a dimension; zeros where none are."""
    if dim is None:
        return value
    if isinstance(value, list | tuple):
        return [_example(v, d, i, count) for v, d in zip(value, dim, strict=True)]
    if count == 0:
        return value.new_zeros(value.shape[:dim] + value.shape[dim + 1 :])
    return value.select(dim, i)


def register_gradient(
    library: torch.library.Library,
    op: torch._ops.OpOverload,
    differentiate: Callable[..., Any],
    save: Callable[..., None],
    with_tangents: Callable[..., Any] | None = None,
) -> None:
    """Registers an op's gradient for reverse mode, forward mode and the transforms of torch.func.

    ``torch.library.register_autograd`` drops tangents in silence and refuses ``torch.func.grad``.

    Args:
        differentiate: ``differentiate(ctx, *grads)`` returns a gradient, or None, an argument.
        save: ``save(ctx, inputs, output)``, called after the op.
        with_tangents: the op as a composition of ops that carry tangents, called with its
            arguments where one of them has a tangent. Without it such a call is refused.
    """

    def run(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    # When an op reaches autograd, the dispatcher has chosen the level of torch.func already.
    class Gradient(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            *inputs, keyset = args
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):  # of other levels
                output = run(keyset, *inputs)
            save(ctx, tuple(inputs), output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            with _without_autocast_of(grads):
                return *differentiate(ctx, *grads), None

    types = [a.type for a in (*op._schema.arguments, *op._schema.returns)]
    of_lists = any(map(is_tensorlist_like_type, types))
    function: Any = supports_tensorlist(Gradient) if of_lists else Gradient

    def call(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if tree_any_only(Tensor, has_tangent, args):
            if with_tangents is None:
                raise NotImplementedError(
                    f"{op.name()} has no forward-mode derivative; use reverse mode (backward, "
                    f"torch.func.vjp, torch.func.jacrev), or impl='reference', which has both"
                )
            with _without_autocast_of(args):
                return with_tangents(*args)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return run(keyset, *args)
        with enable_single_level_autograd_function():
            return function.apply(*args, keyset)

    name = op.name().removeprefix(f"{op.namespace}::")
    library.impl(name, call, "Autograd", with_keyset=True)


def _without_autocast_of(args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Derivatives are computed in the dtypes of what was saved, which autocast may have cast."""
    devices = (t.device.type for t in tree_leaves(args) if isinstance(t, Tensor))
    return without_autocast(next(devices, "cpu"))


def has_tangent(t: Tensor) -> bool:
    """Whether forward mode differentiates by a tensor, at the innermost level of torch.func."""
    return forward_ad.unpack_dual(t).tangent is not None


def gradients(
    function: Callable[..., Sequence[Tensor]],
    args: Sequence[Any],
    needed: Sequence[bool],
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of ``function(*args)`` by the arguments that need one; None for the others.

    Each argument counts as independent, as the tensors that a gradient saved must: one may have
    been computed from another. Differentiable in turn where grad mode is on.

    Args:
        function: returns several tensors, made of ops that can be differentiated.
        needed: of each argument, whether its gradient is wanted.
        cotangents: the gradient of each of the tensors, or None.
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


def autocast(device_type: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as autocast casts the inputs of a convolution: float64 stays."""
    if not autocasts(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for tensors of such a device; ``"meta"``, say, has none."""
    return _has_autocast(device_type) and torch.is_autocast_enabled(device_type)


def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


# torch.compile of torch 2.11 cannot trace it.
_has_autocast._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Products within are computed in the dtype of their operands."""
    return torch.autocast(device_type, enabled=False) if autocasts(device_type) else nullcontext()


def register_autocast(library: torch.library.Library, op: torch._ops.OpOverload) -> None:
    """Lets autocast cast the tensors of an op, on CPU and GPU.

    `torch.library.register_autocast` knows one fixed dtype; this takes autocast's own.
    """
    for device_type in ("cpu", "cuda"):
        _register_autocast(library, op, device_type)


def _register_autocast(
    library: torch.library.Library, op: torch._ops.OpOverload, device_type: str
) -> None:
    key = f"Autocast{device_type.upper()}"

    def cast(keyset: Any, *args: Any) -> Tensor:
        args = tree_map_only(Tensor, lambda t: autocast(device_type, t)[0], args)
        excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(*args)

    library.impl(op.name().removeprefix(f"{op.namespace}::"), cast, key, with_keyset=True)


def check_dtypes(x: Tensor, dtypes: Collection[torch.dtype], **others: Tensor | None) -> None:
    """Checks that x has one of these dtypes, and that the others have x's dtype and device.

    Raises:
        TypeError: a dtype that is not supported, or that is not x's.
        ValueError: a device that is not x's.
    """
    if x.dtype not in dtypes:
        names = ", ".join(map(str, dtypes))
        raise TypeError(f"x: expected one of {names}, got {x.dtype}; convert it with x.to(...)")
    for name, tensor in others.items():
        if tensor is not None and tensor.dtype != x.dtype:
            raise TypeError(f"{name}: expected the dtype of x, {x.dtype}, got {tensor.dtype}")
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name}: expected the device of x, {x.device}, got {tensor.device}")


def gradient_layout(t: Tensor) -> tuple[list[int], list[int]]:
    """Size and stride of a tensor's gradient: those of the tensor, so that what generated it gets
    it as it gave it; dense where the tensor is not (an expanded one, say)."""
    like = torch.empty_like(t, device="meta")
    return list(like.shape), list(like.stride())
