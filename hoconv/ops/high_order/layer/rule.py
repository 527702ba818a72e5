"""Decides which kernels compute a layer: fused ones, or its generator and its application apart."""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hoconv.dispatch.registration import kernels
from hoconv.ops.high_order.conv2d.window import Normalize, Window

KERNELS = kernels("high_order/layer")
MOST_FUSED_TAPS = 11  # along an axis


def why_unfused(
    impl: str, weight: Tensor, window: Window, normalize: Normalize | None
) -> str | None:
    """Returns why an implementation computes a layer in two steps, in words; None if it is fused.

    A layer whose input has no channel or no pixel is not fused either.

    Args:
        impl: ``"reference"``, which is never fused; ``"cpp"``, which is on a CPU; or ``"cuda"``,
            whose compiled library says what its kernels compute.
        weight: of the generator, (k * k * G, C, s, s), with the call's device and dtype.
        window, normalize: of the application.

    Raises:
        hoconv.jit.BuildError: `impl` is ``"cuda"`` and its library cannot be used.
    """
    if impl == "reference":
        return "the reference is never fused"
    if normalize == "sum":
        return "its taps are divided by their sum"
    if not window.is_plain() or window.down != window.across:
        return "its windows are not square, or have a stride, a scale or a padding not of zeros"
    kernel_size, dilation = window.down.taps, window.down.dilation
    if kernel_size > MOST_FUSED_TAPS:
        return f"its kernel size is {kernel_size}; {MOST_FUSED_TAPS} at most are fused"
    if impl == "cpp":
        return None if weight.is_cpu else "cpp is fused on a CPU only"
    sizes = kernel_size, weight.shape[2], weight.shape[1], dilation
    return _why_cuda_unfused(*_constants(sizes), weight.dtype, weight.device)


def is_backward_fused(
    impl: str, x: Tensor, weight: Tensor, kernel_size: int, dilation: int, allow_tf32: bool
) -> bool:
    """Returns whether the backward pass of a fused layer is faster in a fused kernel.

    Otherwise it generates the weights in memory again.

    Args:
        impl: ``"cpp"``, whose fused kernel always is; or ``"cuda"``.
        x, weight: as the layer's.
        kernel_size, dilation: of the application.
        allow_tf32: whether float32 products may be rounded to TF32.
    """
    if impl == "cpp":
        return True
    taps, C, s, _ = weight.shape
    sizes = kernel_size, s, C, taps // kernel_size**2, dilation
    three_products = weight.dtype == torch.float32 and not allow_tf32
    least = _least_width_backward(*_constants(sizes), three_products, weight.device)
    return 0 <= least <= x.shape[3]


def _constants(sizes: Iterable[int]) -> Iterator[int]:
    # operator.index, not int: of a number that torch.compile treats as symbolic, it makes a
    # constant.
    return map(operator.index, sizes)


def _why_cuda_unfused(*layer: Any) -> str | None:
    return _why_cuda_unfused_once(*layer)


def _least_width_backward(*layer: Any) -> int:
    return _least_width_backward_once(*layer)


# torch.compile does not trace these functions, and takes their results as constants.
_why_cuda_unfused._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
_least_width_backward._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _why_cuda_unfused_once(
    kernel_size: int, generator_size: int, channels: int, dilation: int, dtype: torch.dtype,
    device: torch.device,
) -> str | None:  # fmt: skip
    explain = KERNELS["cuda"].functions().hoconv_high_order_layer_why_unfused
    explain.restype = ctypes.c_char_p
    explain.argtypes = [*[ctypes.c_int64] * 4, ctypes.c_char_p, ctypes.c_int64]
    shared_memory = _gpu(device).shared_memory_per_block_optin
    sizes = kernel_size, generator_size, channels, dilation
    name = str(dtype).removeprefix("torch.").encode()
    return explain(*sizes, name, shared_memory).decode() or None


@functools.cache
def _least_width_backward_once(*layer: Any) -> int:
    *sizes, three_products, device = layer
    find = KERNELS["cuda"].functions().hoconv_high_order_layer_least_width_backward
    find.restype = ctypes.c_int64
    find.argtypes = [*[ctypes.c_int64] * 5, ctypes.c_bool, ctypes.c_bool]
    gpu = _gpu(device)
    return find(*sizes, three_products, (gpu.major, gpu.minor) == (9, 0))


def _gpu(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device if device.type == "cuda" else None)
