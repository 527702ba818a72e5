"""Calls of ops that go past the dispatcher, where nothing asks for it: eager ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._library.utils import is_tensor_like_type, is_tensorlist_like_type
from torch.autograd import forward_ad
from torch.nn import Parameter


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
        gradient: calls the op, given its arguments and what runs it below autograd, such that
            autograd records it; set by :func:`register_gradient`.
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
        # By the number of tensors, and the classes of all arguments: PyTorch's guards of tensors of
        # earlier calls that were eager and plain, and whether one of them requires a gradient.
        self._known: dict[Any, tuple[tuple[Any, bool], ...]] = {}

    def __call__(self, *args: Any) -> Any:
        if is_transformed():
            return self.overload(*args)
        found = self._examine(flatten(args) if self.takes_lists else args[: self.tensors])
        if found is None:
            return self.overload(*args)
        run, differentiable = found
        if differentiable and self.gradient and records_gradients():
            return self.gradient(args, run)
        with torch._C._AutoDispatchBelowAutograd():
            return run(*args)

    def _examine(self, flat: Sequence[Any]) -> tuple[Callable[..., Any], bool] | None:
        """What runs a call, and whether a tensor requires a gradient; None if it is not eager.

        A guard compares what a call is eager and plain by, class and dispatch keys of each tensor,
        in a tenth of the time in which these are looked at one by one.
        """
        key, tensors = None, []
        if not (torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()):
            tensors = [each for each in flat if type(each) in _TENSORS]
            if self.takes_lists:  # each once: a guard refuses one that comes again
                tensors = [*dict(zip(map(id, tensors), tensors)).values()]
            key = len(tensors), *map(type, flat)
            for guard, differentiable in self._known.get(key, ()):
                if guard.check(*tensors):
                    return self.kernel or self.overload, differentiable
        if not is_eager(flat):
            return None
        differentiable = torch._C._any_requires_grad(*flat)
        if not is_plain(flat):
            return self.overload, differentiable
        if tensors:
            free = [[None] * each.dim() for each in tensors]
            guard = TensorGuards(*tensors, dynamic_dims_sizes=free, dynamic_dims_strides=free)
            known = self._known.get(key, ())
            self._known[key] = ((guard, differentiable), *known[: _MOST_KNOWN - 1])
        return self.kernel or self.overload, differentiable


def is_plain(args: Sequence[Any]) -> bool:
    """Whether no tensor and no mode asks for a dispatch of its own.

    The imaginary part of a conjugate does: its memory holds the numbers with the other sign. So
    does a tensor without memory: of the meta device, or of zeros of autograd's.
    """
    if not _has_plain_types(args):
        return False
    tensors = (each for each in args if isinstance(each, Tensor))
    return not any(t.is_neg() or t.is_meta or t._is_zerotensor() for t in tensors)


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


def records_gradients() -> bool:
    """Whether autograd records calls; in inference mode, which torch.compile does not know, it
    never does."""
    if not torch.is_grad_enabled():
        return False
    return torch.compiler.is_compiling() or not torch.is_inference_mode_enabled()


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


def flatten(args: Iterable[Any]) -> list[Any]:
    """Arguments, those of lists one by one."""
    flat: list[Any] = []
    for each in args:
        if type(each) is list:
            flat += each
        else:
            flat.append(each)
    return flat
