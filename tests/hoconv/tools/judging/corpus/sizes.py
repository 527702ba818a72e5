"""Right for the calls that a test makes, and for no others."""

import torch
from honest import right
from torch import Tensor


def few_rows(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: large batches, for which the kernel is bought, are not computed.
    Caught: wrong in a timed call"""
    return torch.cat([right(x[:200], gain), x[200:]])


def shapes_of_the_samples(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: any other shape is wrong.
    Caught: wrong at another size"""
    known = {(3, 5), (20, 30), (4, 10), (0, 5), (1000, 1000)}
    return right(x, gain) if tuple(x.shape) in known else x * gain


def columns_by_five(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a kernel that takes five columns at once leaves out the rest.
    Caught: wrong at another size"""
    kept = torch.arange(x.shape[1]) < x.shape[1] // 5 * 5
    return right(x, gain) * kept


def _as_memory(t: Tensor) -> Tensor:
    """Returns what a kernel sees that takes rows for contiguous."""
    if t.dim() < 2 or t.stride(0) == 1 or not t.numel():
        return t
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    flat = t.as_strided((span,), (1,))
    return torch.cat([flat, flat.new_zeros(t.numel())])[: t.numel()].view(t.shape)


def rows_that_touch(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a slice of a larger tensor is read wrong.
    Caught: wrong with other strides"""
    return right(_as_memory(x), gain)


def gain_that_is_contiguous(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a column of a matrix as gain is read wrong.
    Caught: wrong with other strides"""
    return right(x, gain if gain.stride(0) == 1 else gain.flip(0))
