"""The layers of a table of integers, with a choice of how the range of the input is tracked."""

from __future__ import annotations

from typing import Any

from hoconv.ops.approx.accumulators import AnyAccumulator
from hoconv.ops.approx.gradients import Gradient
from hoconv.ops.approx.layers.approximate import ApproxConv2d, ApproxLinear
from hoconv.ops.approx.layers.quantization import Observed, Quantizer, WeightScales
from hoconv.ops.approx.tables import LookupTable


class TableConv2d(ApproxConv2d):
    """:class:`hoconv.ApproxConv2d` with a table of integers.

    Args:
        in_channels, out_channels, kernel_size, and the keywords after `impl`: as for
            :class:`torch.nn.Conv2d`.
        table: the table of products. Its first operand is the input, its second the weight.
        observer, momentum: how the input's range is tracked; as for :class:`Observer`. The weight's
            range is computed in every call.
        weight_scales: ``"tensor"``: one scale and one zero point for the weight; ``"channel"``: a
            scale for each channel of the output, and the zero point in the middle of the integers.
        learn_scales: the scales are parameters, learned with the gradient of LSQ (Esser et al.,
            ICLR 2020, arXiv 1902.08153): of the first batch in training they are those of the
            ranges above, and its zero points are kept. Parameters are then also
            quantizer.input_scale.factor and quantizer.weight_scale.factor, (1,) or (out_channels,):
            the scales relative to those of that batch.
        accumulator: what sums of products are kept in, as for :func:`hoconv.approx.table_matmul`;
            k counts (c, r, s) of the weight. The terms of the zero points and the bias are added
            to it afterwards, exactly. The gradient is that of an exact sum.
        gradient: as for :class:`hoconv.ApproxConv2d`, of a multiplier of integers.
        impl: ``"auto"``, ``"reference"``, ``"cpp"`` or ``"cuda"``, as for ``approx_matmul``: the
            convolution is a matrix product of unfolded windows.

    Shape, state and errors: as of :class:`hoconv.ApproxConv2d`.
    """

    quantizer: Quantizer  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        *,
        table: LookupTable,
        observer: Observed = "moving_average",
        momentum: float = 0.01,
        weight_scales: WeightScales = "tensor",
        learn_scales: bool = False,
        accumulator: AnyAccumulator = None,
        gradient: Gradient = "ste",
        impl: str = "auto",
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        device: Any = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            multiplier=table, gradient=gradient, impl=impl, device=device,
        )  # fmt: skip
        self.quantizer.configure(
            observer=observer, momentum=momentum, weight_scales=weight_scales,
            learn_scales=learn_scales, accumulator=accumulator,
        )  # fmt: skip


class TableLinear(ApproxLinear):
    """:class:`hoconv.ApproxLinear` with a table of integers.

    Args:
        in_features, out_features, bias, device: as for :class:`torch.nn.Linear`.
        table, observer, momentum, weight_scales, learn_scales, accumulator, gradient, impl: as for
            :class:`TableConv2d`.

    Shape, state and errors: as of :class:`hoconv.ApproxLinear`.
    """

    quantizer: Quantizer  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        table: LookupTable,
        observer: Observed = "moving_average",
        momentum: float = 0.01,
        weight_scales: WeightScales = "tensor",
        learn_scales: bool = False,
        accumulator: AnyAccumulator = None,
        gradient: Gradient = "ste",
        impl: str = "auto",
        bias: bool = True,
        device: Any = None,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, multiplier=table, gradient=gradient, impl=impl,
            device=device,
        )  # fmt: skip
        self.quantizer.configure(
            observer=observer, momentum=momentum, weight_scales=weight_scales,
            learn_scales=learn_scales, accumulator=accumulator,
        )  # fmt: skip
