"""Calls of a function that are like an earlier one: one guard of PyTorch's checks all tensors.

On small tensors a call takes as long as its Python, most of which looks at the tensors one by one
and chooses what runs. Both are known when a call has been made once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad

from hoconv.registration.eager import is_transformed

_Run = Callable[..., Any]
# Kinds of calls that a function keeps, and calls of a kind; the first ones are dropped first.
_MOST_KINDS, _MOST_CALLS = 256, 8
_CLASSES = {Tensor, nn.Parameter, type(None)}


class Repeats:
    """What ran in earlier calls of a function.

    Calls are alike whose options are equal, and whose tensors agree in class, dtype, device, sizes
    where they matter, and in whether they require gradients. A guard also compares what the
    dispatcher looks at: whether there is autocast, inference mode or a transform.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[tuple[TensorGuards, _Run], ...]] = {}

    def find(self, options: Any, tensors: Sequence[Any]) -> _Run | None:
        """What ran in a call like this one; None if none was, or if it has to be looked at.

        Args:
            options: what a call depends on besides its tensors.
            tensors: each at most once; the second is a parameter, and may be None.
        """
        if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
            return None
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            return None
        try:
            for guard, run in self._kept.get(_describe(options, tensors), ()):
                if guard.check(*(tensors if tensors[-1] is not None else _present(tensors))):
                    # One without numbers may be refused, or need no kernel.
                    return run if tensors[0].numel() else None
        except (AttributeError, IndexError, RuntimeError, TypeError):  # no tensors, or no options
            return None
        return None

    def keep(self, options: Any, tensors: Sequence[Tensor | None], run: _Run, *free: int) -> None:
        """Keeps what ran in a call, which :meth:`find` finds for calls like this one.

        Args:
            options, tensors: as of :meth:`find`.
            run: takes the place of the function, for these options.
            free: the dimensions of the first tensor whose sizes do not matter.
        """
        if not _is_plain() or not _CLASSES.issuperset(map(type, tensors)):
            return
        every, key = _present(tensors), _describe(options, tensors)
        try:
            hash(key)
        except TypeError:  # a list, say
            return
        if len({*map(id, every)}) < len(every):  # which a guard refuses
            return
        sizes: Any = [[*t.shape] for t in every]
        for dim in free:
            sizes[0][dim] = None
        strides: Any = [[None] * t.dim() for t in every]
        guard = TensorGuards(*every, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        for oldest in [*self._kept][: max(0, len(self._kept) - _MOST_KINDS + 1)]:
            self._kept.pop(oldest, None)
        self._kept[key] = ((guard, run), *self._kept.get(key, ())[: _MOST_CALLS - 1])


def _describe(options: Any, tensors: Sequence[Any]) -> Any:
    """What calls have to agree in to be compared."""
    shape = None if tensors[1] is None else tensors[1].shape
    return options, shape, tensors[-1] is None, torch.is_grad_enabled()


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [each for each in tensors if each is not None]


def _is_plain() -> bool:
    """Whether no mode or transform of PyTorch asks for more than the kernel and autograd."""
    return (
        not is_transformed()
        and not torch._C._is_any_autocast_enabled()
        and not torch._C._len_torch_function_stack()
        and not torch._C._len_torch_dispatch_stack()
    )
