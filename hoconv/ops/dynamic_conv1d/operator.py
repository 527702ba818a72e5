"""The dynamic 1-D convolution: the public function and the operator's declaration.

B batch, C channels, H heads, K taps, T time steps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hoconv.dispatch.declaration import (
    MOST_UNROLLED,
    Benchmark,
    Cost,
    Implementation,
    Operator,
    Sample,
    declare,
)
from hoconv.dispatch.implementations import resolve
from hoconv.dispatch.registration import (
    autocast,
    autocasts,
    check_dense,
    check_dtypes,
    compiled,
    without_autocast,
)
from hoconv.jit import triton
from hoconv.ops.dynamic_conv1d import composed, ops, reference
from hoconv.ops.dynamic_conv1d.grid import GRID

# Relative. Half precision is accumulated in float32 and rounded once: its machine epsilon. float32
# and float64 round every addition: about 8 and 45 epsilons.
_TOLERANCES = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}

_LAYER = ops.LAYER | {"reference": functools.partial(composed.forward, reference.dynamic_conv1d)}


def dynamic_conv1d(x: Tensor, weight: Tensor, *, padding: int, impl: str = "auto") -> Tensor:
    """Convolves each sequence with kernels that may differ between sequences and time steps.

    ``out[b, c, t] = sum over j of weight[b, h(c), j, t] * x[b, c, t + j - padding]`` with
    ``h(c) = c // (C / H)``: the C / H consecutive channels of a head share their kernels. Before
    the first and after the last step x is zero. Half precision is accumulated in float32.

    From Wu et al., Pay Less Attention with Lightweight and Dynamic Convolutions, ICLR 2019. There a
    layer generates the weights from x (:class:`hoconv.DynamicConv1d`), or they are parameters,
    shared by all sequences and steps (:class:`hoconv.LightweightConv1d`): weight (1, H, K, 1).

    Args:
        x: (B, C, T); float32, float64, float16 or bfloat16; any strides.
        weight: (B or 1, H, K, T or 1), H dividing C, K at least 1; dtype and device of x; any
            strides. A batch or time dimension of size 1 is shared. Its gradient is summed inside
            the kernel; that of an expanded weight would first be written in full.
        padding: zeros before the first step, from 0 to K - 1: ``K - 1`` is causal, ``(K - 1) // 2``
            centred. The other ``K - 1 - padding`` zeros come after the last step.
        impl: ``"auto"``, ``"reference"``, ``"cpp"``, ``"triton"`` or ``"cuda"``.

    Returns:
        (B, C, T), with the dtype of x. Under autocast x and weight are cast to its dtype, as a
        convolution's are.

    Raises:
        ValueError: a shape or `padding` does not fit.
        TypeError: a dtype is not supported, or differs between x and weight.
        hoconv.dispatch.implementations.ImplementationError: `impl` names one that cannot run here.
    """
    check_dense(x)
    check_dense(weight, "weight")
    device_type = x.device.type
    x, weight = autocast(device_type, x, weight)
    _check(x, weight, padding)
    name = resolve("dynamic_conv1d", impl, device_type)
    return OPERATOR.implementations[name].function(x, weight, padding)


def generate_and_convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, heads: int, padding: int, softmax: bool,
    impl: str,
) -> Tensor:  # fmt: skip
    """Convolves each sequence with kernels that a linear map of each of its steps generates.

    ``dynamic_conv1d(x, taps)`` with ``taps[b, h, :, t] = (weight @ x[b, :, t] + bias)[h * K :
    (h + 1) * K]``, normalised by a softmax if asked for. For the backward pass the implementations
    other than `reference` save x and the taps.

    Args:
        x: (B, C, T); float32, float64, float16 or bfloat16; any strides.
        weight: (H * K, C), H dividing C; dtype and device of x.
        bias: (H * K), or None.
        heads: H.
        padding, impl: as for :func:`dynamic_conv1d`.
        softmax: whether the taps of a kernel are normalised.

    Returns:
        (B, C, T), with the dtype of x. Under autocast all tensors are cast to its dtype.

    Raises:
        ValueError: a shape or `padding` does not fit.
        TypeError: a dtype is not supported, or differs from x's.
        hoconv.dispatch.implementations.ImplementationError: `impl` names one that cannot run here.
    """
    check_dense(x)
    check_dense(weight, "weight")
    if bias is not None:
        check_dense(bias, "bias")
    device_type = x.device.type
    if autocasts(device_type):
        x, weight, bias = autocast(device_type, x, weight, bias)
        with without_autocast(device_type):
            return generate_and_convolve(x, weight, bias, heads, padding, softmax, impl)
    check_dtypes(x, _TOLERANCES, weight=weight, bias=bias)
    name = resolve("dynamic_conv1d", impl, device_type)
    return _LAYER[name](x, weight, bias, heads, padding, softmax)[0]


def _check(x: Tensor, weight: Tensor, padding: int) -> None:
    if x.dim() != 3:
        raise ValueError(f"x: expected 3 dimensions (B, C, T), got shape {tuple(x.shape)}")
    if weight.dim() != 4:
        raise ValueError(
            f"weight: expected 4 dimensions (B or 1, H, K, T or 1), got shape {tuple(weight.shape)}"
        )
    (B, C, T), (batch, H, K, steps) = x.shape, weight.shape
    if batch not in (1, B) or steps not in (1, T):
        raise ValueError(
            f"weight: expected (B or 1, H, K, T or 1) with B, T = {B}, {T} as in x of shape "
            f"{tuple(x.shape)}, got shape {tuple(weight.shape)}"
        )
    if H < 1 or C % H:
        raise ValueError(
            f"weight: its number of heads (second dimension) must divide the {C} channels of x, "
            f"got {H}"
        )
    if K < 1:
        raise ValueError(f"weight: expected at least 1 tap (third dimension), got {K}")
    if isinstance(padding, bool) or not isinstance(padding, int) or not 0 <= padding < K:
        raise ValueError(
            f"padding: expected an int from 0 to K - 1 = {K - 1}, got {padding!r}; K - 1 is "
            f"causal, (K - 1) // 2 centred"
        )
    check_dtypes(x, _TOLERANCES, weight=weight)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Yields several numbers of taps, lengths, heads, paddings, shared weights and layouts."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device, dtype)

    def sample(
        name: str, B: int, C: int, T: int, K: int, H: int = 1, padding: int | None = None,
        shared: str = "",
    ) -> Sample:  # fmt: skip
        weight = draw(1 if "batch" in shared else B, H, K, 1 if "time" in shared else T)
        return Sample((draw(B, C, T), weight), {"padding": K - 1 if padding is None else padding},
                      name)  # fmt: skip

    for K in (1, 2, 3, 4, 5, 7, 8, 15, 31):
        yield sample(f"K={K}, causal", 2, 6, 37, K, H=2)
        yield sample(f"K={K}, centred", 2, 6, 37, K, H=2, padding=(K - 1) // 2)
    yield sample("no padding before", 2, 4, 21, 5, padding=0)
    for shared in ("batch", "time", "batch and time"):
        yield sample(f"shared over {shared}", 3, 8, 45, 7, H=2, padding=3, shared=shared)
        yield sample(f"shared over {shared}, one head", 2, 5, 11, 3, shared=shared)
        yield sample(f"shared over {shared}, long", 2, 36, 300, 31, shared=shared)
        yield sample(f"shared over {shared}, empty batch", 0, 4, 9, 3, H=2, shared=shared)
        yield sample(f"shared over {shared}, empty sequence", 2, 4, 0, 3, H=2, shared=shared)
    yield sample("one element", 1, 1, 1, 1)
    yield sample("one step", 3, 4, 1, 3, H=2, padding=1)
    yield sample("one step, shared over time", 3, 4, 1, 3, H=2, padding=1, shared="time")
    yield sample("fewer steps than taps", 2, 4, 3, 9, H=2)
    yield sample("fewer steps than taps, centred", 2, 4, 3, 10, H=2, padding=4)
    yield sample("as many heads as channels", 2, 7, 26, 5, H=7)
    yield sample("many channels a head", 1, 74, 40, 7, H=2)
    yield sample("more channels than fit a tile", 1, 150, 70, 7)
    yield sample("three channels a head", 2, 9, 70, 9, H=3)
    yield sample("as many heads as channels, shared over time", 2, 37, 140, 11, H=37, shared="time")
    yield sample("long", 1, 3, 700, 5, padding=2)
    yield sample("more taps than fit a tile", 1, 8, 150, 131, H=2, padding=60)
    yield sample("empty batch", 0, 4, 9, 3, H=2)
    yield sample("no channels", 2, 0, 9, 3)
    yield sample("empty sequence", 2, 4, 0, 3)

    weight = draw(2, 2, 5, 24)
    padding = {"padding": 4}
    yield Sample((draw(2, 24, 8).mT, weight), padding, "x as (B, T, C)")
    yield Sample((draw(24, 2, 8).permute(1, 2, 0), weight), padding, "x as (T, B, C)")
    yield Sample((draw(2, 8, 48)[..., ::2], weight), padding, "every other step")
    generated = draw(2, 24, 2 * 5).unflatten(2, (2, 5)).permute(0, 2, 3, 1)
    yield Sample((draw(2, 8, 24), generated), padding, "weight as a Linear gives it")
    yield Sample((draw(2, 24, 8).mT, generated), padding, "x and weight as (B, T, ...)")
    expanded = draw(1, 2, 5, 1).expand(2, -1, -1, 24)
    yield Sample((draw(1, 8, 24).expand(2, -1, -1), expanded), padding, "expanded")
    yield Sample((draw(2, 8, 25)[..., 1:], draw(2, 2, 5, 25)[..., 1:]), padding, "sliced")


def _cost(sample: Sample) -> Cost:
    x, weight = sample.args
    flops = 2 * x.numel() * weight.shape[2]
    return Cost(
        forward_bytes=2 * x.nbytes + weight.nbytes,
        backward_bytes=3 * x.nbytes + 2 * weight.nbytes,
        forward_flops=flops,
        backward_flops=2 * flops,
    )


def _benchmark_sample(steps: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x = torch.randn(16, 512, steps, device=device, dtype=dtype)
    weight = torch.randn(16, 8, 31, steps, device=device, dtype=dtype).softmax(2)
    return Sample((x, weight), {"padding": 30}, f"B=16, C=512, H=8, K=31, T={steps}")


def _unfold(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    """Computes it as users would with Tensor.unfold: a matrix product for every head and step."""
    (_, H, K, _), T = weight.shape, x.shape[2]
    windows = F.pad(x, (padding, K - 1 - padding)).unfold(2, K, 1)  # (B, C, T, K)
    windows = windows.unflatten(1, (H, -1)).transpose(2, 3)  # (B, H, T, C / H, K)
    out = windows @ weight.mT.unsqueeze(4)
    return out.squeeze(4).mT.reshape(-1, x.shape[1], T)


OPERATOR = declare(
    Operator(
        name="dynamic_conv1d",
        function=dynamic_conv1d,
        implementations={
            "reference": Implementation(reference.dynamic_conv1d),
            "cpp": compiled(ops.cpp.forward, ("cpu", "cuda"), ops.KERNELS["cpp"]),
            "triton": Implementation(
                ops.triton.forward, ("cuda",), load=triton.load, obstacle=triton.obstacle
            ),
            "cuda": compiled(ops.cuda.forward, ("cuda",), ops.KERNELS["cuda"]),
        },
        samples=_samples,
        tolerances=_TOLERANCES,
        cost=_cost,
        benchmark=Benchmark(
            axis="time steps (B = 16, C = 512, H = 8, K = 31)",
            sizes=(64, 128, 256, 512, 1024, 2048),
            sample=_benchmark_sample,
            baselines={"unfold": _unfold},
            grid=GRID,
            compiles=lambda sample: sample.args[1].shape[2] <= MOST_UNROLLED,
        ),
    )
)
