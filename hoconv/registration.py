"""What operators share: autocast, the check of dtypes and devices, the layout of a gradient."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def autocast(device_type: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as autocast casts the inputs of a convolution: float64 stays."""
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )


def register_autocast(library: torch.library.Library, op: torch._ops.OpOverload) -> None:
    """Lets autocast cast the tensors of an op, on CPU and GPU.

    `torch.library.register_autocast` knows one fixed dtype; this takes autocast's own.
    """
    for device_type in ("cpu", "cuda"):
        _register_autocast(library, op, device_type)


def _register_autocast(
    library: torch.library.Library, op: torch._ops.OpOverload, device_type: str
) -> None:
    key = f"Autocast{device_type.upper()}"

    def cast(keyset: Any, *args: Any) -> Tensor:
        args = tree_map_only(Tensor, lambda t: autocast(device_type, t)[0], args)
        excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(*args)

    library.impl(op.name().removeprefix(f"{op.namespace}::"), cast, key, with_keyset=True)


def check_dtypes(x: Tensor, dtypes: Collection[torch.dtype], **others: Tensor | None) -> None:
    """Checks that x has one of these dtypes, and that the others have x's dtype and device.

    Raises:
        TypeError: a dtype that is not supported, or that is not x's.
        ValueError: a device that is not x's.
    """
    if x.dtype not in dtypes:
        names = ", ".join(map(str, dtypes))
        raise TypeError(f"x: expected one of {names}, got {x.dtype}; convert it with x.to(...)")
    for name, tensor in others.items():
        if tensor is not None and tensor.dtype != x.dtype:
            raise TypeError(f"{name}: expected the dtype of x, {x.dtype}, got {tensor.dtype}")
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name}: expected the device of x, {x.device}, got {tensor.device}")


def gradient_layout(t: Tensor) -> tuple[list[int], list[int]]:
    """Size and stride of a tensor's gradient: those of the tensor, so that what generated it gets
    it as it gave it; dense where the tensor is not (an expanded one, say)."""
    like = torch.empty_like(t, device="meta")
    return list(like.shape), list(like.stride())
