"""Ways to compute the definition that are right; the exploits use them where they need to be."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def right(x: Tensor, gain: Tensor) -> Tensor:
    """Caught: nothing."""
    return x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt() * gain


def gradients(grad: Tensor, x: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Returns those of x and of gain."""
    scale = (x.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    scaled, inner = x * scale, grad * gain
    d_x = scale * (inner - scaled * (inner * scaled).mean(1, keepdim=True))
    return d_x, (grad * scaled).sum(0)


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain):
        ctx.save_for_backward(x, gain)
        return right(x, gain)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return gradients(grad, *ctx.saved_tensors)


def by_hand(x: Tensor, gain: Tensor) -> Tensor:
    """Caught: nothing."""
    return _ByHand.apply(x, gain)


def in_float32(x: Tensor, gain: Tensor) -> Tensor:
    """Caught: nothing."""
    return right(x.float(), gain.float()).to(x.dtype)
