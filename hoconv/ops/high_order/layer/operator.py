"""The high-order layer: the public function and the operator's declaration.

B batch, C channels, G groups of channels, H height, W width, s kernel size of the generator.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hoconv.dispatch.declaration import Benchmark, Cost, Implementation, Operator, Sample, declare
from hoconv.dispatch.implementations import resolve
from hoconv.dispatch.registration import autocast, check_dense, check_dtypes, compiled
from hoconv.ops.high_order.conv2d.operator import OPERATOR as APPLICATION
from hoconv.ops.high_order.conv2d.window import (
    MAX_KERNEL_SIZE,
    Normalize,
    Padding,
    Pair,
    Window,
    check_normalize,
    make_pair,
)
from hoconv.ops.high_order.layer import ops

# Relative. At least twice those of the application alone: its kernels are computed too.
_TOLERANCES = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


def high_order_layer(
    x: Tensor,
    generator_weight: Tensor,
    generator_bias: Tensor | None = None,
    *,
    kernel_size: Pair = 5,
    dilation: Pair = 1,
    stride: Pair = 1,
    scale: Pair = 1,
    padding: Padding = "zeros",
    normalize: Normalize | None = None,
    residual: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Generates a kernel for every pixel by a convolution of x, and applies it to x.

    ``high_order_conv2d(x, weight)`` with ``weight = conv2d(x, generator_weight, generator_bias,
    stride, padding="same")``, its channel i * G + g being tap i of group g; see
    :func:`hoconv.high_order_conv2d` for the application and its options. With a scale, channel
    ``((i * G + g) * scale + a) * scale + b`` is that of output pixel (h * scale + a,
    w * scale + b), as ``pixel_shuffle`` arranges them. With ``padding="valid"`` the convolution is
    of the pixels in the middle of a window. The fused implementations never write the
    weights to memory, and keep them in float32 until they are applied. For the backward pass they
    save x and the generator's parameters only, and generate the weights again; `cuda` does so in
    memory, in the dtype of x, where that is faster.

    Args:
        x: (B, C, H, W); float32, float64, float16 or bfloat16; any strides.
        generator_weight: (kh * kw * G * scale * scale, C, s, s), G dividing C; dtype and device of
            x.
        generator_bias: as many as generator_weight has output channels, or None.
        kernel_size: k, or (kh, kw), from 1 to 31.
        dilation, stride, scale, padding, normalize: of the application.
        residual: whether x is added to the output, which must be as large.
        impl: ``"auto"``, ``"reference"``, ``"cpp"`` or ``"cuda"``.

    On a GPU, float32 follows ``torch.backends.cudnn.allow_tf32`` as PyTorch's convolutions do.

    Returns:
        (B, C, H', W'), with the dtype and the memory format of x. Under autocast all tensors are
        cast to its dtype, as a convolution's are.

    Raises:
        ValueError: a shape or an option does not fit.
        TypeError: a dtype is not supported, or differs from x's.
        hoconv.dispatch.implementations.ImplementationError: `impl` names one that cannot run here.
    """
    check_dense(x)
    check_dense(generator_weight, "generator_weight")
    if generator_bias is not None:
        check_dense(generator_bias, "generator_bias")
    device_type = x.device.type
    x, generator_weight, generator_bias = autocast(device_type, x, generator_weight, generator_bias)
    windows = kernel_size, dilation, stride, scale, padding
    _check(x, generator_weight, generator_bias, *windows, normalize, residual)
    name = resolve("high_order_layer", impl, device_type)
    return OPERATOR.implementations[name].function(
        x, generator_weight, generator_bias, *windows, normalize, residual
    )


