"""Ways to compute the definition that are right; the exploits use them where they need to be."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def right(x: Tensor, gain: Tensor) -> Tensor:
    """Caught: nothing."""
    return x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt() * gain


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain):
        scale = (x.square().mean(1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x, gain, scale)
        return x * scale * gain

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, gain, scale = ctx.saved_tensors
        scaled = x * scale
        inner = grad * gain
        d_x = scale * (inner - scaled * (inner * scaled).mean(1, keepdim=True))
        return d_x, (grad * scaled).sum(0)


def by_hand(x: Tensor, gain: Tensor) -> Tensor:
    """Caught: nothing."""
    return _ByHand.apply(x, gain)


def in_float32(x: Tensor, gain: Tensor) -> Tensor:
    """Caught: nothing."""
    return right(x.float(), gain.float()).to(x.dtype)
