"""The high-order convolution: the public function and the operator's declaration.

B batch, C channels, G groups of channels, H height, W width, k kernel size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

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
from hoconv.dispatch.registration import Op, autocast, check_dense, check_dtypes, compiled
from hoconv.ops.high_order.conv2d import ops, reference
from hoconv.ops.high_order.conv2d.grid import GRID
from hoconv.ops.high_order.conv2d.window import (
    Normalize,
    Padding,
    Pair,
    Window,
    check_normalize,
    make_pair,
    normalize_taps,
)

# Relative. Half precision is accumulated in float32 and rounded once: its machine epsilon. float32
# and float64 round every addition: about 8 and 45 epsilons.
TOLERANCES = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}


def high_order_conv2d(
    x: Tensor,
    weight: Tensor,
    *,
    dilation: Pair = 1,
    stride: Pair = 1,
    scale: Pair = 1,
    padding: Padding = "zeros",
    normalize: Normalize | None = None,
    kernel_size: Pair | None = None,
    impl: str = "auto",
) -> Tensor:
    """Applies to every pixel of the output the kernel that `weight` holds for it.

    ``out[b, c, h, w] = sum over i, j of weight[i * kw + j, b, g(c), h, w] * x[b, c, y(h, i),
    z(w, j)]`` with ``y(h, i) = h // scale * stride + dilation * i - before``, z likewise,
    ``before = dilation * (kh - 1) // 2`` and ``g(c) = c // (C / G)``. So `before` pixels are padded
    at the top and left, and ``dilation * (k - 1) - before`` at the bottom and right. Half precision
    is accumulated in float32.

    :func:`hoconv.splat` is its adjoint in x. Known as dynamic filtering (Jia et al., Dynamic Filter
    Networks, NeurIPS 2016), and with a convolution generating the kernels, as the layer
    :class:`hoconv.HighOrderConv2d`.

    Args:
        x: (B, C, H, W); float32, float64, float16 or bfloat16; any strides.
        weight: (kh * kw, B, G, H', W'), G dividing C; dtype and device of x; any strides, so that a
            generator's output needs no copy. ``H' = ceil(H / stride) * scale``, W' likewise; with
            ``padding="valid"`` H is less by ``dilation * (kh - 1)``.
        dilation: distance between taps in pixels; this and the next two are ints of at least 1, or
            pairs (down, across).
        stride: pixels of x from the kernel of an output pixel to the next.
        scale: output pixels along an axis that gather around the same pixel of x, each by a kernel
            of its own: Wang et al., CARAFE, ICCV 2019.
        padding: what a tap reads outside the image: ``"zeros"``; ``"replicate"``, the nearest
            pixel; ``"reflect"``, the pixel mirrored at the border's, of an image larger than the
            padding. ``"valid"``: there are output pixels only where no tap is outside, and `before`
            is 0.
        normalize: ``"softmax"`` over the taps of a pixel, ``"sum"`` to divide them by their sum, or
            None.
        kernel_size: k, or (kh, kw) from 1 to 31; None: the taps are those of a square.
        impl: ``"auto"``, ``"reference"``, ``"cpp"`` or ``"cuda"``.

    Returns:
        (B, C, H', W'), with the dtype and the memory format of x. Under autocast x and weight are
        cast to its dtype, as a convolution's are.

    Raises:
        ValueError: a shape or an option does not fit.
        TypeError: a dtype is not supported, or differs between x and weight.
        hoconv.dispatch.implementations.ImplementationError: `impl` names one that cannot run here.
    """
    x, weight = prepare(x, weight)
    window = Window.of(weight.shape[0], kernel_size, dilation, stride, scale, padding)
    for axis, name, pixels in zip(window, ("height", "width"), x.shape[2:]):
        axis.check(name, pixels)
    check_size(weight, (x.shape[0], *window.output_size(*x.shape[2:])), x)
    check_normalize(normalize)
    name = resolve("high_order_conv2d", impl, x.device.type)
    return CONVOLVE[name](x, normalize_taps(weight, normalize), window)


def prepare(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x and weight as autocast casts them; raises an error where they fit no call of the
    convolution, or of its adjoint."""
    check_dense(x)
    check_dense(weight, "weight")
    x, weight = autocast(x.device.type, x, weight)
    if x.dim() != 4:
        raise ValueError(f"x: expected 4 dimensions (B, C, H, W), got shape {tuple(x.shape)}")
    if weight.dim() != 5:
        raise ValueError(
            f"weight: expected 5 dimensions (taps, B, G, H, W), got shape {tuple(weight.shape)}"
        )
    G = weight.shape[2]
    if G < 1 or x.shape[1] % G:
        raise ValueError(
            f"weight: its number of groups (third dimension) must divide the {x.shape[1]} "
            f"channels of x, got {G}"
        )
    check_dtypes(x, TOLERANCES, weight=weight)
    return x, weight


