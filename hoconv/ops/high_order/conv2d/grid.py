"""The calls that the map of the high-order convolution shows: what people use it for, and the
shapes that are farthest from the floor.

B batch, C channels, G groups of channels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from hoconv.dispatch.declaration import Sample
from hoconv.ops.high_order.conv2d.window import Window, make_pair

# What it is for, B, C, G, height, width, kernel size, other options. Each in both layouts.
_CALLS: list[tuple[str, int, int, int, int, int, Any, dict[str, Any]]] = [
    ("images", 64, 3, 1, 224, 224, 3, {}),
    ("images", 64, 3, 1, 224, 224, 5, {}),
    ("images", 16, 3, 1, 224, 224, 5, {}),
    ("images", 16, 3, 1, 224, 224, 7, {}),
    ("images", 16, 1, 1, 224, 224, 5, {}),
    ("images", 128, 1, 1, 28, 28, 5, {}),
    ("images", 16, 3, 1, 225, 223, 5, {}),
    ("images", 16, 3, 1, 224, 224, 4, {}),
    ("replicate", 16, 3, 1, 224, 224, 5, {"padding": "replicate"}),
    ("denoising", 4, 3, 1, 512, 512, 9, {}),
    ("denoising", 4, 3, 1, 512, 512, 11, {}),
    ("denoising", 1, 3, 1, 512, 512, 21, {}),
    ("denoising", 1, 3, 1, 512, 512, 21, {"padding": "valid"}),
    ("involution", 32, 64, 4, 56, 56, 7, {}),
    ("involution", 32, 256, 16, 56, 56, 7, {}),
    ("involution", 32, 512, 32, 28, 28, 7, {}),
    ("involution", 32, 384, 6, 14, 14, 7, {}),
    ("involution", 32, 1024, 64, 14, 14, 7, {}),
    ("involution", 32, 256, 16, 56, 56, 7, {"stride": 2}),
    ("one group", 32, 64, 1, 56, 56, 3, {}),
    ("one group", 8, 256, 1, 64, 64, 5, {}),
    ("one group", 8, 1024, 1, 16, 16, 3, {}),
    ("depthwise", 32, 64, 64, 56, 56, 3, {}),
    ("dilation", 16, 16, 1, 112, 112, 5, {"dilation": 4}),
    ("dilation", 16, 16, 1, 112, 112, 5, {"dilation": 8}),
    ("CARAFE", 8, 256, 1, 64, 64, 5, {"scale": 2}),
    ("upsampling", 4, 384, 1, 32, 32, 7, {"scale": 4}),
    ("upsampling", 4, 3, 1, 112, 112, 5, {"scale": 2}),
    ("rows", 16, 16, 1, 128, 128, (1, 31), {}),
    ("columns", 16, 16, 1, 128, 128, (31, 1), {}),
]


def _make(
    call: tuple[Any, ...], channels_last: bool, device: torch.device, dtype: torch.dtype
) -> Sample:
    _, B, C, G, H, W, kernel_size, options = call
    height, width = make_pair("kernel_size", kernel_size)
    window = Window.of(height * width, (height, width), **options)
    taps = height * width * G
    x = torch.randn(B, C, H, W, device=device, dtype=dtype)
    generated = torch.randn(B, taps, *window.output_size(H, W), device=device, dtype=dtype)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
        generated = generated.contiguous(memory_format=torch.channels_last)
    weight = generated.unflatten(1, (height * width, G)).transpose(0, 1)
    arguments = {"kernel_size": kernel_size, **options}
    return Sample((x, weight), arguments, name=_name(call, channels_last))


def _name(call: tuple[Any, ...], channels_last: bool) -> str:
    purpose, B, C, G, H, W, kernel_size, options = call
    k = (
        "x".join(map(str, make_pair("kernel_size", kernel_size)))
        if isinstance(kernel_size, tuple)
        else kernel_size
    )
    groups = f" in {G}" if G > 1 else ""
    rest = "".join(
        f", {value}" if name == "padding" else f", {name} {value}"
        for name, value in options.items() if value != purpose
    )  # fmt: skip
    layout = ", channels-last" if channels_last else ""
    return f"{purpose}: {B} x {C}{groups} x {H} x {W}, k={k}{rest}{layout}"


GRID = {
    _name(call, last): functools.partial(_make, call, last)
    for call in _CALLS
    for last in (False, True)
    if call[2] > 1 or not last  # of one channel both layouts are the same
}
