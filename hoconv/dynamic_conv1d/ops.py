"""The dynamic 1-D convolution as torch.library ops, with their FLOPs.

The operator is bilinear in x and weight. Its weight gradient sums over the dimensions that the
weight shares, batch or time, inside the kernel: `size` says which have size 1. Each op has an
overload per implementation (`.cpp`, `.triton`, `.cuda`).

B batch, C channels, H heads, K taps, T time steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hoconv.bilinear import register_bilinear
from hoconv.registration import kernels

_library = torch.library.Library("hoconv", "FRAGMENT")
_ops = torch.ops.hoconv

KERNELS = kernels("dynamic_conv1d")
cpp = register_bilinear(_library, "dynamic_conv1d", "cpp", "padding", KERNELS["cpp"])
triton = register_bilinear(_library, "dynamic_conv1d", "triton", "padding")
cuda = register_bilinear(_library, "dynamic_conv1d", "cuda", "padding", KERNELS["cuda"])


def _implement_in_triton(name: str) -> None:
    def launch(*args: Any) -> Tensor:
        from hoconv.dynamic_conv1d import triton_kernels  # which imports Triton

        return getattr(triton_kernels, name)(*args)

    _library.impl(f"{name}.triton", launch, "CUDA")


for _name in ("dynamic_conv1d", "dynamic_conv1d_grad_input", "dynamic_conv1d_grad_weight"):
    _implement_in_triton(_name)


def _flops(x_shape: tuple[int, ...], taps: int) -> int:
    """Counts a multiply and an add for every tap, channel and time step, in each of the maps."""
    B, C, T = x_shape
    return 2 * taps * B * C * T


@register_flop_formula([_ops.dynamic_conv1d, _ops.dynamic_conv1d_grad_input])
def _applied_flops(x_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
    return _flops(x_shape, weight_shape[2])


@register_flop_formula(_ops.dynamic_conv1d_grad_weight)
def _grad_weight_flops(grad_shape: Any, x_shape: Any, size: Any, *args: Any, **kwargs: Any) -> int:
    return _flops(grad_shape, size[2])