def check_size(weight: Tensor, expected: tuple[int, int, int], x: Tensor) -> None:
    """Raises ValueError where weights are not for this batch, height and width."""
    if (weight.shape[1], *weight.shape[3:]) != expected:
        sizes = ", ".join(map(str, expected))
        raise ValueError(
            f"weight: expected (taps, B, G, H, W) with B, H, W = {sizes} for x of shape "
            f"{tuple(x.shape)} and these options, got shape {tuple(weight.shape)}"
        )


def _call_op(op: Op, x: Tensor, weight: Tensor, window: Window) -> Tensor:
    return op(x, weight, window.numbers())


# Implementation -> what computes the convolution, of x, weight and a window.
CONVOLVE: dict[str, Callable[[Tensor, Tensor, Window], Tensor]] = {
    "reference": reference.high_order_conv2d,
    "cpp": functools.partial(_call_op, ops.cpp.forward),
    "cuda": functools.partial(_call_op, ops.cuda.forward),
}


def _run(
    impl: str, x: Tensor, weight: Tensor, dilation: Pair, stride: Pair, scale: Pair,
    padding: Padding, normalize: Normalize | None, kernel_size: Pair | None,
) -> Tensor:  # fmt: skip
    window = Window.of(weight.shape[0], kernel_size, dilation, stride, scale, padding)
    return CONVOLVE[impl](x, normalize_taps(weight, normalize), window)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Yields kernel sizes, small and odd images, groups, windows of all kinds and layouts."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device, dtype)

    def sample(name: str, B: int, C: int, H: int, W: int, k: int, G: int = 1, dilation: int = 1):
        return Sample((draw(B, C, H, W), draw(k * k, B, G, H, W)), {"dilation": dilation}, name)

    for k in range(1, 12):
        yield sample(f"k={k}", 2, 3, 13, 17, k)
    for k in (3, 5, 7, 9, 11):
        yield sample(f"k={k}, wide rows", 2, 3, 9, 160, k)
    yield sample("one pixel", 1, 1, 1, 1, 5)
    yield sample("image smaller than k", 2, 2, 3, 2, 7)
    yield sample("tall", 1, 3, 70, 8, 5)
    yield sample("one row", 3, 2, 1, 64, 5)
    yield sample("one column", 3, 2, 33, 1, 3)
    yield sample("28 x 28", 4, 8, 28, 28, 5)
    yield sample("many channels", 2, 37, 16, 24, 3)
    yield sample("many channels, k=5", 1, 64, 8, 32, 5)
    yield sample("many channels, k=7", 1, 32, 8, 32, 7, G=2)
    yield sample("groups", 2, 6, 12, 20, 5, G=3)
    yield sample("depthwise", 2, 8, 10, 16, 3, G=8)
    yield sample("dilation 2", 2, 3, 14, 18, 5, dilation=2)
    yield sample("dilation 3, even k, groups", 2, 4, 15, 16, 4, G=2, dilation=3)
    yield sample("dilation larger than the image", 1, 2, 4, 16, 3, dilation=9)
    yield from _windowed_samples(draw)
    yield sample("empty batch", 0, 3, 8, 8, 5)
    yield sample("no channels", 2, 0, 8, 8, 3)
    yield sample("empty image", 2, 3, 0, 8, 3)

    def generated(memory_format: torch.memory_format, C: int, k: int, G: int, H: int, W: int):
        x, generated = draw(2, C, H, W), draw(2, k * k * G, H, W)
        weight = generated.contiguous(memory_format=memory_format).unflatten(1, (k * k, G))
        return x.contiguous(memory_format=memory_format), weight.transpose(0, 1)

    last = torch.channels_last
    yield Sample(generated(torch.contiguous_format, 6, 5, 2, 12, 32), name="generator's output")
    x, weight = generated(last, 6, 5, 2, 12, 32)
    yield Sample((x, weight), name="channels-last")
    yield Sample((x, weight.contiguous()), name="channels-last x only")
    # Threads share the channels of a group: one, two, eight, or all of a warp.
    for C, k, G, dilation in ((8, 5, 1, 1), (32, 7, 2, 2), (128, 4, 2, 3), (256, 3, 1, 1)):
        name = f"channels-last, {C} channels, {G} groups, k={k}, dilation {dilation}"
        yield Sample(generated(last, C, k, G, 3, 9), {"dilation": dilation}, name=name)
    # Kernels of their own: a scale, and many channels of a group, not a power of two.
    for memory_format in (last, torch.contiguous_format):
        for scale, stride, H, W in ((2, 1, 5, 18), ((1, 3), (2, 3), 9, 20)):
            window = Window.of(15, (3, 5), 1, stride, scale)
            x, weight = draw(2, 80, H, W), draw(2, 30, *window.output_size(H, W))
            x, weight = (t.contiguous(memory_format=memory_format) for t in (x, weight))
            options = {"kernel_size": (3, 5), "stride": stride, "scale": scale}
            name = f"many channels, scale {scale}" + (", channels-last" * (memory_format == last))
            args = x, weight.unflatten(1, (15, 2)).transpose(0, 1)
            yield Sample(args, options, name)
    yield Sample((draw(2, 3, 12, 65)[..., 1:], draw(9, 2, 1, 12, 65)[..., 1:]), name="sliced rows")
    yield Sample((draw(2, 3, 16, 12).mT, draw(9, 2, 1, 16, 12).mT), name="transposed")
    yield Sample((draw(2, 3, 12, 32)[..., ::2], draw(9, 2, 1, 12, 16)), name="every other column")
    one_image, one_kernel = draw(1, 3, 12, 16), draw(9, 1, 1, 1, 1)
    expanded = one_image.expand(2, -1, -1, -1), one_kernel.expand(-1, 2, 1, 12, 16)
    yield Sample(expanded, name="expanded")


