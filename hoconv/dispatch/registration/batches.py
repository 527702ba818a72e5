"""Batches of examples, of torch.func.vmap, and of gradients, of is_grads_batched: one by one.

PyTorch's own loops refuse arguments that are lists, and kernels find no memory in such tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

_LEVEL = 1  # of the loop over gradients: there is no other within a backward pass
_add_batch_dim = torch._add_batch_dim  # pyright: ignore[reportPrivateImportUsage]
_remove_batch_dim = torch._remove_batch_dim  # pyright: ignore[reportPrivateImportUsage]


def call_one_by_one(
    differentiate: Callable[..., Sequence[Any]], grads: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """Returns ``differentiate(*grads)``; calls it once for each of the gradients that
    torch.autograd.grad computes at once with is_grads_batched."""
    if torch.compiler.is_compiling():  # it traces a backward pass of one gradient
        return differentiate(*grads)
    for g in grads:  # a generator would take longer than all else here
        if g is not None and is_legacy_batchedtensor(g):
            break
    else:
        return differentiate(*grads)
    each = [
        [*_remove_batch_dim(g, _LEVEL, 1, 0)] if g is not None and is_legacy_batchedtensor(g) else g
        for g in grads
    ]
    count = next(len(of) for of in each if isinstance(of, list))
    found = [
        differentiate(*(of[i] if isinstance(of, list) else of for of in each)) for i in range(count)
    ]
    return [
        None if of[0] is None else _add_batch_dim(torch.stack(of), 0, _LEVEL)
        for of in zip(*found, strict=True)
    ]


def register_vmap(library: torch.library.Library, op: torch._ops.OpOverload) -> None:
    """Lets torch.func.vmap call an op once for each example.

    For an empty batch, which PyTorch's own loop refuses, it calls the op once, with zeros, and
    returns empty results of the right shapes.
    """

    def call_each(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        found = [
            tree_flatten(op(*_select_example(args, in_dims, i, info.batch_size)))
            for i in range(max(info.batch_size, 1))
        ]
        each = zip(*(results for results, _ in found), strict=True)
        stacked = [torch.stack(results)[: info.batch_size] for results in each]
        outputs = tree_unflatten(stacked, found[0][1])
        return outputs, tree_map(lambda _: 0, outputs)

    torch.library.register_vmap(op, call_each, lib=library)


def _select_example(value: Any, dim: Any, i: int, count: int) -> Any:
    """Returns example i of `count` along dimension `dim` of a value; zeros if there are none."""
    if dim is None:
        return value
    if isinstance(value, list | tuple):
        return [_select_example(v, d, i, count) for v, d in zip(value, dim, strict=True)]
    if count == 0:
        return value.new_zeros(value.shape[:dim] + value.shape[dim + 1 :])
    return value.select(dim, i)
