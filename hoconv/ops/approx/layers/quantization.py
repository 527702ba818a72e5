"""Products of tensors with affine quantisation, by a multiplier of integers.

A real number x is scale * (q - zero_point), q an integer of the multiplier, with one scale and one
zero point per tensor; or, of a weight, with a scale for each channel of the output and a zero point
in the middle of the integers. The range always includes 0, which has an exact q. Gradients are
those of the product of the quantised numbers, exact or by a table of derivatives, and zero for
numbers out of range. Scales are of the range, or learned (learned_scale.py).

B batch, C channels of the input, O of the output, G groups, R x S the kernel; N columns of a matrix
product, K what it sums over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from hoconv.dispatch.implementations import resolve
from hoconv.dispatch.registration import autocasts, has_tangent
from hoconv.ops.approx.accumulators import AnyAccumulator, code_of
from hoconv.ops.approx.layers.learned_scale import LearnedScale, attach_gradient_of_scale
from hoconv.ops.approx.ops import NO_FORWARD_MODE, OPS, Ops
from hoconv.ops.approx.reference import TINY, Pair, affine, limits, range_of_batches
from hoconv.ops.approx.table_gradients.choice import choose
from hoconv.ops.approx.tables import OfIntegers

# "mse" tries shares STEP ** n of a batch's range, n less than TRIES: down to a sixtieth of it.
STEP, TRIES = 0.9, 40

_UNKNOWN = (
    "input: its range is not known: in training mode the layer saw no batch of finite numbers; run "
    "one first"
)

Observed = Literal["minmax", "moving_average", "mse"]
WeightScales = Literal["tensor", "channel"]


def _read_again(observer: Any, _: Any) -> None:
    """Lets the host read a range that was loaded."""
    observer._known = None


class Observer(nn.Module):
    """Tracks the range of the numbers that it is called with.

    A batch with NaN or infinities changes nothing. In evaluation, after ``observer.eval()``, a
    layer does not call it.

    Args:
        kind: ``"minmax"``: the least and the largest number of all batches; ``"moving_average"``:
            exponential averages of each batch's least and largest number, which forget outliers;
            ``"mse"``: the same of the part of each batch's range that quantises the batch with the
            least mean squared error, the rest being clipped. It takes 40 passes over a batch.
        momentum: the weight of a new batch in the averages, more than 0, up to 1.
        bits: of the integers, for ``"mse"``.

    Buffers: least, most (scalars); NaN before the first number.

    Raises:
        ValueError: an unknown kind; the momentum is out of range.
    """

    least: Tensor
    most: Tensor

    def __init__(
        self, kind: Observed = "moving_average", momentum: float = 0.01, bits: int = 8
    ) -> None:
        super().__init__()
        if kind not in ("minmax", "moving_average", "mse"):
            raise ValueError(
                f"observer: expected 'minmax', 'moving_average' or 'mse', got {kind!r}"
            )
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum: expected more than 0, up to 1; got {momentum}")
        self.kind = kind
        self.momentum = momentum
        self.bits = bits
        self.register_buffer("least", torch.tensor(torch.nan))
        self.register_buffer("most", torch.tensor(torch.nan))
        # The buffer that the host has read, and found known; torch.func.functional_call and
        # Module.to put another in its place.
        self._known: Tensor | None = None
        self.register_load_state_dict_post_hook(_read_again)

    def reset_parameters(self) -> None:
        """Forgets what was seen; also makes numbers of what ``to_empty`` left."""
        self.least.fill_(torch.nan)
        self.most.fill_(torch.nan)
        self._known = None

    def extra_repr(self) -> str:
        return f"{self.kind!r}, momentum={self.momentum}"

    @torch.no_grad()
    def forward(self, x: Tensor, join: Callable[..., Any] = range_of_batches) -> None:
        """
        Args:
            join: :func:`range_of_batches` or an op that computes it.
        """
        if x.numel() == 0:
            return
        least, most = x.aminmax()
        if self.kind == "mse" and not x.is_meta:
            least, most = least_error(x, least, most, self.bits)
        momentum = None if self.kind == "minmax" else self.momentum
        least, most = join(least, most, self.least, self.most, momentum)
        self.least.copy_(least)
        self.most.copy_(most)

    def check_known(self) -> None:
        """Raises RuntimeError if the range is unknown.

        The host reads it until it is known, and not again: then it stays known.
        """
        # Neither a compiled program nor a CUDA graph can branch on a tensor's value.
        if torch.compiler.is_compiling():
            _assert_known(self.least)
        elif self._known is not self.least:
            if _is_captured(self.least):
                _assert_known(self.least)
            elif self.least.isnan():
                raise RuntimeError(_UNKNOWN)
            else:
                self._known = self.least


def symmetric(weight: Tensor, bits: int, signed: bool) -> tuple[Tensor, int]:
    """Returns the scales (O,), float32, with which integers of so many bits cover the largest
    number of each channel, either sign, and their zero point."""
    lowest, highest = limits(bits, signed)
    zero_point = (lowest + highest + 1) // 2
    largest = weight.detach().flatten(1).abs().amax(1)
    scales = (largest / (highest - zero_point)).clamp(min=TINY)
    return scales, zero_point


def round_to_grid(x: Tensor, scale: Tensor, zero_point: Tensor, grid: tuple[int, int]) -> Tensor:
    """Returns the nearest numbers scale * (q - zero_point), q within a grid of integers; with the
    gradient of x in its range, else zero.

    Args:
        scale, zero_point: (), or one for each index of x's first dimension.
        grid: the least and the largest q.
    """
    if x.is_meta:  # PyTorch's ops have no implementation for meta tensors
        return x.clone()
    # Nor for shapes that are symbols; and the one for channels checks zero points on the host,
    # which would wait for the GPU.
    if torch.compiler.is_compiling() or (scale.dim() and _is_on_gpu(x)):
        return _round_by_parts(x, scale, zero_point, grid)
    try:
        if scale.dim():
            return torch.fake_quantize_per_channel_affine(x, scale, zero_point, 0, *grid)
        return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, *grid)
    except NotImplementedError as error:  # forward mode around reverse mode
        if "forward AD" not in str(error):
            raise
        raise NotImplementedError(f"a product of a table {NO_FORWARD_MODE}") from None


def _is_on_gpu(t: Tensor) -> bool:
    return t.is_cuda


def _is_captured(t: Tensor) -> bool:
    """Returns whether a CUDA graph records work, in which the host cannot read a tensor."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def _assert_known(range_: Tensor) -> None:
    """Checks on the device that a range, or a scale, is known."""
    torch._assert_async(~range_.isnan(), _UNKNOWN)  # pyright: ignore[reportPrivateImportUsage]


