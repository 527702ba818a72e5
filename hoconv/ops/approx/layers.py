"""Convolution and linear layers whose products go through an approximate multiplier.

With a multiplier of integers a layer quantises its input and its weight (quantization.py).

B batch, C channels of the input, O of the output, H x W pixels of the input, OH x OW of the output.
"""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from hoconv.dispatch.declaration import Operator
from hoconv.dispatch.implementations import check_name
from hoconv.dispatch.registration import check_dense, get_parameter
from hoconv.ops.approx.geometry import check_windows, pad_widths
from hoconv.ops.approx.gradients import Gradient, kinds
from hoconv.ops.approx.mantissas import MantissaTable
from hoconv.ops.approx.operator import CONV2D, MATMUL, check_derivative, conv2d, matmul
from hoconv.ops.approx.quantization import Quantizer, quantized_conv2d, quantized_linear
from hoconv.ops.approx.sources.find import AnyMultiplier, find
from hoconv.ops.approx.tables import LookupTable


class ApproxConv2d(nn.Conv2d):
    """:class:`torch.nn.Conv2d` whose multiplications, forward and backward, are approximate.

    Arguments, initialisation and state dict are those of that class. The bias is added exactly.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
        padding_mode, device: as for :class:`torch.nn.Conv2d`.
        multiplier: a name of ``hoconv.approx.MULTIPLIERS``, or what
            :func:`hoconv.approx.multiplier` takes or returns. With one of integers the layer
            quantises its operands: the input, which is the first one, over the range that
            `quantizer.input` saw in training (:class:`hoconv.approx.Observer`), the weight over its
            own.
        gradient: the kind of gradient, or a pair of kinds, for the input and for the weight.
            ``"approx"``: its products are approximate too; ``"ste"`` (straight-through): the exact
            gradient of the exact convolution; ``"analytic"``: the multiplier's own derivative. By
            default ``"approx"``, or ``"ste"`` of a multiplier of integers, which has no other.
        impl: ``"auto"``, ``"reference"``, ``"cpp"`` or ``"cuda"``.

    Parameters and buffers: those of :class:`torch.nn.Conv2d`; with a multiplier of integers also
    quantizer.input.least and most.

    Shape:
        input (B, C, H, W) or (C, H, W), float32 -> output (B, O, OH, OW) or (O, OH, OW).

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: a multiplier of integers, in evaluation before any call in training: the range
            of the input is unknown.
        NotImplementedError: a multiplier of integers, with forward mode or, in training, a
            transform of torch.func.
    """

    quantizer: Quantizer | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        *,
        multiplier: AnyMultiplier = "mbm16",
        gradient: Gradient | None = None,
        impl: str = "auto",
        device: Any = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode, device,
        )  # fmt: skip
        check_name(CONV2D, impl)
        self.multiplier, self.quantizer = _choose(multiplier, device)
        self.gradient = _choose_gradient(self.multiplier, gradient)
        self.impl = impl

    @property
    def operator(self) -> Operator:
        """The operator whose implementations compute the layer."""
        return CONV2D if self.quantizer is None else MATMUL

    def forward(self, input: Tensor) -> Tensor:
        check_dense(input, "input")
        _check_unchanged(self)
        if input.dim() not in (3, 4) or input.shape[-3] != self.in_channels:
            raise ValueError(
                f"input: expected (B, {self.in_channels}, H, W) or ({self.in_channels}, H, W), "
                f"got shape {tuple(input.shape)}"
            )
        x = input if input.dim() == 4 else input.unsqueeze(0)
        weight, padding = get_parameter(self, "weight"), self.padding
        if self.padding_mode != "zeros":
            widths = pad_widths(weight, padding, self.stride, self.dilation)
            x = F.pad(x, widths, mode=self.padding_mode)
            padding = 0
        if self.quantizer is None:
            out = conv2d(
                x, weight, self.multiplier, stride=self.stride, padding=padding,
                dilation=self.dilation, groups=self.groups, gradient=self.gradient, impl=self.impl,
            )  # fmt: skip
        else:
            sizes = self.stride, padding, self.dilation, self.groups
            x, *windows = check_windows(x, weight, *sizes)
            out = quantized_conv2d(x, weight, windows, self.groups, self.quantizer, self.impl)
        bias = get_parameter(self, "bias")
        if bias is not None:
            out = out + bias.view(-1, 1, 1)
        return out if input.dim() == 4 else out.squeeze(0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_describe(self)}"


class ApproxLinear(nn.Linear):
    """:class:`torch.nn.Linear` whose multiplications, forward and backward, are approximate.

    Arguments, initialisation and state dict are those of that class. The bias is added exactly.

    Args:
        in_features, out_features, bias, device: as for :class:`torch.nn.Linear`.
        multiplier, gradient, impl: as for :class:`ApproxConv2d`.

    Shape:
        input (..., in_features), float32 -> output (..., out_features).

    Raises:
        ValueError: an argument is out of range.
    """

    operator = MATMUL
    quantizer: Quantizer | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        multiplier: AnyMultiplier = "mbm16",
        gradient: Gradient | None = None,
        impl: str = "auto",
        device: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device)
        check_name(MATMUL, impl)
        self.multiplier, self.quantizer = _choose(multiplier, device)
        self.gradient = _choose_gradient(self.multiplier, gradient)
        self.impl = impl

    def forward(self, input: Tensor) -> Tensor:
        check_dense(input, "input")
        _check_unchanged(self)
        if input.dim() < 1 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"input: expected (..., {self.in_features}), got shape {tuple(input.shape)}"
            )
        x = input if input.dim() > 1 else input.unsqueeze(0)
        weight = get_parameter(self, "weight")
        if self.quantizer is None:
            out = matmul(x, weight.mT, self.multiplier, gradient=self.gradient, impl=self.impl)
        else:
            out = quantized_linear(x, weight, self.quantizer, self.impl)
        bias = get_parameter(self, "bias")
        if bias is not None:
            out = out + bias
        return out if input.dim() > 1 else out.squeeze(0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_describe(self)}"


def _choose(multiplier: AnyMultiplier, device: Any) -> tuple[Any, Quantizer | None]:
    """Returns the multiplier, and what quantises the operands of one of integers."""
    found = find(multiplier)
    return found, Quantizer(found).to(device) if isinstance(found, LookupTable) else None


def _choose_gradient(multiplier: Any, gradient: Gradient | None) -> Gradient:
    """Returns the kind of gradient that was asked for, or that a layer has by default."""
    of_integers = isinstance(multiplier, LookupTable)
    if gradient is None:
        return "ste" if of_integers else "approx"
    pair = kinds(gradient)
    if isinstance(multiplier, MantissaTable):
        check_derivative(multiplier, gradient)
    if of_integers and pair != ("ste", "ste"):
        raise ValueError(
            f"gradient: expected 'ste', all that a multiplier of integers has; got {gradient!r}"
        )
    return gradient if isinstance(gradient, str) else pair


def _check_unchanged(layer: ApproxConv2d | ApproxLinear) -> None:
    """Checks that a layer quantises for the multiplier that it has, if that is one of integers."""
    table = layer.quantizer and layer.quantizer.table
    if layer.multiplier is not table and (table or isinstance(layer.multiplier, LookupTable)):
        raise ValueError(
            f"multiplier: cannot become {layer.multiplier!r} in a layer that was made for "
            f"{table or 'floats'}; make a new one"
        )
    if table:
        _choose_gradient(table, layer.gradient)


def _describe(layer: ApproxConv2d | ApproxLinear) -> str:
    return f"multiplier={layer.multiplier!r}, gradient={layer.gradient!r}, impl={layer.impl!r}"
