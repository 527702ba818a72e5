"""The high-order convolution as a layer: a convolution generates the kernel of every pixel.

B batch, C channels, G groups of channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hoconv.dispatch.implementations import check_name, resolve
from hoconv.dispatch.registration import FixedAttributes, autocast, computes_as_made, get_parameter
from hoconv.ops.high_order.conv2d.operator import high_order_conv2d
from hoconv.ops.high_order.conv2d.window import Normalize, Padding, Pair, Window, make_pair
from hoconv.ops.high_order.layer.operator import OPERATOR, check_windows, high_order_layer
from hoconv.ops.high_order.layer.reference import arrange, crop
from hoconv.ops.high_order.layer.rule import why_unfused


class HighOrderConv2d(FixedAttributes):
    """A convolution whose kernels are generated, for every pixel, by another convolution.

    The generator, an ``nn.Conv2d`` over the same input, gives kh * kw weights for each pixel of the
    output and each group: channel i * G + g is tap i of group g, and with a scale there are such
    channels for every fraction of a pixel, as ``pixel_shuffle`` has them.
    :func:`hoconv.high_order_layer` takes its parameters, and the implementations other than
    `reference` compute both steps in one kernel where they can (:meth:`why_unfused`). A generator
    that has hooks, as pruning adds them, or that another module has replaced, is called, and
    :func:`hoconv.high_order_conv2d` applies what it returns. One state dict
    (``generator.weight``, ``generator.bias``) serves every implementation.
    With ``normalize="softmax"`` the weights of a pixel are positive and sum to one, as in dynamic
    upsampling and lightweight convolutions.

    Args:
        channels: C, of the input and of the output.
        kernel_size: k, or (kh, kw), from 1 to 31, odd or even.
        generator_kernel_size: that of the generator, which pads to keep the size of the image and
            has the stride of the layer; then it is odd.
        groups: G, dividing `channels`: the channels of a group share their kernels.
        bias: whether the generator has a bias.
        dilation, stride, scale, padding, normalize: as those of :func:`hoconv.high_order_conv2d`.
            With ``padding="valid"`` the generator sees the pixels in the middle of a window only.
        residual: whether the input is added to the output, which must be as large.
        impl: ``"auto"``, ``"reference"``, ``"cpp"`` or ``"cuda"``.

    Later calls follow the attributes as they are then; `channels`, `kernel_size`, `groups`,
    `stride` and `scale`, by which the generator was made, cannot change.

    Shape:
        input (B, C, H, W) -> output (B, C, H', W'), as that function's.

    Raises:
        ValueError: an argument is out of range.
    """

    operator = OPERATOR
    fixed = "channels", "kernel_size", "groups", "stride", "scale"

    def __init__(
        self,
        channels: int,
        kernel_size: Pair = 5,
        *,
        generator_kernel_size: int = 5,
        groups: int = 1,
        bias: bool = True,
        dilation: Pair = 1,
        stride: Pair = 1,
        scale: Pair = 1,
        padding: Padding = "zeros",
        normalize: Normalize | None = None,
        residual: bool = False,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        if channels < 1:
            raise ValueError(f"channels: expected at least 1, got {channels}")
        if generator_kernel_size < 1:
            raise ValueError(
                f"generator_kernel_size: expected at least 1, got {generator_kernel_size}"
            )
        if groups < 1 or channels % groups:
            raise ValueError(f"groups: expected a divisor of channels={channels}, got {groups}")
        window = check_windows(kernel_size, dilation, stride, scale, padding, normalize, residual)
        check_name(OPERATOR, impl)
        self.channels = channels
        self.kernel_size = kernel_size
        self.groups = groups
        self.dilation = dilation
        self.stride = stride
        self.scale = scale
        self.padding: Padding = padding
        self.normalize: Normalize | None = normalize
        self.residual = residual
        self.impl = impl
        strides = window.down.stride, window.across.stride
        if generator_kernel_size % 2 == 0 and strides != (1, 1):
            raise ValueError(
                f"generator_kernel_size: expected an odd number where there is a stride, got "
                f"{generator_kernel_size}"
            )
        self.generator = nn.Conv2d(
            channels,
            window.generated() * groups,
            generator_kernel_size,
            stride=strides,
            padding=_padding(generator_kernel_size, strides),
            bias=bias,
        )

    def forward(self, x: Tensor) -> Tensor:
        generator: Any = self._modules["generator"]  # sooner than by Module.__getattr__
        if not _computes_as_made(generator, self.stride):
            return self._call_generator(x)
        return high_order_layer(
            x,
            get_parameter(generator, "weight"),
            get_parameter(generator, "bias"),
            kernel_size=self.kernel_size,
            dilation=self.dilation,
            stride=self.stride,
            scale=self.scale,
            padding=self.padding,
            normalize=self.normalize,
            residual=self.residual,
            impl=self.impl,
        )

    def _window(self) -> Window:
        return check_windows(
            self.kernel_size, self.dilation, self.stride, self.scale, self.padding,
            self.normalize, self.residual,
        )  # fmt: skip

    def _call_generator(self, x: Tensor) -> Tensor:
        window = self._window()
        for axis, name, pixels in zip(window, ("height", "width"), x.shape[2:], strict=True):
            axis.check(name, pixels)
        generated = self.generator(crop(x, window))
        channels = window.generated() * self.groups
        height, width = window.output_size(*x.shape[2:])
        expected = (
            x.shape[0], channels, height // window.down.scale, width // window.across.scale
        )  # fmt: skip
        if generated.shape != expected:
            raise ValueError(
                f"what the generator returns: expected shape {expected}, "
                f"got {tuple(generated.shape)}"
            )
        x, generated = autocast(x.device.type, x, generated)
        out = high_order_conv2d(
            x, arrange(generated, window), dilation=self.dilation, stride=self.stride,
            scale=self.scale, padding=self.padding, normalize=self.normalize,
            kernel_size=self.kernel_size, impl=self.impl,
        )  # fmt: skip
        return x + out if self.residual else out

    @torch.no_grad()
    def why_unfused(self) -> str | None:
        """Returns why a call would generate and apply the kernels in two steps, in words; None if
        a fused kernel does both. Its backward pass may still take two, where that is faster.

        The answer is for the device and dtype of the parameters, for autocast's dtype if that is
        on, and for the implementation that `impl` chooses there, which is compiled if necessary.

        Raises:
            hoconv.dispatch.implementations.ImplementationError: that implementation cannot run.
        """
        if not _computes_as_made(self.generator, self.stride):
            return "its generator has hooks, or is no convolution as the layer makes it"
        device_type = self.generator.weight.device.type
        weight = autocast(device_type, self.generator.weight)
        impl = resolve(OPERATOR.name, self.impl, device_type)
        return why_unfused(impl, weight, self._window(), self.normalize)

    def extra_repr(self) -> str:
        return (
            f"{self.channels}, kernel_size={self.kernel_size}, groups={self.groups}, "
            f"dilation={self.dilation}, stride={self.stride}, scale={self.scale}, "
            f"padding={self.padding!r}, normalize={self.normalize!r}, residual={self.residual}, "
            f"impl={self.impl!r}"
        )


def _computes_as_made(generator: Any, stride: Pair) -> bool:
    """Returns whether a generator is the convolution that its parameters say, and nothing else
    happens when it is called."""
    return (
        computes_as_made(generator, nn.Conv2d)
        and generator.stride == make_pair("stride", stride)
        and generator.padding == _padding(generator.kernel_size[0], generator.stride)
        and generator.padding_mode == "zeros"
        and generator.dilation == (1, 1)
        and generator.groups == 1
    )


def _padding(kernel_size: int, stride: tuple[int, int]) -> str | tuple[int, int]:
    """Returns the padding of a generator: PyTorch takes "same" without a stride only."""
    before = (kernel_size - 1) // 2
    return "same" if stride == (1, 1) else (before, before)
