"""States of zeros, which nothing writes to: on a GPU they need neither memory nor a kernel.

B batch, n features of a state.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hoconv.recurrent.runtime.compiled_host import can_compile, view_zeros

_KEPT = 256


def make_zeros(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros (B, n) on the device of a tensor. Whoever calls it must not let others write to them:
    on a GPU all may be one number."""
    eager = not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()
    if eager and like.is_cuda and type(like) is Tensor:
        found = _find(like.device, shape, dtype, torch.is_inference_mode_enabled())
        if found is not None:
            return found
    return like.new_zeros(shape, dtype=dtype)


@functools.lru_cache(_KEPT)
def _find(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, _inference: bool
) -> Tensor | None:
    """Those of a GPU, if it has some. Tensors that are made in inference mode are others."""
    from hoconv.recurrent.runtime.clusters import find_zero  # brings the compiler

    zero = find_zero(device)
    if zero is None or not can_compile():
        return None
    return view_zeros(torch.empty(0, device=device), zero, shape, dtype)
