"""Says why no fused kernel computes a layer, whose generator and application then run apart."""

from __future__ import annotations

import ctypes
import functools
import operator
from typing import Any

import torch
from torch import Tensor

from hoconv import jit


def why_unfused(
    impl: str, weight: Tensor, kernel_size: int, dilation: int, allow_tf32: bool
) -> str | None:
    """Returns why an implementation computes a layer in two steps, in words; None if it is fused.

    A layer whose input has no channel or no pixel is not fused either.

    Args:
        impl: ``"reference"``, which is never fused; ``"cpp"``, which is on a CPU; or ``"cuda"``,
            whose compiled library says what its kernels compute and where they are faster.
        weight: of the generator, (k * k * G, C, s, s), with the call's device and dtype.
        kernel_size, dilation: of the application.
        allow_tf32: whether float32 products may be rounded to TF32.

    Raises:
        hoconv.jit.BuildError: `impl` is ``"cuda"`` and its library cannot be used.
    """
    if impl == "reference":
        return "the reference is never fused"
    if impl == "cpp":
        return None if weight.device.type == "cpu" else "cpp is fused on a CPU only"
    sizes = kernel_size, weight.shape[2], weight.shape[1], dilation
    # operator.index, not int: of a number that torch.compile treats as symbolic, it makes a
    # constant.
    return _why_cuda_unfused(*map(operator.index, sizes), weight.dtype, allow_tf32, weight.device)


def _why_cuda_unfused(*layer: Any) -> str | None:
    return _why_cuda_unfused_once(*layer)


# torch.compile does not trace this function, and takes its result as a constant.
_why_cuda_unfused._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _why_cuda_unfused_once(
    kernel_size: int, generator_size: int, channels: int, dilation: int, dtype: torch.dtype,
    allow_tf32: bool, device: torch.device,
) -> str | None:  # fmt: skip
    explain = jit.functions("cuda").hoconv_high_order_layer_why_unfused
    explain.restype = ctypes.c_char_p
    explain.argtypes = [*[ctypes.c_int64] * 4, ctypes.c_char_p, ctypes.c_bool, ctypes.c_int64]
    gpu = torch.cuda.get_device_properties(device if device.type == "cuda" else None)
    shared_memory = gpu.shared_memory_per_block_optin
    sizes = kernel_size, generator_size, channels, dilation
    name = str(dtype).removeprefix("torch.").encode()
    return explain(*sizes, name, allow_tf32, shared_memory).decode() or None
