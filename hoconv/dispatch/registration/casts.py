"""Autocast: the dtype that it gives to the tensors of an op."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hoconv.dispatch.registration.eager import Op

NOTHING = nullcontext()  # takes longer to make than to enter


@overload
def autocast(device_type: str, tensor: Any, /) -> Any: ...
@overload
def autocast(device_type: str, first: Any, second: Any, /, *others: Any) -> tuple[Any, ...]: ...
def autocast(device_type: str, *tensors: Any) -> Any:
    """Casts tensors where autocast is on, as it casts a convolution's inputs.

    Args:
        device_type: of the tensors.
        tensors: of any shape and dtype, or None. Floating-point tensors are cast to autocast's
            dtype, but for those of float64.

    Returns:
        A tensor, or None, for a single one; a tuple for several.
    """
    if autocasts(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        tensors = tuple(
            t if t is None or not t.is_floating_point() or t.dtype == torch.float64 else t.to(dtype)
            for t in tensors
        )
    return tensors[0] if len(tensors) == 1 else tensors


def autocasts(device_type: str) -> bool:
    """Returns whether autocast is on for tensors of such a device; ``"meta"``, say, has none."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


# torch.compile of torch 2.11 cannot trace it; all programs depend on whether autocast is on.
autocasts._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Returns a context in which products are computed in the dtype of their operands."""
    return torch.autocast(device_type, enabled=False) if autocasts(device_type) else NOTHING


def register_autocast(library: torch.library.Library, op: Op) -> None:
    """Lets autocast cast the tensors of an op, on CPU and GPU.

    `torch.library.register_autocast` knows one fixed dtype; this takes autocast's own.
    """
    for device_type in ("cpu", "cuda"):
        _register_autocast(library, op.overload, device_type)


def _register_autocast(
    library: torch.library.Library, op: torch._ops.OpOverload, device_type: str
) -> None:
    key = f"Autocast{device_type.upper()}"

    def cast(keyset: Any, *args: Any) -> Tensor:
        args = tree_map_only(Tensor, lambda t: autocast(device_type, t), args)
        excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(*args)

    library.impl(op.name().removeprefix(f"{op.namespace}::"), cast, key, with_keyset=True)