def _windowed_samples(draw: Callable[..., Tensor]) -> Iterator[Sample]:
    """Yields windows with a stride, a scale, each padding, and kernels that are not square; every
    other one with channels last, too."""
    cases: list[tuple[str, tuple[int, int, int, int, int], dict[str, Any]]] = [
        ("stride 2", (2, 6, 13, 16, 3), {"stride": 2, "kernel_size": 7}),
        ("stride (3, 1), dilation 2", (2, 4, 11, 9, 2), {"stride": (3, 1), "dilation": 2}),
        ("scale 2", (2, 8, 5, 9, 1), {"scale": 2, "kernel_size": 5}),
        ("scale (1, 3), stride 2, even k", (2, 4, 6, 7, 2),
         {"scale": (1, 3), "stride": 2, "kernel_size": 4}),
        ("valid", (2, 3, 9, 12, 1), {"padding": "valid", "kernel_size": 5}),
        ("valid, stride 2, scale 2", (2, 4, 10, 11, 1),
         {"padding": "valid", "stride": 2, "scale": 2}),
        ("replicate", (2, 4, 6, 5, 1), {"padding": "replicate", "kernel_size": 7}),
        ("replicate, stride 2, even k, dilation 2", (2, 3, 9, 8, 1),
         {"padding": "replicate", "stride": 2, "dilation": 2, "kernel_size": 4}),
        ("reflect", (2, 4, 7, 9, 4), {"padding": "reflect", "kernel_size": (5, 6)}),
        ("reflect, scale 2", (2, 2, 5, 6, 1), {"padding": "reflect", "scale": 2}),
        ("31 x 2", (2, 2, 6, 9, 1), {"kernel_size": (31, 2)}),
        ("2 x 5", (2, 3, 8, 10, 1), {"kernel_size": (2, 5)}),
        ("9 x 1, dilation (1, 7)", (2, 2, 8, 10, 1), {"kernel_size": (9, 1), "dilation": (1, 7)}),
    ]  # fmt: skip
    for channels_last in (False, True):
        for name, (B, C, H, W, G), options in cases[::2] if channels_last else cases:
            kernel_size = make_pair("kernel_size", options.get("kernel_size", 3))
            taps = kernel_size[0] * kernel_size[1]
            window = Window.of(taps, **{"kernel_size": kernel_size, **options})
            # Where they are last, channels fill several registers.
            C = C if not channels_last else 32 * G
            x, weight = draw(B, C, H, W), draw(taps, B, G, *window.output_size(H, W))
            if channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
                name += f", channels-last, {C} channels"
            yield Sample((x, weight), options, name)


def cost(sample: Sample) -> Cost:
    x, weight = sample.args
    image, kernels = x.nbytes, weight.nbytes
    out = x.element_size() * x.shape[0] * x.shape[1] * weight.shape[3] * weight.shape[4]
    flops = 2 * weight.numel() * x.shape[1] // weight.shape[2]
    return Cost(
        forward_bytes=image + kernels + out,
        backward_bytes=2 * (image + kernels) + out,
        forward_flops=flops,
        backward_flops=2 * flops,
    )


def benchmark_sample(batch: int, device: torch.device, dtype: torch.dtype) -> Sample:
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
            "reference": Implementation(functools.partial(_run, "reference")),
            "cpp": compiled(functools.partial(_run, "cpp"), ("cpu", "cuda"), ops.KERNELS["cpp"]),
            "cuda": compiled(functools.partial(_run, "cuda"), ("cuda",), ops.KERNELS["cuda"]),
        },
        samples=samples,
        tolerances=TOLERANCES,
        cost=cost,
        benchmark=Benchmark(
            axis="batch size (3 x 224 x 224, k = 5)",
            sizes=(8, 16, 32, 64, 128, 256, 512),
            sample=benchmark_sample,
            baselines={"unfold": _unfold},
            grid=GRID,
            compiles=lambda sample: len(sample.args[1]) <= MOST_UNROLLED,
        ),
    )
)
