"""The windows of the high-order convolution: which pixels the taps of an output pixel read."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

MAX_KERNEL_SIZE = 31  # along an axis
_MOST = 2**63 - 1  # of an option, which an op takes as an int of 64 bits
_SQUARES = {k * k: k for k in range(1, MAX_KERNEL_SIZE + 1)}
# What a tap reads outside the image; "valid": no tap is outside. The ops take the position here.
Padding = Literal["zeros", "valid", "replicate", "reflect"]
_PADDINGS = get_args(Padding)
VALID = _PADDINGS.index("valid")
Normalize = Literal["softmax", "sum"]
_NORMALIZATIONS = get_args(Normalize)
Pair = int | tuple[int, int]


class Axis(NamedTuple):
    """The windows along an axis: output pixel o reads, by tap i, the pixel at
    ``o // scale * stride + i * dilation - before`` of x."""

    taps: int
    dilation: int = 1
    stride: int = 1
    scale: int = 1
    padding: Padding = "zeros"

    @property
    def reach(self) -> int:
        """Pixels from the first tap to the last."""
        return self.dilation * (self.taps - 1)

    @property
    def before(self) -> int:
        """Pixels that the padding adds before the first."""
        return 0 if self.padding == "valid" else self.reach // 2

    @property
    def after(self) -> int:
        return 0 if self.padding == "valid" else self.reach - self.before

    def count(self, pixels: int) -> int:
        """Returns how many pixels of x are the first of an output pixel's, times `scale`."""
        firsts = pixels - self.reach if self.padding == "valid" else pixels
        return (firsts if self.stride == 1 else -(-firsts // self.stride)) * self.scale

    def check(self, name: str, pixels: int) -> None:
        """Raises ValueError where the windows do not fit an image's `name`, its height, say."""
        if self.padding == "valid" and pixels + (pixels == 0) <= self.reach:
            least = self.reach + 1
            raise ValueError(f"x: padding='valid' needs a {name} of at least {least}, got {pixels}")
        if self.padding == "reflect" and pixels > 0 and self.after >= pixels:
            least = self.after + 1
            raise ValueError(
                f"x: padding='reflect' needs a {name} of at least {least}, got {pixels}; or use "
                f"padding='replicate'"
            )


class Window(NamedTuple):
    down: Axis
    across: Axis

    @staticmethod
    def of(
        taps: int, kernel_size: Pair | None = None, dilation: Pair = 1, stride: Pair = 1,
        scale: Pair = 1, padding: Padding = "zeros",
    ) -> Window:  # fmt: skip
        """Returns the windows of weights of so many taps.

        Raises:
            ValueError: an option is out of range, or the taps are not those of the kernel.
        """
        if kernel_size is None:
            if int(taps) not in _SQUARES:
                raise ValueError(
                    f"weight: its first dimension must be k * k for a kernel size k from 1 to "
                    f"{MAX_KERNEL_SIZE}, got {taps}; name a kernel that is not square by "
                    f"kernel_size=(height, width)"
                )
            sizes = (_SQUARES[int(taps)],) * 2
        else:
            sizes = make_pair("kernel_size", kernel_size, MAX_KERNEL_SIZE)
            if sizes[0] * sizes[1] != taps:
                raise ValueError(
                    f"weight: its first dimension must be {sizes[0]} * {sizes[1]}, as kernel_size "
                    f"says, got {taps}"
                )
        if padding not in _PADDINGS:
            raise ValueError(f"padding: expected one of {', '.join(_PADDINGS)}, got {padding!r}")
        dilations, strides = make_pair("dilation", dilation), make_pair("stride", stride)
        scales = make_pair("scale", scale)
        return Window(
            Axis(sizes[0], dilations[0], strides[0], scales[0], padding),
            Axis(sizes[1], dilations[1], strides[1], scales[1], padding),
        )

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self.down.count(height), self.across.count(width)

    def generated(self) -> int:
        """Returns how many taps a generator computes for a pixel: those of every fraction."""
        down, across = self
        return down.taps * across.taps * down.scale * across.scale

    def is_plain(self) -> bool:
        """Returns whether neighbours read neighbours, and zeros outside the image."""
        return all(a.stride == a.scale == 1 and a.padding == "zeros" for a in self)

    def keeps_size(self) -> bool:
        """Returns whether an output of these windows is as large as x, whatever that is."""
        return all(a.stride == a.scale == 1 and a.padding != "valid" for a in self)

    def numbers(self) -> list[int]:
        """Returns the windows as the ops take them."""
        down, across = self
        return [
            down.taps, across.taps, down.dilation, across.dilation, down.stride, across.stride,
            down.scale, across.scale, _PADDINGS.index(down.padding),
        ]  # fmt: skip


def make_pair(name: str, value: Any, most: int = _MOST) -> tuple[int, int]:
    """Returns an option's values down and across.

    Raises:
        ValueError: it is no int from 1 to `most`, and no pair of them.
    """
    if isinstance(value, (tuple, list)):
        if len(value) == 2 and _is_count(value[0], most) and _is_count(value[1], most):
            return value[0], value[1]
    elif _is_count(value, most):
        return value, value
    allowed = "of at least 1" if most == _MOST else f"from 1 to {most}"
    raise ValueError(f"{name}: expected an int {allowed}, or two of them, got {value!r}")


def _is_count(value: Any, most: int) -> bool:
    # torch.compile may give a symbolic int, which is one to isinstance.
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return 1 <= value <= most


def check_normalize(normalize: str | None) -> None:
    """Raises ValueError where it names no way to normalise the taps of a pixel."""
    if normalize is not None and normalize not in _NORMALIZATIONS:
        raise ValueError(f"normalize: expected None, 'softmax' or 'sum', got {normalize!r}")


def normalize_taps(weight: Tensor, normalize: Normalize | None) -> Tensor:
    """Returns weights (taps, B, G, H, W) whose taps sum to one at every pixel: a softmax over them,
    or their quotient by their sum."""
    if normalize is None:
        return weight
    if normalize == "sum":
        accumulate = torch.promote_types(weight.dtype, torch.float32)
        return (weight / weight.sum(0, dtype=accumulate)).to(weight.dtype)
    # PyTorch's softmax would copy what is not contiguous: a generator's output, whose taps are
    # beside the batch, or channels-last.
    for order in ((0, 1, 2, 3, 4), (1, 0, 2, 3, 4), (1, 3, 4, 0, 2)):
        view = weight.permute(order)
        if view.is_contiguous():
            back = [order.index(i) for i in range(5)]
            return view.softmax(order.index(0)).to(weight.dtype).permute(back)
    return weight.softmax(0).to(weight.dtype)


def is_channels_last(x: Tensor) -> bool:
    """Returns whether neighbouring channels of a pixel are neighbours in memory, and not those of a
    row."""
    return x.stride(1) == 1 and (x.shape[3] == 1 or x.stride(3) != 1)