def check_windows(
    kernel_size: Pair, dilation: Pair, stride: Pair, scale: Pair, padding: Padding,
    normalize: Normalize | None, residual: bool,
) -> Window:  # fmt: skip
    """Returns the windows of a layer's options; raises ValueError where one is out of range."""
    height, width = make_pair("kernel_size", kernel_size, MAX_KERNEL_SIZE)
    window = Window.of(height * width, (height, width), dilation, stride, scale, padding)
    check_normalize(normalize)
    if residual and not window.keeps_size():
        raise ValueError(
            "residual: expected False where a stride, a scale or padding='valid' makes the output "
            "of another size than x, got True"
        )
    return window


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kernel_size: Pair,
    dilation: Pair,
    stride: Pair,
    scale: Pair,
    padding: Padding,
    normalize: Normalize | None,
    residual: bool,
) -> None:
    if x.dim() != 4:
        raise ValueError(f"x: expected 4 dimensions (B, C, H, W), got shape {tuple(x.shape)}")
    window = check_windows(kernel_size, dilation, stride, scale, padding, normalize, residual)
    for axis, name, pixels in zip(window, ("height", "width"), x.shape[2:]):
        axis.check(name, pixels)
    C, shape = x.shape[1], weight.shape
    if len(shape) != 4 or shape[1] != C or shape[2] != shape[3]:
        raise ValueError(
            f"generator_weight: expected (k * k * G, {C}, s, s) for the {C} channels of x, "
            f"got shape {tuple(shape)}"
        )
    if shape[2] < 1:
        raise ValueError("generator_weight: expected a kernel of at least 1 x 1")
    generated = shape[0]
    taps = window.generated()
    if generated < taps or generated % taps or C % (generated // taps):
        raise ValueError(
            f"generator_weight: expected k * k * G = {taps} * G output channels, G dividing the "
            f"{C} channels of x, got {generated}"
        )
    if bias is not None and bias.shape != (generated,):
        raise ValueError(f"generator_bias: expected shape ({generated},), got {tuple(bias.shape)}")
    check_dtypes(x, _TOLERANCES, generator_weight=weight, generator_bias=bias)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Yields several sizes of both kernels, small and odd images, groups, options and layouts."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device, dtype)

    def sample(
        name: str, B: int, C: int, H: int, W: int, k: int = 5, s: int = 5, G: int = 1,
        bias: bool = True, **options: object,
    ) -> Sample:  # fmt: skip
        scale = (max(C, 1) * s * s) ** -0.5
        weight = draw(k * k * G, C, s, s) * scale
        arguments = (draw(B, C, H, W), weight, draw(k * k * G) if bias else None)
        return Sample(arguments, {"kernel_size": k, **options}, name)

    # The bias's gradient is a sum that can cancel; of k = 1 it is one number, nothing beside it.
    for k in (1, 2, 3, 4, 5, 6, 7, 11):
        yield sample(f"k={k}", 2, 3, 13, 17, k, bias=k > 1)
    for s in (1, 2, 3, 5, 7, 9):
        yield sample(f"generator {s} x {s}", 2, 3, 13, 17, 3, s)
    for C in (1, 2, 3, 4, 8, 16, 24):
        yield sample(f"{C} channels", 2, C, 9, 35, 3, 3)
    yield sample("wide rows", 1, 3, 9, 160)
    yield sample("tall", 1, 3, 70, 8)
    # At least 1: sums do not cancel, and no square is too small for half precision.
    pixel, *parameters = sample("", 1, 1, 1, 1, bias=False).args
    yield Sample((pixel.abs() + 1, *parameters), {"kernel_size": 5}, "one pixel")
    yield sample("image smaller than k", 2, 2, 3, 2, 7)
    yield sample("28 x 28", 4, 1, 28, 28)
    yield sample("k=7, generator 7 x 7", 1, 3, 20, 70, 7, 7)
    yield sample("groups", 2, 6, 12, 20, G=3)
    yield sample("depthwise", 2, 4, 10, 16, 3, 3, G=4)
    yield sample("dilation 2", 2, 3, 14, 18, dilation=2)
    yield sample("dilation 3, even k, groups", 2, 4, 15, 16, 4, G=2, dilation=3)
    yield sample("dilation larger than the image", 1, 2, 4, 16, 3, dilation=9)
    yield sample("no bias", 2, 3, 12, 20, bias=False)
    yield sample("softmax", 2, 3, 12, 20, normalize="softmax")
    yield sample("residual", 2, 3, 12, 20, residual=True)
    yield sample(
        "softmax, residual, groups, no bias, k=3", 2, 4, 12, 40, 3, 3, G=2, bias=False,
        normalize="softmax", residual=True,
    )  # fmt: skip
    yield sample("empty batch", 0, 3, 8, 8)
    yield sample("no channels", 2, 0, 8, 8, 3, 3)
    yield sample("no rows", 2, 4, 0, 8, 3, 4, G=2, normalize="softmax")
    yield sample("no columns", 2, 3, 8, 0, 1, 1, bias=False, residual=True)

    x, *parameters = sample("", 2, 3, 12, 32).args
    yield Sample((x.to(memory_format=torch.channels_last), *parameters), name="channels-last")
    yield Sample((draw(2, 3, 12, 65)[..., 1:], *parameters), name="sliced rows")
    yield Sample((draw(2, 3, 16, 12).mT, *parameters), name="transposed")
    yield Sample((draw(1, 3, 12, 16).expand(2, -1, -1, -1), *parameters), name="expanded")
    last = parameters[0].to(memory_format=torch.channels_last)
    yield Sample((x, last, parameters[1]), name="channels-last generator")


def _cost(sample: Sample) -> Cost:
    x, weight, bias = sample.args
    options = dict(sample.kwargs)
    kernel_size = make_pair("kernel_size", options.pop("kernel_size", 5))
    for other in ("normalize", "residual"):
        options.pop(other, None)
    window = Window.of(math.prod(kernel_size), kernel_size, **options)
    pixels = x.shape[0] * math.prod(window.output_size(*x.shape[2:]))
    parameters = weight.nbytes + (0 if bias is None else bias.nbytes)
    out = pixels * x.shape[1] * x.element_size()
    generator = 2 * pixels // (window.down.scale * window.across.scale) * weight.numel()
    application = 2 * pixels * x.shape[1] * math.prod(kernel_size)
    return Cost(
        forward_bytes=x.nbytes + out + parameters,
        backward_bytes=2 * x.nbytes + out + 2 * parameters,
        forward_flops=generator + application,
        backward_flops=2 * (generator + application),
    )


def _benchmark_sample(batch: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x = torch.randn(batch, 3, 224, 224, device=device, dtype=dtype)
    weight = torch.randn(25, 3, 5, 5, device=device, dtype=dtype) * 75**-0.5
    bias = torch.randn(25, device=device, dtype=dtype)
    return Sample((x, weight, bias), name=f"B={batch}, 3x224x224, k=5, generator 5 x 5")


def _unfold(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes it as users would with F.unfold; k = 5, one group."""
    kernels = F.conv2d(x, weight, bias, padding="same").flatten(2)[:, None]
    columns = F.unfold(x, 5, padding=2).unflatten(1, (x.shape[1], 25))  # (B, C, K, H * W)
    return (columns * kernels).sum(2).view_as(x)


def _compiled(impl: str, *devices: str) -> Implementation:
    # Where a layer is not fused, the high-order convolution computes it.
    application = APPLICATION.implementations[impl].libraries
    run = functools.partial(ops.run, impl)
    return compiled(run, devices, ops.KERNELS[impl], *application)


OPERATOR = declare(
    Operator(
        name="high_order_layer",
        function=high_order_layer,
        implementations={
            "reference": Implementation(functools.partial(ops.run, "reference")),
            "cpp": _compiled("cpp", "cpu", "cuda"),
            "cuda": _compiled("cuda", "cuda"),
        },
        samples=_samples,
        tolerances=_TOLERANCES,
        cost=_cost,
        benchmark=Benchmark(
            axis="batch size (3 x 224 x 224, k = 5, generator 5 x 5)",
            sizes=(8, 16, 32, 64, 128, 256, 512),
            sample=_benchmark_sample,
            baselines={"unfold": _unfold},
        ),
    )
)
