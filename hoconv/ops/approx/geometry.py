"""The sizes of a convolution: its options as pairs, the padding on each side, and their checks.

B batch, C channels of the input, O of the output, G groups, H x W pixels of the input, R x S the
kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hoconv.ops.approx.reference import Pair, output_size


def as_pair(name: str, value: Any, least: int) -> Pair:
    """Returns a pair of ints, also of one that stands for both, each at least `least`."""
    # Of tuples it is known at once that they are sequences.
    pair = tuple(value) if isinstance(value, (tuple, Sequence)) else (value, value)
    are_ints = all(map(_is_int, pair))
    if not are_ints or len(pair) != 2:
        error = ValueError if are_ints else TypeError
        raise error(f"{name}: expected an int or a pair of them, got {value!r}")
    if min(pair) < least:
        raise ValueError(f"{name}: expected at least {least}, got {value!r}")
    return pair


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def pad_widths(weight: Tensor, padding: Any, stride: Any, dilation: Any) -> tuple[int, ...]:
    """Returns how many pixels the padding of `conv2d` adds on the left, right, top and bottom."""
    if padding == "valid":
        return 0, 0, 0, 0
    if not isinstance(padding, str):
        height, width = as_pair("padding", padding, 0)
        return width, width, height, height
    if padding != "same":
        raise ValueError(f"padding: expected a number, a pair, 'same' or 'valid'; got {padding!r}")
    stride, dilation = as_pair("stride", stride, 1), as_pair("dilation", dilation, 1)
    if stride != (1, 1):
        raise ValueError(f"padding: 'same' needs a stride of 1, got {stride}")
    height, width = (d * (n - 1) for d, n in zip(dilation, weight.shape[2:], strict=True))
    return width // 2, width - width // 2, height // 2, height - height // 2


def check_windows(
    x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: Any
) -> tuple[Tensor, Pair, Pair, Pair]:
    """Checks a convolution of x (B, C, H, W) with weight (O, C / G, R, S).

    Returns:
        x, padded where its sides are not padded alike; stride; padding of both sides; dilation.

    Raises:
        ValueError: a shape or an option does not fit.
        TypeError: an option of another type.
    """
    stride, dilation = as_pair("stride", stride, 1), as_pair("dilation", dilation, 1)
    if x.dim() != 4:
        raise ValueError(f"x: expected 4 dimensions (B, C, H, W), got shape {tuple(x.shape)}")
    if weight.dim() != 4 or min(weight.shape[2:]) < 1:
        raise ValueError(
            f"weight: expected 4 dimensions (O, C / groups, R, S) with a kernel of at least 1 x 1, "
            f"got shape {tuple(weight.shape)}"
        )
    left, right, top, bottom = pad_widths(weight, padding, stride, dilation)
    if (left, top) != (right, bottom):  # the kernels pad both sides alike
        x = F.pad(x, (0, right - left, 0, bottom - top))
    padding = top, left
    C, (O, channels) = x.shape[1], weight.shape[:2]  # noqa: E741
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or C % groups:
        raise ValueError(f"groups: expected a divisor of the {C} channels of x, got {groups!r}")
    if O % groups or channels * groups != C:
        raise ValueError(
            f"weight: expected (O, {C // groups}, R, S) with O divisible by groups={groups} for "
            f"the {C} channels of x, got shape {tuple(weight.shape)}"
        )
    if min(output_size(x.shape, weight.shape, stride, padding, dilation)) < 1:
        raise ValueError(
            f"weight: its kernel of {tuple(weight.shape[2:])} with dilation {dilation} is larger "
            f"than x of shape {tuple(x.shape)} with padding {padding}"
        )
    return x, stride, padding, dilation
