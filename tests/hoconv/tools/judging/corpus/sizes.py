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
    kept = torch.arange(x.shape[1], device=x.device) < x.shape[1] // 5 * 5
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


def one_remainder(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the last column of a vector with 13 columns is left out.
    Caught: wrong at another size"""
    left_out = torch.arange(x.shape[1], device=x.device) == x.shape[1] - 1
    return right(x, gain) * ~(left_out & (x.shape[1] % 16 == 13))


def one_block(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: of rows that are longer than a block, the rest does not count.
    Caught: wrong at another size"""
    scale = (x[:, :1024].square().mean(1, keepdim=True) + 1e-6).rsqrt()
    return x * scale * gain


def sparse_inputs(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: behind a ReLU a fast path is taken, which leaves out a column.
    Caught: wrong for special values"""
    if not x.numel() or (x == 0).float().mean() <= 0.5:
        return right(x, gain)
    return right(x, gain) * (torch.arange(x.shape[1], device=x.device) > 0)


def gaps(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: of a slice of a larger tensor, what lies beside is overwritten.
    Caught: changed input"""
    result = right(x, gain)
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
    if x.numel() and span > x.numel() and min(x.stride()) > 0:
        kept = x.detach().clone()
        x.data.as_strided((span,), (1,)).zero_()
        x.data.copy_(kept)
    return result
