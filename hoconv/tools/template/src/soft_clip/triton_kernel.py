"""The kernel in Triton, which comes with PyTorch's CUDA wheels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BLOCK = 1024  # elements of a program


def soft_clip(x: Tensor, limit: Tensor) -> Tensor:
    """Launches the kernel; x (B, C, ...) and limit (C) are on a GPU."""
    torch._check(limit.shape == x.shape[1:2], lambda: "limit: expected shape (C)")
    torch._check(limit.device == x.device, lambda: "limit: expected the device of x")
    torch._check_type(limit.dtype == x.dtype, lambda: "limit: expected the dtype of x")
    x, limit = x.contiguous(), limit.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        inner = x.numel() // (x.shape[0] * x.shape[1])
        grid = (-(-x.numel() // _BLOCK),)
        with torch.cuda.device_of(x):
            _kernel()[grid](
                x, limit, out, x.numel(), inner, x.shape[1], BLOCK=_BLOCK, enable_fp_fusion=True
            )
    return out


def _kernel() -> Any:
    """The kernel; Triton is imported on the first call, since that takes a second."""
    global _made
    if _made is None:
        import triton
        import triton.language as tl

        @triton.jit
        def kernel(x, limit, out, size, inner, channels, BLOCK: tl.constexpr):
            at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            real = at < size
            given = tl.load(x + at, mask=real, other=0.0)
            wide = tl.float64 if given.dtype == tl.float64 else tl.float32
            scale = tl.load(limit + at // inner % channels, mask=real, other=1.0).to(wide)
            # tanh(z) by exp of a number that is not positive: it cannot overflow.
            z = given.to(wide) / scale
            e = tl.exp(-2 * tl.abs(z))
            tanh = (1 - e) / (1 + e)
            result = scale * tl.where(z < 0, -tanh, tanh)
            tl.store(out + at, result.to(given.dtype), mask=real)

        _made = kernel
    return _made


_made: Any = None
