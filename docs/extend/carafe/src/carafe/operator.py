"""CARAFE, content-aware reassembly of features (Wang et al., ICCV 2019), without its predictor.

B batch, C channels, H height, W width; s scale, k kernel size, r = k // 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
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
from hoconv.jit import Library

KERNELS = Path(__file__).parent / "kernels"
_library = torch.library.Library("carafe", "FRAGMENT")
_TOLERANCES = {
    torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3
}  # fmt: skip


def carafe(x: Tensor, weight: Tensor, *, impl: str = "auto") -> Tensor:
    """Makes an image s times as high and wide; every new pixel has a kernel of its own.

    Pixel (s i + p, s j + q) of channel c is the sum over n and m from 0 to k - 1 of
    ``weight[b, k n + m, s p + q, i, j] * x[b, c, i + n - r, j + m - r]``; outside the image x is 0.

    Args:
        x: (B, C, H, W); float32, float64, float16 or bfloat16.
        weight: (B, k * k, s * s, H, W), k odd; dtype and device of x.
        impl: ``"auto"``, ``"reference"``, ``"cpp"`` or ``"cuda"``.

    Returns:
        (B, C, s * H, s * W), with the dtype of x. Under autocast x and weight are cast to its
        dtype, as a convolution's are.

    Raises:
        ValueError: the shape or device of `weight` does not fit.
        TypeError: a dtype is not supported, or differs between x and weight.
    """
    check_dense(x)
    check_dense(weight, "weight")
    x, weight = autocast(x.device.type, x, weight)
    check_dtypes(x, _TOLERANCES, weight=weight)
    if x.dim() != 4:
        raise ValueError(f"x: expected 4 dimensions (B, C, H, W), got shape {tuple(x.shape)}")
    B, _, H, W = x.shape
    k, s = (math.isqrt(n) for n in (*weight.shape, 0, 0, 0)[1:3])
    if weight.shape != (B, k * k, s * s, H, W) or k % 2 == 0 or s == 0:
        raise ValueError(
            f"weight: expected shape (B, k * k, s * s, H, W), k odd, for x (B, C, H, W) of shape "
            f"{tuple(x.shape)}; got {tuple(weight.shape)}"
        )
    chosen = resolve("carafe", impl, x.device.type)
    return OPERATOR.implementations[chosen].function(x, weight)


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """The definition, in plain PyTorch: a product for each tap, summed in float32 or wider."""
    k, s = math.isqrt(weight.shape[1]), math.isqrt(weight.shape[2])
    wide = torch.promote_types(x.dtype, torch.float32)
    padded = F.pad(x.to(wide), [k // 2] * 4).unsqueeze(2)
    out = torch.zeros((), dtype=wide, device=x.device)
    for tap in range(k * k):
        moved = padded[..., tap // k :, tap % k :][..., : x.shape[2], : x.shape[3]]
        out = out + moved * weight[:, None, tap].to(wide)  # (B, C, s * s, H, W)
    B, C, _, H, W = out.shape
    rows = out.view(B, C, s, s, H, W).permute(0, 1, 4, 2, 5, 3)  # not F.pixel_shuffle: its gradient
    return rows.reshape(B, C, s * H, s * W).to(x.dtype)  # fails for an empty batch


def _register(impl: str, code: Library) -> Any:
    """Registers three ops, each linear in both arguments, and the gradients of each other."""

    def op(name: str, schema: str, fake: Any) -> Any:
        return define(_library, name, impl, schema, fake, code)

    forward = op("carafe", "(Tensor x, Tensor weight) -> Tensor", _fake)
    grad_x = op("grad_x", "(Tensor grad, Tensor weight) -> Tensor", _fake_grad_x)
    grad_weight = op("grad_weight", "(Tensor grad, Tensor x, SymInt[] size) -> Tensor",
                     lambda grad, x, size: x.new_empty(size))  # fmt: skip

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    def of_forward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad_x(grad, weight), grad_weight(grad, x, weight.shape)

    def of_grad_x(ctx: Any, along_x: Tensor) -> tuple[Tensor, Tensor]:
        grad, weight = ctx.saved_tensors
        return forward(along_x, weight), grad_weight(grad, along_x, weight.shape)

    def of_grad_weight(ctx: Any, along_weight: Tensor) -> tuple[Tensor, Tensor, None]:
        grad, x = ctx.saved_tensors
        return forward(x, along_weight), grad_x(grad, along_weight), None

    register_gradient(_library, forward, of_forward, save)
    register_gradient(_library, grad_x, of_grad_x, save)
    register_gradient(_library, grad_weight, of_grad_weight, save)
    return forward


def _compiled(impl: str, code: Library) -> Implementation:
    return compiled(_register(impl, code), (code.device,), code)


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    s = math.isqrt(weight.shape[2])
    return x.new_empty(*x.shape[:2], s * x.shape[2], s * x.shape[3])


def _fake_grad_x(grad: Tensor, weight: Tensor) -> Tensor:
    return grad.new_empty(*grad.shape[:2], *weight.shape[3:])


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def draw(B: int, C: int, H: int, W: int, k: int, s: int) -> tuple[Tensor, Tensor]:
        shapes = (B, C, H, W), (B, k * k, s * s, H, W)
        return tuple(torch.randn(s, dtype=torch.float64).to(device, dtype) for s in shapes)

    yield Sample(draw(2, 3, 4, 5, k=3, s=2), name="k=3, s=2")
    yield Sample(draw(1, 2, 6, 70, k=5, s=2), name="k=5, s=2, wide")
    yield Sample(draw(2, 1, 3, 4, k=3, s=3), name="s=3")
    yield Sample(draw(1, 2, 3, 3, k=1, s=1), name="one tap, as large as before")
    yield Sample(draw(1, 1, 2, 1, k=7, s=2), name="image smaller than the kernel")
    yield Sample(draw(0, 2, 3, 3, k=3, s=2), name="an empty batch")


def _cost(sample: Sample) -> Cost:
    x, weight = sample.args
    out, flops = x.nbytes * weight.shape[2], 2 * x.shape[1] * weight.numel()
    return Cost(x.nbytes + weight.nbytes + out, 2 * (x.nbytes + weight.nbytes) + out,
                flops, 2 * flops)  # fmt: skip


def _benchmark(size: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x = torch.randn(size, 64, 28, 28, device=device, dtype=dtype)
    weight = torch.rand(size, 25, 4, 28, 28, device=device, dtype=dtype).softmax(1)
    return Sample((x, weight), name=f"batch {size}")


OPERATOR = declare(
    Operator(
        name="carafe",
        function=carafe,
        # From the slowest to the fastest. To do without one, delete its entry.
        implementations={
            "reference": Implementation(reference),
            "cpp": _compiled("cpp", Library("carafe", [KERNELS / "carafe.cpp"])),
            "cuda": _compiled("cuda", Library("carafe", [KERNELS / "carafe.cu"], device="cuda")),
        },
        samples=_samples,
        tolerances=_TOLERANCES,
        cost=_cost,
        benchmark=Benchmark(axis="batch size", sizes=(8, 32), sample=_benchmark),
    )
)  # fmt: skip
