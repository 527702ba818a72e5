"""The high-order convolution as a layer: a convolution generates the kernel of every pixel.

B batch, C channels, G groups of channels, H height, W width, k kernel size.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from hoconv.dispatch.implementations import check_name, resolve
from hoconv.dispatch.registration import FixedAttributes, autocast, computes_as_made, get_parameter
from hoconv.ops.high_order.conv2d.operator import high_order_conv2d
from hoconv.ops.high_order.layer.operator import (
    MAX_KERNEL_SIZE,
    OPERATOR,
    check_normalize,
    high_order_layer,
)
from hoconv.ops.high_order.layer.rule import why_unfused


class HighOrderConv2d(FixedAttributes):
    """A convolution whose kernels are generated, for every pixel, by another convolution.

    The generator, an ``nn.Conv2d`` over the same input, gives k * k weights for each pixel and
    group: channel i * G + g is tap i of group g. :func:`hoconv.high_order_layer` takes its
    parameters, and the implementations other than `reference` compute both steps in one kernel
    where they can (:meth:`why_unfused`). A generator that has hooks, as pruning adds them, or that
    another module has replaced, is called, and :func:`hoconv.high_order_conv2d` applies what it
    returns, (B, k * k * G, H, W). One state dict (``generator.weight``, ``generator.bias``) serves
    every implementation.
    With ``normalize="softmax"`` the weights of a pixel are positive and sum to one, as in dynamic
    upsampling and lightweight convolutions.

    Args:
        channels: C, of the input and of the output.
        kernel_size: k, from 1 to 11, odd or even.
        generator_kernel_size: that of the generator, which pads to keep the size of the image.
        groups: G, dividing `channels`: the channels of a group share their kernels.
        bias: whether the generator has a bias.
        dilation: distance between taps in pixels.
        normalize: ``"softmax"`` over the k * k taps, or None.
        residual: whether the input is added to the output.
        impl: ``"auto"``, ``"reference"``, ``"cpp"`` or ``"cuda"``.

    Later calls follow the attributes as they are then; `channels`, `kernel_size` and `groups`, by
    which the parameters were made, cannot change.

    Shape:
        input (B, C, H, W) -> output (B, C, H, W).

    Raises:
        ValueError: an argument is out of range.
    """

    operator = OPERATOR
    fixed = "channels", "kernel_size", "groups"

    def __init__(
        self,
        channels: int,
        kernel_size: int = 5,
        *,
        generator_kernel_size: int = 5,
        groups: int = 1,
        bias: bool = True,
        dilation: int = 1,
        normalize: Literal["softmax"] | None = None,
        residual: bool = False,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        if channels < 1:
            raise ValueError(f"channels: expected at least 1, got {channels}")
        if not 1 <= kernel_size <= MAX_KERNEL_SIZE:
            raise ValueError(f"kernel_size: expected 1 to {MAX_KERNEL_SIZE}, got {kernel_size}")
        if generator_kernel_size < 1:
            raise ValueError(
                f"generator_kernel_size: expected at least 1, got {generator_kernel_size}"
            )
        if groups < 1 or channels % groups:
            raise ValueError(f"groups: expected a divisor of channels={channels}, got {groups}")
        if dilation < 1:
            raise ValueError(f"dilation: expected at least 1, got {dilation}")
        check_normalize(normalize)
        check_name(OPERATOR, impl)
        self.channels = channels
        self.kernel_size = kernel_size
        self.groups = groups
        self.dilation = dilation
        self.normalize: Literal["softmax"] | None = normalize
        self.residual = residual
        self.impl = impl
        self.generator = nn.Conv2d(
            channels, kernel_size**2 * groups, generator_kernel_size, padding="same", bias=bias
        )

    def forward(self, x: Tensor) -> Tensor:
        generator: Any = self._modules["generator"]  # sooner than by Module.__getattr__
        if not _computes_as_made(generator):
            return self._call_generator(x)
        return high_order_layer(
            x,
            get_parameter(generator, "weight"),
            get_parameter(generator, "bias"),
            kernel_size=self.kernel_size,
            dilation=self.dilation,
            normalize=self.normalize,
            residual=self.residual,
            impl=self.impl,
        )

    def _call_generator(self, x: Tensor) -> Tensor:
        generated, K, G = self.generator(x), self.kernel_size**2, self.groups
        expected = (x.shape[0], K * G, *x.shape[2:])
        if generated.shape != expected:
            raise ValueError(
                f"what the generator returns: expected shape {expected}, "
                f"got {tuple(generated.shape)}"
            )
        check_normalize(self.normalize)
        x, generated = autocast(x.device.type, x, generated)
        taps = generated.unflatten(1, (K, G))
        taps = taps.softmax(1) if self.normalize else taps
        out = high_order_conv2d(x, taps.transpose(0, 1), dilation=self.dilation, impl=self.impl)
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
        if not _computes_as_made(self.generator):
            return "its generator has hooks, or is no convolution as the layer makes it"
        device_type = self.generator.weight.device.type
        (weight,) = autocast(device_type, self.generator.weight)
        impl = resolve(OPERATOR.name, self.impl, device_type)
        return why_unfused(impl, weight, self.kernel_size, self.dilation)

    def extra_repr(self) -> str:
        return (
            f"{self.channels}, kernel_size={self.kernel_size}, groups={self.groups}, "
            f"dilation={self.dilation}, normalize={self.normalize!r}, residual={self.residual}, "
            f"impl={self.impl!r}"
        )


def _computes_as_made(generator: Any) -> bool:
    """Returns whether a generator is the convolution that its parameters say, and nothing else
    happens when it is called."""
    return (
        computes_as_made(generator, nn.Conv2d)
        and generator.padding == "same"
        and generator.padding_mode == "zeros"
        and generator.stride == generator.dilation == (1, 1)
        and generator.groups == 1
    )
