"""The high-order convolution: the public function and the operator's declaration.

B batch, C channels, G groups of channels, H height, W width, k kernel size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hoconv.dispatch.declaration import Benchmark, Cost, Implementation, Operator, Sample, declare
from hoconv.dispatch.implementations import resolve
from hoconv.dispatch.registration import autocast, check_dense, check_dtypes, compiled
from hoconv.ops.high_order.conv2d import ops, reference

MAX_KERNEL_SIZE = 11
_KERNEL_SIZES = {k * k: k for k in range(1, MAX_KERNEL_SIZE + 1)}
# Relative. Half precision is accumulated in float32 and rounded once: its machine epsilon. float32
# and float64 round every addition: about 8 and 45 epsilons.
_TOLERANCES = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}


def high_order_conv2d(
    x: Tensor, weight: Tensor, *, dilation: int = 1, impl: str = "auto"
) -> Tensor:
    """Applies to every pixel the k x k kernel that `weight` holds for it.

    ``out[b, c, h, w] = sum over i of weight[i, b, g(c), h, w] * x[b, c, h + dy(i), w + dx(i)]``
    with tap i at ``dy = dilation * (i // k) - before``, ``dx = dilation * (i % k) - before``,
    ``before = dilation * (k - 1) // 2`` and ``g(c) = c // (C / G)``. Outside the image x is zero:
    the padding is `before` at the top and left and ``dilation * (k - 1) - before`` at the bottom
    and right. Half precision is accumulated in float32.

    Known as dynamic filtering (Jia et al., Dynamic Filter Networks, NeurIPS 2016), and with a
    convolution generating the kernels, as the layer :class:`hoconv.HighOrderConv2d`.

    Args:
        x: (B, C, H, W); float32, float64, float16 or bfloat16; any strides.
        weight: (k * k, B, G, H, W), k from 1 to 11, G dividing C; dtype and device of x; any
            strides, so that a generator's output needs no copy.
        dilation: distance between taps in pixels, at least 1.
        impl: ``"auto"``, ``"reference"``, ``"cpp"`` or ``"cuda"``.

    Returns:
        (B, C, H, W), with the dtype and the memory format of x. Under autocast x and weight are
        cast to its dtype, as a convolution's are.

    Raises:
        ValueError: a shape or `dilation` does not fit.
        TypeError: a dtype is not supported, or differs between x and weight.
        hoconv.dispatch.implementations.ImplementationError: `impl` names one that cannot run here.
    """
    check_dense(x)
    check_dense(weight, "weight")
    device_type = x.device.type
    x, weight = autocast(device_type, x, weight)
    _check(x, weight, dilation)
    name = resolve("high_order_conv2d", impl, device_type)
    return OPERATOR.implementations[name].function(x, weight, dilation)


def _check(x: Tensor, weight: Tensor, dilation: int) -> None:
    if x.dim() != 4:
        raise ValueError(f"x: expected 4 dimensions (B, C, H, W), got shape {tuple(x.shape)}")
    if weight.dim() != 5:
        raise ValueError(
            f"weight: expected 5 dimensions (k * k, B, G, H, W), got shape {tuple(weight.shape)}"
        )
    taps, B, G, H, W = weight.shape
    if int(taps) not in _KERNEL_SIZES:
        raise ValueError(
            f"weight: its first dimension must be k * k for a kernel size k from 1 to "
            f"{MAX_KERNEL_SIZE}, got {taps}"
        )
    if (x.shape[0], *x.shape[2:]) != (B, H, W):
        raise ValueError(
            f"weight: expected (k * k, B, G, H, W) with B, H, W = {x.shape[0]}, {x.shape[2]}, "
            f"{x.shape[3]} as in x of shape {tuple(x.shape)}, got shape {tuple(weight.shape)}"
        )
    if G < 1 or x.shape[1] % G:
        raise ValueError(
            f"weight: its number of groups (third dimension) must divide the {x.shape[1]} "
            f"channels of x, got {G}"
        )
    if isinstance(dilation, bool) or not isinstance(dilation, int) or dilation < 1:
        raise ValueError(f"dilation: expected an int of at least 1, got {dilation!r}")
    check_dtypes(x, _TOLERANCES, weight=weight)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Yields several kernel sizes, small and odd images, groups, dilations and layouts."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device, dtype)

    def sample(name: str, B: int, C: int, H: int, W: int, k: int, G: int = 1, dilation: int = 1):
        return Sample((draw(B, C, H, W), draw(k * k, B, G, H, W)), {"dilation": dilation}, name)

    for k in range(1, MAX_KERNEL_SIZE + 1):
        yield sample(f"k={k}", 2, 3, 13, 17, k)
    for k in (3, 5, 7):
        yield sample(f"k={k}, wide rows", 2, 3, 9, 160, k)
    yield sample("one pixel", 1, 1, 1, 1, 5)
    yield sample("image smaller than k", 2, 2, 3, 2, 7)
    yield sample("tall", 1, 3, 70, 8, 5)
    yield sample("one row", 3, 2, 1, 64, 5)
    yield sample("one column", 3, 2, 33, 1, 3)
    yield sample("28 x 28", 4, 8, 28, 28, 5)
    yield sample("many channels", 2, 37, 16, 24, 3)
    yield sample("many channels, k=5", 1, 64, 8, 32, 5)
    yield sample("groups", 2, 6, 12, 20, 5, G=3)
    yield sample("depthwise", 2, 8, 10, 16, 3, G=8)
    yield sample("dilation 2", 2, 3, 14, 18, 5, dilation=2)
    yield sample("dilation 3, even k, groups", 2, 4, 15, 16, 4, G=2, dilation=3)
    yield sample("dilation larger than the image", 1, 2, 4, 16, 3, dilation=9)
    yield sample("empty batch", 0, 3, 8, 8, 5)
    yield sample("no channels", 2, 0, 8, 8, 3)
    yield sample("empty image", 2, 3, 0, 8, 3)

    x, generated = draw(2, 6, 12, 32), draw(2, 25 * 2, 12, 32)
    weight = generated.unflatten(1, (25, 2)).transpose(0, 1)
    yield Sample((x, weight), name="generator's output")
    last = torch.channels_last
    x, generated = x.to(memory_format=last), generated.to(memory_format=last)
    weight = generated.unflatten(1, (25, 2)).transpose(0, 1)
    yield Sample((x, weight), name="channels-last")
    yield Sample((x, weight.contiguous()), name="channels-last x only")
    yield Sample((draw(2, 3, 12, 65)[..., 1:], draw(9, 2, 1, 12, 65)[..., 1:]), name="sliced rows")
    yield Sample((draw(2, 3, 16, 12).mT, draw(9, 2, 1, 16, 12).mT), name="transposed")
    yield Sample((draw(2, 3, 12, 32)[..., ::2], draw(9, 2, 1, 12, 16)), name="every other column")
    one_image, one_kernel = draw(1, 3, 12, 16), draw(9, 1, 1, 1, 1)
    expanded = one_image.expand(2, -1, -1, -1), one_kernel.expand(-1, 2, 1, 12, 16)
    yield Sample(expanded, name="expanded")


def _cost(sample: Sample) -> Cost:
    x, weight = sample.args
    image, kernels = x.nbytes, weight.nbytes
    flops = 2 * weight.numel() * x.shape[1] // weight.shape[2]
    return Cost(
        forward_bytes=image + kernels + image,
        backward_bytes=2 * (image + kernels) + image,
        forward_flops=flops,
        backward_flops=2 * flops,
    )


def _benchmark_sample(batch: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x = torch.randn(batch, 3, 224, 224, device=device, dtype=dtype)
    weight = torch.randn(25, batch, 1, 224, 224, device=device, dtype=dtype)
    return Sample((x, weight), name=f"B={batch}, 3x224x224, k=5")


def _unfold(x: Tensor, weight: Tensor) -> Tensor:
    """Computes it as users would with F.unfold; k = 5, one group."""
    columns = F.unfold(x, 5, padding=2).unflatten(1, (x.shape[1], 25))  # (B, C, K, H * W)
    return (columns * weight[:, :, 0].flatten(2).transpose(0, 1)[:, None]).sum(2).view_as(x)


OPERATOR = declare(
    Operator(
        name="high_order_conv2d",
        function=high_order_conv2d,
        implementations={
            "reference": Implementation(reference.high_order_conv2d),
            "cpp": compiled(ops.cpp.forward, ("cpu", "cuda"), ops.KERNELS["cpp"]),
            "cuda": compiled(ops.cuda.forward, ("cuda",), ops.KERNELS["cuda"]),
        },
        samples=_samples,
        tolerances=_TOLERANCES,
        cost=_cost,
        benchmark=Benchmark(
            axis="batch size (3 x 224 x 224, k = 5)",
            sizes=(8, 16, 32, 64, 128, 256, 512),
            sample=_benchmark_sample,
            baselines={"unfold": _unfold},
        ),
    )
)
