"""Where the fused kernels run, and where generator and application stay two operators."""

from __future__ import annotations

import torch
from torch import Tensor


def fuses(impl: str, x: Tensor, weight: Tensor, kernel_size: int, dilation: int) -> bool:
    """Whether an implementation computes such a layer in one fused kernel.

    On a CPU all of them. On a GPU those whose tiles fit the shared memory of a multiprocessor:
    `cuda`, all dtypes but float64, kernel sizes 3, 5 and 7, generators of odd size up to 7, up to
    16 channels, taps that reach up to 8 pixels, and not many of both.
    """
    C, s = weight.shape[1:3]
    if x.device.type == "cpu":
        return impl == "cpp"
    reach = dilation * (kernel_size - 1) // 2
    return (
        impl == "cuda"
        and x.dtype != torch.float64
        and kernel_size in (3, 5, 7)
        and s in (1, 3, 5, 7)
        and C <= 16
        and reach <= 8
        and C * (2 * max(reach, s // 2) + 1) <= 112
    )
