"""Convolution and linear layers whose products go through an approximate multiplier.

B batch, C channels of the input, O of the output, H x W pixels of the input, OH x OW of the output.
"""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from hoconv.dispatch.declaration import Operator
from hoconv.dispatch.implementations import check_name
from hoconv.dispatch.registration import check_dense, get_parameter
from hoconv.ops.approx import multipliers
from hoconv.ops.approx.geometry import pad_widths
from hoconv.ops.approx.gradients import Gradient, kinds
from hoconv.ops.approx.operator import CONV2D, MATMUL, conv2d, matmul


class ApproxConv2d(nn.Conv2d):
    """:class:`torch.nn.Conv2d` whose multiplications, forward and backward, are approximate.

    Arguments, initialisation and state dict are those of that class. The bias is added exactly.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
        padding_mode, device: as for :class:`torch.nn.Conv2d`.
        multiplier: a name of ``hoconv.approx.MULTIPLIERS``.
        gradient: the kind of gradient, or a pair of kinds, for the input and for the weight.
            ``"approx"``: its products are approximate too; ``"ste"`` (straight-through): the exact
            gradient of the exact convolution; ``"analytic"``: the multiplier's own derivative.
        impl: ``"auto"``, ``"reference"``, ``"cpp"`` or ``"cuda"``.

    Shape:
        input (B, C, H, W) or (C, H, W), float32 -> output (B, O, OH, OW) or (O, OH, OW).

    Raises:
        ValueError: an argument is out of range.
    """

    operator = CONV2D

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
        multiplier: str = "mbm16",
        gradient: Gradient = "approx",
        impl: str = "auto",
        device: Any = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode, device,
        )  # fmt: skip
        _check(CONV2D, multiplier, gradient, impl)
        self.multiplier = multiplier
        self.gradient = gradient if isinstance(gradient, str) else kinds(gradient)
        self.impl = impl

    def forward(self, input: Tensor) -> Tensor:
        check_dense(input, "input")
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
        out = conv2d(
            x, weight, self.multiplier, stride=self.stride, padding=padding,
            dilation=self.dilation, groups=self.groups, gradient=self.gradient, impl=self.impl,
        )  # fmt: skip
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

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        multiplier: str = "mbm16",
        gradient: Gradient = "approx",
        impl: str = "auto",
        device: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device)
        _check(MATMUL, multiplier, gradient, impl)
        self.multiplier = multiplier
        self.gradient = gradient if isinstance(gradient, str) else kinds(gradient)
        self.impl = impl

    def forward(self, input: Tensor) -> Tensor:
        check_dense(input, "input")
        if input.dim() < 1 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"input: expected (..., {self.in_features}), got shape {tuple(input.shape)}"
            )
        x = input if input.dim() > 1 else input.unsqueeze(0)
        weight = get_parameter(self, "weight")
        out = matmul(x, weight.mT, self.multiplier, gradient=self.gradient, impl=self.impl)
        bias = get_parameter(self, "bias")
        if bias is not None:
            out = out + bias
        return out if input.dim() > 1 else out.squeeze(0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_describe(self)}"


def _check(operator: Operator, multiplier: str, gradient: Gradient, impl: str) -> None:
    multipliers.check(multiplier)
    kinds(gradient)
    check_name(operator, impl)


def _describe(layer: ApproxConv2d | ApproxLinear) -> str:
    return f"multiplier={layer.multiplier!r}, gradient={layer.gradient!r}, impl={layer.impl!r}"
