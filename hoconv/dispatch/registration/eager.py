"""Calls of ops that go past the dispatcher, where nothing asks for it: eager ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

# The classes of arguments that have no dispatch of their own; lists are of numbers.
_PLAIN = {Tensor, Parameter, type(None), bool, int, float, str, list, tuple}


class Op:
    """One op of torch.library, called as its overload is, only sooner.

    A plain call needs autograd, where a gradient is wanted, and the kernel; the dispatcher would go
    through Python and back between the two. That takes a fifth of a small call and its gradient,
    and more where arguments are lists. All other calls go through the dispatcher.

    Attributes:
        overload: the op itself.
        kernel: of an op in Python, what computes it in a plain call.
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
        types = [str(argument.type) for argument in overload._schema.arguments]
        self.takes_lists = "List[Tensor]" in types
        self.tensors = 1 + max((i for i, of in enumerate(types) if "Tensor" in of), default=-1)
        self.gradient: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        tensors = flatten(args) if self.takes_lists else args[: self.tensors]
        if not is_plain(tensors):
            return self.overload(*args)
        run = self.kernel or self.overload
        if self.gradient and records_gradients() and torch._C._any_requires_grad(*tensors):
            return self.gradient(args, run)
        with torch._C._AutoDispatchBelowAutograd():
            return run(*args)


def is_plain(args: Sequence[Any]) -> bool:
    """Returns whether autograd and the kernel are all that a call needs: it is neither traced,
    transformed nor watched by a mode, and its tensors are of PyTorch's own classes and have memory.

    An argument may be of a transform that has ended: what a pull-back of torch.func.vjp saved, say.
    The dispatcher finds the tensor within it; without, autograd would take it for another leaf. The
    imaginary part of a conjugate is in memory with the other sign; tensors of the meta device, and
    zeros of autograd's, are not in memory at all.
    """
    if is_transformed() or torch.overrides.has_torch_function(args):
        return False
    if torch._C._len_torch_dispatch_stack() or not _PLAIN.issuperset(map(type, args)):
        return False
    for each in args:  # a generator would take half as long again
        if isinstance(each, Tensor) and (
            is_functorch_wrapped_tensor(each)
            or each.is_neg()
            or each.is_meta
            or each._is_zerotensor()
        ):
            return False
    return True


def is_transformed() -> bool:
    """Returns whether what runs now is traced, or transformed by torch.func."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        or forward_ad._current_level >= 0
    )


def records_gradients() -> bool:
    """Returns whether autograd records calls; in inference mode, which torch.compile does not know,
    it never does."""
    if not torch.is_grad_enabled():
        return False
    return torch.compiler.is_compiling() or not torch.is_inference_mode_enabled()


def flatten(args: Iterable[Any]) -> list[Any]:
    """Arguments, those of lists one by one."""
    flat: list[Any] = []
    for each in args:
        if isinstance(each, list | tuple):  # torch.compile of torch 2.11 makes tuples of lists
            flat += each
        else:
            flat.append(each)
    return flat
