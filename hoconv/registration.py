"""Functions that every operator uses: they define its ops, register gradients and autocast, check
dtypes and devices, and describe the layout of a gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._library.utils import is_tensor_like_type, is_tensorlist_like_type
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.nn import Parameter
from torch.utils._pytree import (
    tree_any_only,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

from hoconv.declaration import Implementation
from hoconv.jit import CSRC, Library


def kernels(folder: str) -> dict[str, Library]:
    """Returns the libraries of hoconv's own kernels in a folder of csrc/, by implementation."""
    name, root = folder.replace("/", "_"), CSRC / folder

    def library(device: Literal["cpu", "cuda"], *patterns: str) -> Library:
        found = sorted(path for pattern in patterns for path in root.glob(pattern))
        # A folder without sources is an error on use, not on import.
        return Library(name, found or [root], device, include=[CSRC])

    return {
        "cpp": library("cpu", "cpu/*.cpp", "aten/*.cpp"),
        "cuda": library("cuda", "cuda/**/*.cu"),
    }


def compiled(
    function: Callable[..., Any], devices: tuple[str, ...], *libraries: Library
) -> Implementation:
    """Returns the declaration of an implementation that calls compiled code.

    Args:
        function, devices: as of the implementation.
        libraries: what it calls.
    """

    def first(reasons: Iterable[str | None]) -> str | None:
        return next(filter(None, reasons), None)

    return Implementation(
        function,
        devices,
        load=lambda: first(library.load() for library in libraries),
        obstacle=lambda: first(library.obstacle() for library in libraries),
        libraries=libraries,
    )


class Op:
    """One op of torch.library, called as its overload is, only sooner.

    An eager call needs autograd, where a gradient is wanted, and the kernel; the dispatcher would
    go through Python and back between the two, which takes longer than the rest of a small call.
    All other calls, those of programs and of torch.compile among them, go through the dispatcher.

    Attributes:
        overload: the op itself.
        kernel: of an op in Python, what computes it for tensors of PyTorch's own classes.
        takes_lists: whether an argument is a list of tensors.
        tensors: if none is, how many arguments there are up to the last tensor.
        gradient: calls the op, given its arguments and what runs it, such that autograd records it;
            set by :func:`register_gradient`.
    """

    def __init__(
        self, overload: torch._ops.OpOverload, kernel: Callable[..., Any] | None = None
    ) -> None:
        self.overload = overload
        self.kernel = kernel
        arguments = overload._schema.arguments
        self.takes_lists = any(is_tensorlist_like_type(a.type) for a in arguments)
        at = [i for i, a in enumerate(arguments) if is_tensor_like_type(a.type)]
        self.tensors = 1 + max(at, default=-1)
        self.gradient: Callable[..., Any] | None = None
        # By the number of tensors: PyTorch's guards of those of earlier calls that were eager and
        # plain, and whether one of them requires a gradient.
        self._known: dict[int, tuple[tuple[Any, bool], ...]] = {}

    def __call__(self, *args: Any) -> Any:
        if is_transformed():
            return self.overload(*args)
        found = self._examine(_flatten(args) if self.takes_lists else args[: self.tensors])
        if found is None:
            return self.overload(*args)
        run, differentiable = found
        if differentiable and self.gradient and torch.is_grad_enabled():
            return self.gradient(args, functools.partial(_run_below_autograd, run))
        with torch._C._AutoDispatchBelowAutograd():
            return run(*args)

    def _examine(self, flat: Sequence[Any]) -> tuple[Callable[..., Any], bool] | None:
        """What runs a call, and whether a tensor requires a gradient; None if it is not eager.

        A guard compares what a call is eager and plain by, class and dispatch keys of each tensor,
        in a tenth of the time in which these are looked at one by one.
        """
        # Each once: a guard refuses one that comes again.
        tensors = list({id(each): each for each in flat if type(each) in _TENSORS}.values())
        comparable = not torch._C._len_torch_function_stack() and _has_plain_types(flat)
        if comparable:
            for guard, differentiable in self._known.get(len(tensors), ()):
                if guard.check(*tensors):
                    return self.kernel or self.overload, differentiable
        if not is_eager(flat):
            return None
        differentiable = torch._C._any_requires_grad(*flat)
        if not is_plain(flat):
            return self.overload, differentiable
        if comparable and tensors:
            free = [[None] * each.dim() for each in tensors]
            guard = TensorGuards(*tensors, dynamic_dims_sizes=free, dynamic_dims_strides=free)
            known = self._known.get(len(tensors), ())
            self._known[len(tensors)] = ((guard, differentiable), *known[: _MOST_KNOWN - 1])
        return self.kernel or self.overload, differentiable


