"""The operator: its definition, its implementations, and what hoconv checks and times.

B batch, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hoconv.dispatch.declaration import Benchmark, Cost, Implementation, Operator, Sample, declare
from hoconv.dispatch.implementations import resolve
from hoconv.dispatch.registration import (
    autocast,
    check_dense,
    check_dtypes,
    compiled,
    define,
    register_gradient,
)
from hoconv.jit import Library, triton

KERNELS = Path(__file__).parent / "kernels"
_library = torch.library.Library("soft_clip", "FRAGMENT")
_TOLERANCES = {
    torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8e-2, torch.float16: 1e-2
}  # fmt: skip


def soft_clip(x: Tensor, limit: Tensor, *, impl: str = "auto") -> Tensor:
    """limit tanh(x / limit), for each channel.

    Args:
        x: (B, C, ...); float32, float64, float16 or bfloat16.
        limit: (C), positive; dtype and device of x.
        impl: ``"auto"``, ``"reference"``, ``"cpp"``, ``"triton"`` or ``"cuda"``.

    Returns:
        As x. Under autocast x and limit are cast to its dtype, as a convolution's are.

    Raises:
        ValueError: the shape of `limit` is not (C), or its device is not that of x.
        TypeError: a dtype is not supported, or differs between x and limit.
    """
    # Kernels read memory as these checks say: an argument that you add needs its own.
    check_dense(x)
    check_dense(limit, "limit")
    x, limit = autocast(x.device.type, x, limit)
    check_dtypes(x, _TOLERANCES, limit=limit)
    if x.dim() < 2 or limit.shape != x.shape[1:2]:
        raise ValueError(
            f"limit: expected shape (C) for x (B, C, ...), got {tuple(limit.shape)} for x "
            f"{tuple(x.shape)}"
        )
    chosen = resolve("soft_clip", impl, x.device.type)
    return OPERATOR.implementations[chosen].function(x, limit)


def reference(x: Tensor, limit: Tensor) -> Tensor:
    """The definition, in plain PyTorch."""
    limit = _per_channel(limit, x)
    return limit * torch.tanh(x / limit)


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 2))


def _register(impl: str, code: Library | None = None) -> Any:
    """Registers the op soft_clip::soft_clip.<impl>; compiled code comes with its first call."""
    op = define(_library, "soft_clip", impl, "(Tensor x, Tensor limit) -> Tensor", _fake, code)
    register_gradient(_library, op, _differentiate, _save)
    return op


def _compiled(impl: str, code: Library) -> Implementation:
    return compiled(_register(impl, code), (code.device,), code)


def _in_triton() -> Implementation:
    from soft_clip import triton_kernel

    op = _register("triton")
    _library.impl("soft_clip.triton", triton_kernel.soft_clip, "CUDA")
    return Implementation(op, ("cuda",), load=triton.load, obstacle=triton.obstacle)


def _fake(x: Tensor, limit: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient in PyTorch, which can differentiate it again. A kernel may compute it, too."""
    x, limit = ctx.saved_tensors
    wide = torch.promote_types(x.dtype, torch.float32)  # sums in half precision lose digits
    scaled = x.to(wide) / _per_channel(limit, x)
    output = torch.tanh(scaled)
    slope = 1 - output * output
    others = [d for d in range(x.dim()) if d != 1]
    d_limit = (grad * (output - scaled * slope)).sum(others)
    return (grad * slope).to(x.dtype), d_limit.to(x.dtype)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Returns what is checked: the awkward shapes, and one of each size that a kernel treats in
    another way. Strides and gradients of all kinds are tried with each."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device, dtype)

    def limits(channels: int) -> Tensor:
        return (torch.rand(channels, dtype=torch.float64) + 0.5).to(device, dtype)

    yield Sample((draw(2, 6, 5, 7), limits(6)), name="(2, 6, 5, 7)")
    yield Sample((draw(4, 8), limits(8)), name="(4, 8)")
    yield Sample((draw(0, 3, 2), limits(3)), name="an empty batch")
    yield Sample((draw(1, 8, 300), limits(8)), name="more than a block")
    yield Sample((draw(61, 7, 9, 9), limits(7)), name="several threads")


def _cost(sample: Sample) -> Cost:
    x, limit = sample.args
    forward, backward = 2 * x.nbytes + limit.nbytes, 3 * x.nbytes + 2 * limit.nbytes
    return Cost(forward, backward, 3 * x.numel(), 8 * x.numel())


def _benchmark(size: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x = torch.randn(size, 64, 56, 56, device=device, dtype=dtype)
    return Sample((x, torch.rand(64, device=device, dtype=dtype) + 0.5), name=f"batch {size}")


OPERATOR = declare(
    Operator(
        name="soft_clip",
        function=soft_clip,
        # From the slowest to the fastest. To do without one, delete its entry.
        implementations={
            "reference": Implementation(reference),
            "cpp": _compiled("cpp", Library("soft_clip", [KERNELS / "soft_clip.cpp"])),
            "triton": _in_triton(),
            "cuda": _compiled(
                "cuda", Library("soft_clip", [KERNELS / "soft_clip.cu"], device="cuda")
            ),
        },
        samples=_samples,
        tolerances=_TOLERANCES,
        cost=_cost,
        benchmark=Benchmark(axis="batch size", sizes=(8, 64), sample=_benchmark),
    )
)  # fmt: skip
