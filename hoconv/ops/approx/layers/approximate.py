"""Convolutions, linear layers and products of two tensors through an approximate multiplier.

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
from hoconv.ops.approx.layers.quantization import (
    Quantizer,
    quantized_conv2d,
    quantized_linear,
    quantized_matmul,
)
from hoconv.ops.approx.mantissas import MantissaTable
from hoconv.ops.approx.operator import (
    CONV2D,
    MATMUL,
    check_derivative,
    check_matrices,
    conv2d,
    matmul,
    of_matrices,
)
from hoconv.ops.approx.sources.find import AnyMultiplier, find
from hoconv.ops.approx.tables import OfIntegers


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
            own; :class:`hoconv.approx.TableConv2d` and :func:`hoconv.approx.convert` take options.
        gradient: the kind of gradient, or a pair of kinds, for the input and for the weight.
            ``"ste"`` (straight-through): the exact gradient of the exact convolution. With a
            multiplier of floats also ``"approx"``, the default: its products are approximate too;
            and ``"analytic"``: the multiplier's own derivative. With a multiplier of p and q bits
            ``"ste"`` is the default; ``"difference:window=w"``: mean slopes of its products over
            the operand's w neighbours on either side (1 to 255, by default 16); and in a pair also
            a table: an array, a tensor or a file (``.npy``, ``.txt``, ``.csv``) of real numbers,
            the derivative of the product of a and b at [a mod 2^p, b mod 2^q], or, of shape (2^q,)
            for the input and (2^p,) for the weight, at the other operand alone.
        impl: ``"auto"``, ``"reference"``, ``"cpp"`` or ``"cuda"``.

    Parameters and buffers: those of :class:`torch.nn.Conv2d`; with a multiplier of integers also
    quantizer.input.least and most.

    Shape:
        input (B, C, H, W) or (C, H, W), float32 -> output (B, O, OH, OW) or (O, OH, OW).

    Raises:
        ValueError: an argument is out of range; a table of derivatives has another shape.
        TypeError: a gradient or a table of another type.
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
        chosen = _choose(multiplier, gradient, device, out_channels)
        self.multiplier, self.gradient, self.quantizer = chosen
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
        chosen = _choose(multiplier, gradient, device, out_features)
        self.multiplier, self.gradient, self.quantizer = chosen
        self.impl = impl

    def forward(self, input: Tensor) -> Tensor:
        check_dense(input, "input")
        _check_unchanged(self)
        if input.dim() < 1 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"input: expected (..., {self.in_features}), got shape {tuple(input.shape)}"
            )
        x = input if input.dim() > 1 else input.unsqueeze(0)
        out = _multiply_rows(self, x, get_parameter(self, "weight"))
        bias = get_parameter(self, "bias")
        if bias is not None:
            out = out + bias
        return out if input.dim() > 1 else out.squeeze(0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_describe(self)}"


class Product(nn.Module):
    """A layer without parameters; see :class:`Projection` about `rows`, None of two inputs."""

    operator = MATMUL
    quantizer: Quantizer | None

    def __init__(
        self, rows: int | None, multiplier: AnyMultiplier, gradient: Gradient | None, impl: str,
        device: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        check_name(MATMUL, impl)
        chosen = _choose(multiplier, gradient, device, rows)
        self.multiplier, self.gradient, self.quantizer = chosen
        self.impl = impl

    def extra_repr(self) -> str:
        return _describe(self)


class ApproxMatmul(Product):
    """:func:`torch.matmul` of matrices, whose multiplications, forward and backward, are
    approximate: of the two products of attention, say.

    Args:
        multiplier, gradient, impl: as for :class:`ApproxConv2d`, for both operands. With a
            multiplier of integers the range of each is tracked, in `quantizer.input` and
            `quantizer.other`.
        device: of the ranges.

    Shape:
        input (..., M, K), other (K, N) or (..., K, N) with leading dimensions that broadcast;
        float32 -> output (..., M, N).

    Raises:
        ValueError: the shapes do not fit.
        RuntimeError: as :class:`ApproxConv2d`.
    """

    def __init__(
        self,
        *,
        multiplier: AnyMultiplier = "mbm16",
        gradient: Gradient | None = None,
        impl: str = "auto",
        device: Any = None,
    ) -> None:
        super().__init__(None, multiplier, gradient, impl, device)

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        check_dense(input, "input")
        check_dense(other, "other")
        _check_unchanged(self)
        check_matrices("input", input, "other", other)
        if self.quantizer is None:
            return matmul(input, other, self.multiplier, gradient=self.gradient, impl=self.impl)
        quantizer, impl = self.quantizer, self.impl

        def product(a: Tensor, b: Tensor) -> Tensor:
            if a.dim() == 2:
                return quantized_matmul(a[None], b[None], quantizer, impl)[0]
            return quantized_matmul(a, b, quantizer, impl)

        return of_matrices(product, input, other)


class Projection(Product):
    """The product of rows with a weight that a module around it has, approximate as in
    :class:`ApproxLinear`.

    Args:
        rows: of the weight.
        multiplier, gradient, impl, device: as for :class:`ApproxLinear`.

    Shape:
        input (..., K), weight (rows, K), float32 -> output (..., rows).
    """

    def forward(self, input: Tensor, weight: Tensor) -> Tensor:
        _check_unchanged(self)
        return _multiply_rows(self, input, weight)


Approximate = ApproxConv2d | ApproxLinear | Product


def _multiply_rows(layer: ApproxLinear | Projection, x: Tensor, weight: Tensor) -> Tensor:
    """Computes x @ weight.mT as a layer says."""
    if layer.quantizer is None:
        return matmul(x, weight.mT, layer.multiplier, gradient=layer.gradient, impl=layer.impl)
    return quantized_linear(x, weight, layer.quantizer, layer.impl)


def _choose(
    multiplier: AnyMultiplier, gradient: Gradient | None, device: Any, channels: int | None
) -> tuple[Any, Gradient, Quantizer | None]:
    """Returns the multiplier; the gradient, by default that of the kind of multiplier; and what
    quantises the operands of one of integers, of which a weight has so many rows."""
    found = find(multiplier)
    if isinstance(found, OfIntegers):
        quantizer = Quantizer(found, "ste" if gradient is None else gradient, channels).to(device)
        return found, quantizer.gradient, quantizer
    gradient = "approx" if gradient is None else gradient
    pair = kinds(gradient)
    if isinstance(found, MantissaTable):
        check_derivative(found, gradient)
    return found, gradient if isinstance(gradient, str) else pair, None


def _check_unchanged(layer: Approximate) -> None:
    """Checks that a layer quantises for the multiplier that it has, if that is one of integers; its
    gradient may become another."""
    own = layer.quantizer and layer.quantizer.multiplier
    of_integers = isinstance(layer.multiplier, OfIntegers)
    if layer.multiplier is not own and (own or of_integers):
        raise ValueError(
            f"multiplier: cannot become {layer.multiplier!r} in a layer that was made for "
            f"{own or 'floats'}; make a new one"
        )
    if layer.quantizer and not layer.quantizer.has_gradient(layer.gradient):
        layer.quantizer.choose_gradient(layer.gradient)
        layer.gradient = layer.quantizer.gradient


def _describe(layer: Approximate) -> str:
    return f"multiplier={layer.multiplier!r}, gradient={layer.gradient!r}, impl={layer.impl!r}"
