"""The definition of the high-order convolution and of its adjoint, in plain PyTorch.

B batch, C channels, G groups of channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hoconv.ops.high_order.conv2d.window import Axis, Window, is_channels_last


def high_order_conv2d(x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """Pads x, slices it for every tap, multiplies by the tap's weights and adds.

    Half precision is accumulated in float32.
    """
    down, across = (_Slices(axis, size) for axis, size in zip(window, x.shape[2:], strict=True))
    accumulate = torch.promote_types(x.dtype, torch.float32)
    G = weight.shape[2]
    padded = down.pad(across.pad(x.to(accumulate), -1), -2).unflatten(1, (G, x.shape[1] // G))
    out = torch.zeros((), dtype=accumulate, device=x.device)
    for i, (rows, columns) in enumerate(_taps(down, across)):
        pixels = padded[..., rows, columns]  # (B, G, C / G, H, W)
        # An output pixel for every fraction of a pixel, which share what they read.
        kernel = _split(weight[i].to(accumulate), window).unsqueeze(2)
        out = out + pixels[..., None, :, None] * kernel
    return _as(x, window, _join(out).flatten(1, 2).to(x.dtype))


def splat(x: Tensor, weight: Tensor, window: Window, size: tuple[int, int]) -> Tensor:
    """Multiplies x by every tap's weights and adds the products to the pixels that the tap reads
    in :func:`high_order_conv2d`, whose x has this height and width.

    Half precision is accumulated in float32.
    """
    down, across = (_Slices(axis, n) for axis, n in zip(window, size, strict=True))
    accumulate = torch.promote_types(x.dtype, torch.float32)
    G = weight.shape[2]
    pixels = x.to(accumulate).unflatten(1, (G, x.shape[1] // G))
    padded = torch.zeros((), dtype=accumulate, device=x.device)
    for i, (rows, columns) in enumerate(_taps(down, across)):
        products = pixels * weight[i].to(accumulate).unsqueeze(2)
        if window.down.scale > 1 or window.across.scale > 1:
            products = _split(products, window).sum((-3, -1))
        products = products.flatten(1, 2)
        padded = padded + _place(products, rows, columns, down.padded, across.padded)
    return _as(x, window, down.fold(across.fold(padded, -1), -2).to(x.dtype))


def _as(x: Tensor, window: Window, out: Tensor) -> Tensor:
    """Returns a result in the memory format of x."""
    if window.keeps_size():
        return torch.zeros_like(x) + out  # a sum has the format of its first term
    if is_channels_last(x):
        return out.movedim(1, -1).contiguous().movedim(-1, 1)
    return out.contiguous()


def _place(t: Tensor, rows: slice, columns: slice, height: int, width: int) -> Tensor:
    """Returns a padded image with t where a tap reads it, and zeros elsewhere."""
    if columns.step > 1:
        t = F.pad(t.unsqueeze(-1), (0, columns.step - 1)).flatten(-2)
    if rows.step > 1:
        t = F.pad(t.unsqueeze(-2), (0, 0, 0, rows.step - 1)).flatten(-3, -2)
    right, below = width - columns.start - t.shape[-1], height - rows.start - t.shape[-2]
    return F.pad(t, (columns.start, right, rows.start, below))


def _taps(down: _Slices, across: _Slices) -> Iterator[tuple[slice, slice]]:
    for rows in down.of_taps():
        for columns in across.of_taps():
            yield rows, columns


def _split(t: Tensor, window: Window) -> Tensor:
    """(..., H, W) -> (..., H / scale, scale, W / scale, scale)"""
    down, across = window.down.scale, window.across.scale
    H, W = t.shape[-2:]
    return t.unflatten(-1, (W // across, across)).unflatten(-3, (H // down, down))


def _join(t: Tensor) -> Tensor:
    return t.flatten(-2).flatten(-3, -2)


def _surround(t: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Adds zeros to a dimension, the last or the last but one."""
    return F.pad(t, (before, after) if dim == -1 else (0, 0, before, after))


class _Slices:
    """The pixels of a padded axis that each tap reads."""

    def __init__(self, axis: Axis, size: int) -> None:
        self.axis, self.size = axis, size
        self.step = min(axis.stride, max(size, 1))  # beyond, there is one window
        # At most the image's size: taps further out read zeros, or the border's pixels, only.
        self.before, self.after = min(axis.before, size), min(axis.after, size)

    def of_taps(self) -> Iterator[slice]:
        axis, count = self.axis, self.axis.count(self.size) // self.axis.scale
        for i in range(axis.taps):
            start = axis.dilation * i - axis.before
            if axis.padding != "valid":
                start = min(max(start, -self.before), self.after) + self.before
            yield slice(start, start + self.step * (count - 1) + 1 if count else start, self.step)

    @property
    def padded(self) -> int:
        return self.before + self.size + self.after

    def pad(self, t: Tensor, dim: int) -> Tensor:
        """Pads a dimension."""
        # Not by F.pad: its gradient for reflect is wrong on a GPU with deterministic algorithms.
        if self.axis.padding == "replicate" and self.size:
            left = t.narrow(dim, 0, 1).repeat_interleave(self.before, dim)
            right = t.narrow(dim, self.size - 1, 1).repeat_interleave(self.after, dim)
            return torch.cat((left, t, right), dim)
        if self.axis.padding == "reflect" and self.size:
            left = t.narrow(dim, 1, self.before).flip(dim)
            right = t.narrow(dim, self.size - 1 - self.after, self.after).flip(dim)
            return torch.cat((left, t, right), dim)
        return _surround(t, dim, self.before, self.after)

    def fold(self, padded: Tensor, dim: int) -> Tensor:
        """Adds what was summed for the padding of a dimension to the pixels that it repeats."""
        left, inner, right = padded.split([self.before, self.size, self.after], dim)
        if not self.size:
            return inner

        if self.axis.padding == "replicate":
            inner = inner + _surround(left.sum(dim, keepdim=True), dim, 0, self.size - 1)
            return inner + _surround(right.sum(dim, keepdim=True), dim, self.size - 1, 0)
        if self.axis.padding == "reflect":
            inner = inner + _surround(left.flip(dim), dim, 1, self.size - 1 - self.before)
            return inner + _surround(right.flip(dim), dim, self.size - 1 - self.after, 1)
        return inner