def _run_below_autograd(run: Callable[..., Any], *args: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return run(*args)


def is_plain(args: Sequence[Any]) -> bool:
    """Whether no tensor and no mode asks for a dispatch of its own.

    The imaginary part of a conjugate does: its memory holds the numbers with the other sign.
    """
    if not _has_plain_types(args):
        return False
    return not any(each.is_neg() for each in args if isinstance(each, Tensor))


def _has_plain_types(args: Sequence[Any]) -> bool:
    return not torch._C._len_torch_dispatch_stack() and _PLAIN.issuperset(map(type, args))


_TENSORS = {Tensor, Parameter}
# Arguments of an op without a dispatch of their own; lists are of numbers.
_PLAIN = {*_TENSORS, type(None), bool, int, float, str, list, tuple}
_MOST_KNOWN = 8  # guards that an op keeps of so many tensors


def is_transformed() -> bool:
    """Whether what runs now is traced, or transformed by torch.func."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
    )


def is_eager(args: Sequence[Any]) -> bool:
    """Whether a call is neither traced nor transformed, and no argument overrides functions.

    Nor is an argument of a transform that has ended: what a pull-back of torch.func.vjp saved, say.
    The dispatcher finds the tensor within it; without, autograd would take it for another leaf.
    """
    if is_transformed() or torch.overrides.has_torch_function(args):
        return False
    for each in args:  # a generator would take half as long again
        if isinstance(each, Tensor) and is_functorch_wrapped_tensor(each):
            return False
    return True


def define(
    library: torch.library.Library,
    name: str,
    impl: str,
    schema: str,
    fake: Callable[..., Any],
    code: Library | None = None,
) -> Op:
    """Defines an implementation's overload of an op, and returns it.

    The first call of an overload whose kernels are in compiled code loads that, so that a saved
    program runs in a process that has called nothing else.

    Args:
        fake: returns what the op would return, for tensors without data.
        code: the compiled code that has the kernels, if any.
    """
    overload = f"{name}.{impl}"
    library.define(overload + schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{library.ns}::{overload}", fake)
    op = getattr(getattr(getattr(torch.ops, library.ns), name), impl)

    def load_and_call(code: Library, keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if reason := code.load():
            raise RuntimeError(f"{op.name()} cannot run here: {reason}")
        key = keyset.highestPriorityTypeId()
        if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key.name):
            raise RuntimeError(f"{op.name()} has no kernel for {key.name} tensors")
        return op.redispatch(keyset, *args)

    if code:  # the kernels that it loads take precedence over this
        call = functools.partial(load_and_call, code)
        library.impl(overload, call, "CompositeExplicitAutograd", with_keyset=True)
    register_vmap(library, op)
    return Op(op)


def register_vmap(library: torch.library.Library, op: torch._ops.OpOverload) -> None:
    """Lets torch.func.vmap call an op once for each example.

    PyTorch's own loop refuses arguments that are lists, and an empty batch. For an empty batch this
    calls the op once, with zeros, and returns empty results of the right shapes.
    """

    def call_one_by_one(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        found = [
            tree_flatten(op(*_select_example(args, in_dims, i, info.batch_size)))
            for i in range(max(info.batch_size, 1))
        ]
        each = zip(*(results for results, _ in found), strict=True)
        stacked = [torch.stack(results)[: info.batch_size] for results in each]
        outputs = tree_unflatten(stacked, found[0][1])
        return outputs, tree_map(lambda _: 0, outputs)

    torch.library.register_vmap(op, call_one_by_one, lib=library)


def _select_example(value: Any, dim: Any, i: int, count: int) -> Any:
    """Returns example i of `count` along dimension `dim` of a value; zeros if there are none."""
    if dim is None:
        return value
    if isinstance(value, list | tuple):
        return [_select_example(v, d, i, count) for v, d in zip(value, dim, strict=True)]
    if count == 0:
        return value.new_zeros(value.shape[:dim] + value.shape[dim + 1 :])
    return value.select(dim, i)


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
            None.
        save: ``save(ctx, inputs, output)``, called after the op, saves what `differentiate` needs.
        with_tangents: computes the op from ops that propagate tangents; called with the op's
            arguments where one of them has a tangent. Without it such a call is refused.
    """

    overload = op.overload

    # Of a single level: the dispatcher chose the level of torch.func before it called this.
    class Gradient(_SingleLevelFunction):
        apply: Callable[..., Any]  # as PyTorch defines it

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            inputs, run = args[-2:]  # before them, the same tensors one by one, for autograd
            output = run(*inputs)
            save(ctx, inputs, output)
            return tuple(output) if returns_list else output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            def compute(*grads: Any) -> Sequence[Any]:
                found = differentiate(ctx, *grads)
                return _flatten(found) if op.takes_lists else found

            with _without_autocast_of(grads):
                many = any(g is not None and is_legacy_batchedtensor(g) for g in grads)
                found = _call_one_by_one(compute, grads) if many else compute(*grads)
            return *found, None, None

    returns_list = is_tensorlist_like_type(overload._schema.returns[0].type)

    def gradient(args: tuple[Any, ...], run: Callable[..., Any]) -> Any:
        found = Gradient.apply(*(_flatten(args) if op.takes_lists else args), args, run)
        return list(found) if returns_list else found

    op.gradient = gradient

    def call(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        def run(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

        def run_at_other_levels(*args: Any) -> Any:
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                return run(*args)

        if forward_ad._current_level >= 0 and tree_any_only(Tensor, has_tangent, args):
            if with_tangents is None:
                raise NotImplementedError(
                    f"{overload.name()} has no forward-mode derivative; use reverse mode "
                    f"(backward, torch.func.vjp, torch.func.jacrev), or impl='reference', which "
                    f"has both"
                )
            with _without_autocast_of(args):
                return with_tangents(*args)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return run(*args)
        with enable_single_level_autograd_function():
            return gradient(args, run_at_other_levels)

    name = overload.name().removeprefix(f"{overload.namespace}::")
    library.impl(name, call, "Autograd", with_keyset=True)


_NOTHING = nullcontext()  # takes longer to make than to enter
_add_batch_dim = torch._add_batch_dim  # pyright: ignore[reportPrivateImportUsage]
_remove_batch_dim = torch._remove_batch_dim  # pyright: ignore[reportPrivateImportUsage]


def _call_one_by_one(
    function: Callable[..., Sequence[Any]], args: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Calls a function for each of the gradients that torch.autograd.grad computes at once with
    is_grads_batched. PyTorch's own loop refuses lists, and kernels find no memory in such tensors.
    """
    level = 1  # of the loop over gradients: there is no other within a backward pass
    several: list[Any] = [
        [*_remove_batch_dim(g, level, 1, 0)] if g is not None and is_legacy_batchedtensor(g) else g
        for g in args
    ]
    count = next(len(each) for each in several if isinstance(each, list))
    found = [
        function(*(each[i] if isinstance(each, list) else each for each in several))
        for i in range(count)
    ]
    return [
        None if each[0] is None else _add_batch_dim(torch.stack(each), 0, level)
        for each in zip(*found, strict=True)
    ]


def _flatten(args: Iterable[Any]) -> list[Any]:
    """Arguments, those of lists one by one."""
    flat: list[Any] = []
    for each in args:
        if type(each) is list:
            flat += each
        else:
            flat.append(each)
    return flat


def _without_autocast_of(args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Returns a context without autocast, for the device of these arguments.

    A derivative is computed in the dtypes of the saved tensors, which autocast may have cast.
    """
    if not torch._C._is_any_autocast_enabled():
        return _NOTHING
    devices = (t.device.type for t in tree_leaves(args) if isinstance(t, Tensor))
    return without_autocast(next(devices, "cpu"))


def has_tangent(t: Tensor) -> bool:
    """Whether a tensor has a forward-mode tangent at the innermost level of torch.func."""
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


def autocast(device_type: str, *tensors: Any) -> tuple[Any, ...]:
    """Casts tensors, or None, where autocast is on, as it casts a convolution's inputs: float64
    stays."""
    if not autocasts(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        t if t is None or not t.is_floating_point() or t.dtype == torch.float64 else t.to(dtype)
        for t in tensors
    )


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for tensors of such a device; ``"meta"``, say, has none."""
    return (
        torch._C._is_any_autocast_enabled()  # the shortest question comes first
        and torch.amp.is_autocast_available(device_type)
        and torch.is_autocast_enabled(device_type)
    )


# torch.compile of torch 2.11 cannot trace it; all programs depend on whether autocast is on.
autocasts._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Returns a context in which products are computed in the dtype of their operands."""
    return torch.autocast(device_type, enabled=False) if autocasts(device_type) else _NOTHING


def register_autocast(library: torch.library.Library, op: Op) -> None:
    """Lets autocast cast the tensors of an op, on CPU and GPU.

    `torch.library.register_autocast` knows one fixed dtype; this takes autocast's own.
    """
    for device_type in ("cpu", "cuda"):
        _register_autocast(library, op.overload, device_type)


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


def computes_as_made(generator: Any, kind: type[nn.Module]) -> bool:
    """Whether a generator computes what a module of this class computes from its parameters, and
    nothing else happens when it is called."""
    return (
        getattr(generator.forward, "__func__", None) is kind.forward
        and not (generator._forward_pre_hooks or generator._forward_hooks)
        and not (generator._backward_pre_hooks or generator._backward_hooks)
    )


def get_parameter(module: nn.Module, name: str) -> Any:
    """An attribute of a module that is a parameter or None, or what took its place: a
    parametrization, say.

    ``Module.__getattr__`` takes three times as long to find a parameter.
    """
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def check_dtypes(x: Tensor, dtypes: Collection[torch.dtype], **others: Tensor | None) -> None:
    """Checks that x has one of these dtypes, and that the others have x's dtype and device.

    Raises:
        TypeError: a dtype that is not supported, or that is not x's.
        ValueError: a device that is not x's.
    """
    dtype, device = x.dtype, x.device
    if dtype not in dtypes:
        names = ", ".join(map(str, dtypes))
        raise TypeError(f"x: expected one of {names}, got {dtype}; convert it with x.to(...)")
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: expected the dtype of x, {dtype}, got {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(f"{name}: expected the device of x, {device}, got {tensor.device}")


def gradient_layout(t: Tensor) -> tuple[list[int], list[int]]:
    """Returns the size and stride of a tensor's gradient.

    They are the tensor's own, so that the layer that generated the tensor gets a gradient of the
    same layout. A tensor that is not dense, an expanded one, say, has a dense gradient.
    """
    like = t if t.is_contiguous() else torch.empty_like(t, device="meta")
    return list(like.shape), list(like.stride())
