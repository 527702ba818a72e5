"""Scales of quantised numbers that are learned, as in Learned Step Size Quantization, Esser et al.,
ICLR 2020, arXiv 1902.08153."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hoconv.ops.approx.reference import TINY


def _read_again(scale: Any, _: Any) -> None:
    """Lets the host read a scale that was loaded."""
    scale._known = None


class LearnedScale(nn.Module):
    """A scale of a tensor, or one for each index of its first dimension, that is learned.

    The scale is first * abs(factor): that of the first batch in training, which also gives the
    zero point, times what is learned. So there is one parameter before and after that batch, for
    an optimizer and for DistributedDataParallel; the latter copies the buffers of one process to
    the others, whose batches differ. Numbers that are all zero have no scale: the integers then
    cover -1 to 1.

    Args:
        channels: how many scales; None for one of the whole tensor.

    Parameters: factor, float32, (1,) or (channels,), since FSDP shards no scalars; 1 at first.

    Buffers: first, float32, and zero_point, int32, () or (channels,); `first` is NaN before it is
    known.
    """

    first: Tensor
    zero_point: Tensor

    def __init__(self, channels: int | None = None) -> None:
        super().__init__()
        shape = () if channels is None else (channels,)
        self.factor = nn.Parameter(torch.empty(shape or (1,)))
        self.register_buffer("first", torch.empty(shape))
        self.register_buffer("zero_point", torch.empty(shape, dtype=torch.int32))
        self.register_load_state_dict_post_hook(_read_again)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Forgets what was learned; also makes numbers of what ``to_empty`` left."""
        self.factor.fill_(1)
        self.first.fill_(torch.nan)
        self.zero_point.zero_()
        # The buffer that the host has read, and found known; torch.func.functional_call and
        # Module.to put another in its place.
        self._known: Tensor | None = None

    @property
    def is_known(self) -> bool:
        """Returns whether there was a first batch; the host reads it until there was, and not
        again."""
        if self._known is not self.first and not self.first.isnan().any():
            self._known = self.first
        return self._known is self.first

    def forward(
        self, scale: Tensor, zero_point: Tensor, count: int, limits: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Returns the scale and its zero point; in training, remembers those of the first call.

        The gradient of a scale is multiplied by 1 / sqrt(n Q), as in the paper, with n numbers that
        share the scale, and Q the largest integer less the zero point. That of the factor is this
        over `first`, so that SGD moves the scale as it does there. Adam moves it in proportion to
        its size.

        Args:
            scale, zero_point: those of this call's numbers, of the shape of `first`.
            count: how many numbers there are.
            limits: the least and the largest integer.
        """
        lowest, highest = limits
        middle = (lowest + highest + 1) // 2
        with torch.no_grad():
            zeros = scale <= TINY
            scale = torch.where(zeros, 1 / (highest - middle), scale)
            zero_point = torch.where(zeros, middle, zero_point)
            new = self.first.isnan()
            first = torch.where(new, scale, self.first)
            zero_point = torch.where(new, zero_point, self.zero_point)
            if self.training:
                self.first.copy_(first)
                self.zero_point.copy_(zero_point)
            reach = (highest - zero_point).clamp(min=1).float()  # 0: no number is positive
            share = (reach * max(count, 1) / self.factor.numel()).rsqrt() / first
        factor = self.factor.abs().view_as(first)
        learned = (first * factor.detach()).clamp(min=TINY)
        return learned + (factor - factor.detach()) * share, zero_point


def attach_gradient_of_scale(
    quantized: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, limits: tuple[int, int]
) -> Tensor:
    """Returns quantised numbers as they are, with the paper's gradient of their scale: with
    v = x / scale, round(v) - v; out of range, the least or the largest integer less the zero point.

    The gradient of x is that of PyTorch's rounding, which ends half a scale beyond the range.

    Args:
        quantized, x: of one shape; scale, zero_point: (), or of the length of the first dimension.
    """
    lowest, highest = limits
    if scale.dim():
        scale, zero_point = (t.view(-1, *[1] * (x.dim() - 1)) for t in (scale, zero_point))
    with torch.no_grad():
        v = x / scale
        in_range = (v > lowest - zero_point) & (v < highest - zero_point)
        slope = torch.where(in_range, quantized - x, quantized) / scale
    return quantized + slope * (scale - scale.detach())
