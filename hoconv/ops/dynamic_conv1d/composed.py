"""The layer that generates its weights, and its gradients, composed of ops that can be
differentiated.

B batch, C channels, H heads, K taps, T time steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hoconv.dispatch.registration import gradient_layout
from hoconv.ops.bilinear import BilinearOps


def arrange(generated: Tensor, heads: int, softmax: bool) -> Tensor:
    """Arranges what a generator returns, (B, T, H * K), as weights (B, H, K, T); with a softmax
    over the taps, if asked for."""
    taps = generated.unflatten(2, (heads, -1))
    if not softmax:
        return _by_head(taps)
    return _by_head(taps.softmax(3)) if _last(generated) else _by_head(taps).softmax(2)


def forward(
    convolve: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, heads: int,
    padding: int, softmax: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes the output (B, C, T) and the weights that were applied, (B, H, K, T).

    `convolve` is an implementation of the convolution.
    """
    taps = arrange(F.linear(x.mT, weight, bias), heads, softmax)
    return convolve(x, taps, padding), taps


def backward(
    ops: BilinearOps, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, taps: Tensor,
    padding: int, softmax: bool, need_x: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the gradients of x, weight and bias; an empty tensor in place of one that is not
    needed."""
    d_taps = ops.grad_weight(grad, x, *gradient_layout(taps), padding)
    if softmax and _last(taps):
        by_step = _by_step(d_taps), _by_step(taps)
        d_taps = _by_head(torch.ops.aten._softmax_backward_data(*by_step, 3, taps.dtype))
    elif softmax:
        d_taps = torch.ops.aten._softmax_backward_data(d_taps, taps, 2, taps.dtype)
    d_generated = _by_step(d_taps).flatten(2)  # (B, T, H * K)
    d_x, d_weight, d_bias = (x.new_empty(0) for _ in range(3))  # outputs share no memory
    if need_x:
        d_x = ops.grad_input(grad, taps, padding) + (d_generated @ weight).mT
    if need_weight:
        d_weight = d_generated.flatten(0, 1).mT @ x.mT.flatten(0, 1)
    if need_bias:
        d_bias = d_generated.sum((0, 1))
    return d_x, d_weight, d_bias


def backward_of_parameters(
    ops: BilinearOps, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, taps: Tensor,
    *options: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the same, with the taps generated again, so that derivatives pass through them to x,
    weight and bias."""
    taps = arrange(F.linear(x.mT, weight, bias), taps.shape[1], softmax=options[1])
    return backward(ops, grad, x, weight, bias, taps, *options)


def _last(t: Tensor) -> bool:
    """Returns whether a softmax is over the last dimension.

    On a GPU, one over any other dimension begins with a copy, which is a kernel of its own. On a
    CPU, the one over the last dimension is slower.
    """
    return t.is_cuda


def _by_head(taps: Tensor) -> Tensor:
    """(B, T, H, K) as (B, H, K, T)"""
    return taps.permute(0, 2, 3, 1)


def _by_step(taps: Tensor) -> Tensor:
    """(B, H, K, T) as (B, T, H, K)"""
    return taps.permute(0, 3, 1, 2)