def _round_by_parts(x: Tensor, scale: Tensor, zero_point: Tensor, grid: tuple[int, int]) -> Tensor:
    """Computes :func:`round_to_grid` with the bits of PyTorch's ops, if x is finite."""
    if scale.dim():
        scale, zero_point = (t.view(-1, *[1] * (x.dim() - 1)) for t in (scale, zero_point))
    lowest, highest = grid
    with torch.no_grad():
        q = (x * (1 / scale)).round() + zero_point
        in_range = (q >= lowest) & (q <= highest)
        q = torch.where(q.isnan(), lowest, q.clamp(lowest, highest))
        quantized = (q - zero_point) * scale
    return quantized + torch.where(in_range, x - x.detach(), 0)


def least_error(x: Tensor, least: Tensor, most: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns the share of a range, STEP ** n, in which integers of so many bits have the least
    mean squared error; NaN if the range is not finite."""
    grid = limits(bits, signed=False)
    errors = []
    for n in range(TRIES):
        scale, zero_point = affine(STEP**n * least, STEP**n * most, bits, signed=False)
        quantized = round_to_grid(x, scale, zero_point, grid)
        errors.append((quantized - x).square().mean())
    share = STEP ** torch.stack(errors).argmin()
    return share * least, share * most


def is_per_channel(weight_scales: WeightScales) -> bool:
    """Returns whether a weight has a scale for each channel; raises ValueError for other words."""
    if weight_scales not in ("tensor", "channel"):
        raise ValueError(f"weight_scales: expected 'tensor' or 'channel', got {weight_scales!r}")
    return weight_scales == "channel"


class Quantizer(nn.Module):
    """Quantises the operands of a layer: its input and its weight, or two inputs; tracks the ranges
    of inputs in training.

    Args:
        multiplier: of integers.
        gradient: what the layer's gradient is; see :func:`choose`.
        channels: of the output, as many as the weight has rows; None of a product of two inputs.

    Attributes:
        per_channel: whether the weight has a scale for each channel of the output.
        input: the observer of its range.
        other: that of the second input; None of a weight, whose range is computed in every call.
        input_scale, weight_scale: the scales if they are learned, else None.
    """

    other: Observer | None

    def __init__(
        self, multiplier: OfIntegers, gradient: Any = "ste", channels: int | None = None
    ) -> None:
        super().__init__()
        self.multiplier = multiplier
        self.channels = channels
        self.per_channel = False
        self.accumulator = None
        self.input = Observer()
        self.other = Observer() if channels is None else None
        self.input_scale: LearnedScale | None = None
        self.weight_scale: LearnedScale | None = None
        self.choose_gradient(gradient)

    def configure(
        self,
        *,
        observer: Observed = "moving_average",
        momentum: float = 0.01,
        weight_scales: WeightScales = "tensor",
        learn_scales: bool = False,
        accumulator: AnyAccumulator = None,
    ) -> None:
        """Sets the options of :class:`hoconv.approx.TableConv2d`; nothing is known of any range
        then. A product of two inputs has no weight: each has a scale."""
        device, (bits_of_x, bits_of_other) = self.input.least.device, self.multiplier.bits
        self.input = Observer(observer, momentum, bits_of_x)
        if self.other is not None:
            self.other = Observer(observer, momentum, bits_of_other)
        self.per_channel = is_per_channel(weight_scales) and self.channels is not None
        if not isinstance(learn_scales, bool):
            raise ValueError(f"learn_scales: expected True or False, got {learn_scales!r}")
        if learn_scales:
            self.input_scale = LearnedScale()
            self.weight_scale = LearnedScale(self.channels if self.per_channel else None)
        self.accumulator = accumulator
        self.to(device).train(self.training)

    def choose_gradient(self, gradient: Any) -> None:
        """Sets the gradient; errors are those of :func:`choose`."""
        self.gradient, self._derivatives = choose(gradient, self.multiplier)

    @property
    def accumulator(self) -> AnyAccumulator:
        """Returns what keeps sums, as :func:`hoconv.approx.table_matmul` takes it."""
        return self._accumulator

    @accumulator.setter
    def accumulator(self, accumulator: AnyAccumulator) -> None:
        self._code = code_of(accumulator, self.multiplier.signed)
        self._accumulator = accumulator

    def extra_repr(self) -> str:
        scales = "channel" if self.per_channel else "tensor"
        learned = self.input_scale is not None
        return f"weight_scales={scales!r}, learn_scales={learned}, accumulator={self.accumulator!r}"

    def has_gradient(self, gradient: Any) -> bool:
        """Returns whether this is the gradient that was chosen. torch.compile can trace it."""
        chosen = self.gradient
        if isinstance(chosen, str):
            return isinstance(gradient, str) and gradient == chosen
        is_pair = isinstance(gradient, tuple) and len(gradient) == 2
        return is_pair and gradient[0] is chosen[0] and gradient[1] is chosen[1]

    def grids(
        self, x: Tensor, weight: Tensor, ops: Ops
    ) -> tuple[Tensor, Tensor, list[Any], Tensor | None]:
        """Returns both operands quantised; what an op is told about them: scales and zero points,
        products, derivatives, whether they are signed, and their accumulator; and, if the weight
        has several scales, these: then what is returned of it has the scale 1, so that sums of
        products are to be multiplied by them."""
        x, weight, of_x, (scale, zero_point) = self(x, weight, ops)
        scales = None
        if self.per_channel:
            scales, scale = scale, torch.ones_like(scale[0])
            weight = weight / scales.view(-1, *[1] * (weight.dim() - 1))
        terms = [each and each.on(x.device) for each in self._derivatives]
        grids = [*of_x, scale, zero_point, *self.multiplier.for_op(x.device), *terms]
        grids += [self.multiplier.signed, self._code]
        return x, weight, grids, scales

    def ops(self, x: Tensor, K: int, impl: str) -> Ops:
        """Returns the ops of an implementation that sums K products.

        They run where ``approx_matmul`` runs, since the same compiled libraries have both. They are
        not declared as operators, since an operator's random samples are not on grids of integers.
        """
        if self.accumulator is None:
            self.multiplier.check_sum("input", K)
        return OPS[resolve("approx_matmul", impl, x.device.type)]

    def forward(self, x: Tensor, weight: Tensor, ops: Ops = OPS["reference"]) -> Any:
        if autocasts(x.device.type):
            x, weight = (
                t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in (x, weight)
            )
        for name, t in (("input", x), ("weight" if self.other is None else "other", weight)):
            if t.dtype != torch.float32:
                raise TypeError(f"{name}: expected float32, got {t.dtype}; convert it, or use "
                                "autocast, which does")  # fmt: skip
        if not torch.compiler.is_compiling():
            self._check_transforms(x, weight)
        if not self._has_first_scale():
            for observer, t in ((self.input, x), (self.other, weight)):
                if observer is None:
                    continue
                if observer.training:
                    observer(t.detach(), ops.range_of_batches)
                if not observer.least.is_meta:
                    observer.check_known()
        bits_of_x, bits_of_weight = self.multiplier.bits
        of_x, of_weight = self._scales(weight.detach(), ops)
        x, *of_x = self._quantize(x, *of_x, bits_of_x, self.input_scale)
        weight, scale, zero_points = self._quantize(
            weight, *of_weight, bits_of_weight, self.weight_scale
        )
        return x, weight, of_x, (scale, zero_points[0] if self.per_channel else zero_points)

    def _check_transforms(self, x: Tensor, weight: Tensor) -> None:
        if has_tangent(x) or has_tangent(weight):
            raise NotImplementedError(f"a product of a table {NO_FORWARD_MODE}")
        if self.training and is_functorch_wrapped_tensor(x):
            raise NotImplementedError(
                "input: a transform of torch.func cannot change the range that was seen; call "
                "the layer in evaluation, after layer.eval()"
            )

    def _has_first_scale(self) -> bool:
        """Returns whether the input's range is of no use any more, if that can be told."""
        learned = self.input_scale
        if learned is None or learned.first.is_meta or torch.compiler.is_compiling():
            return False
        if _is_captured(learned.first):
            _assert_known(learned.first)
            return True
        return learned.is_known

    def _scales(
        self, weight: Tensor, ops: Ops
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Returns the scale and zero point of the input's range, and those of the other operand."""
        signed, (bits_of_x, bits_of_weight) = self.multiplier.signed, self.multiplier.bits
        of_x = ops.affine(self.input.least, self.input.most, bits_of_x, signed)
        if self.other is not None:
            return of_x, ops.affine(self.other.least, self.other.most, bits_of_weight, signed)
        if not self.per_channel:
            return of_x, ops.affine(*weight.aminmax(), bits_of_weight, signed)
        scales, zero_point = symmetric(weight, bits_of_weight, signed)
        return of_x, (scales, torch.full_like(scales, zero_point, dtype=torch.int32))

    def _quantize(
        self, x: Tensor, scale: Tensor, zero_point: Tensor, bits: int, learned: LearnedScale | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns quantised numbers, and the scale and zero point that they have: those given, or
        learned ones, of which the numbers then have the gradient."""
        grid = limits(bits, self.multiplier.signed)
        if learned is None:
            return round_to_grid(x, scale, zero_point, grid), scale, zero_point
        scale, zero_point = learned(scale, zero_point, x.numel(), grid)
        quantized = round_to_grid(x, scale.detach(), zero_point, grid)
        quantized = attach_gradient_of_scale(quantized, x, scale, zero_point, grid)
        return quantized, scale.detach(), zero_point


def quantized_conv2d(
    x: Tensor, weight: Tensor, windows: Sequence[Pair], groups: int,
    quantizer: Quantizer, impl: str,
) -> Tensor:  # fmt: skip
    """The convolution of quantised x (B, C, H, W) with quantised weight (O, C / G, R, S), float32.

    Args:
        windows: stride, padding, dilation.

    Returns: (B, O, OH, OW), float32.
    """
    ops = quantizer.ops(x, math.prod(weight.shape[1:]), impl)
    x, weight, grids, scales = quantizer.grids(x, weight, ops)
    out = ops.integer_conv2d(x, weight, *grids, *windows, groups)
    return out if scales is None else out * scales.view(-1, 1, 1)


def quantized_linear(x: Tensor, weight: Tensor, quantizer: Quantizer, impl: str) -> Tensor:
    """The product of quantised x (..., K) with the transposed quantised weight (N, K), float32.

    Returns: (..., N), float32.
    """
    ops = quantizer.ops(x, x.shape[-1], impl)
    x, weight, grids, scales = quantizer.grids(x, weight, ops)
    rows = x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1])
    out = ops.integer_product(rows, weight.mT[None], *grids)
    out = out.reshape(*x.shape[:-1], weight.shape[0])
    return out if scales is None else out * scales


def quantized_matmul(a: Tensor, b: Tensor, quantizer: Quantizer, impl: str) -> Tensor:
    """The product of two quantised inputs a (B, M, K) and b (B, K, N), float32.

    Returns: (B, M, N), float32.
    """
    ops = quantizer.ops(a, a.shape[-1], impl)
    a, b, grids, _ = quantizer.grids(a, b, ops)
    return ops.integer_product(a, b, *grids)
