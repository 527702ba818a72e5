"""The calls that the map of the dynamic convolution shows: the sizes of its paper, those of today's
language models, and the shapes that are farthest from the floor.

B batch, C channels, H heads, K taps, T time steps.
"""

from __future__ import annotations

import functools

import torch

from hoconv.dispatch.declaration import Sample

# What it is, B, C, H, K, T; whether all sequences and steps share the kernels. Each in both
# layouts.
_CALLS: list[tuple[str, int, int, int, int, int, bool]] = [
    ("translation", 16, 512, 8, 3, 512, False),
    ("translation", 16, 512, 8, 7, 512, False),
    ("translation", 16, 512, 8, 15, 512, False),
    ("translation", 16, 512, 8, 31, 512, False),
    ("wide", 4, 4096, 64, 31, 512, False),
    ("one head", 16, 512, 1, 7, 512, False),
    ("a head for each channel", 8, 256, 256, 3, 512, False),
    ("short", 64, 512, 8, 31, 32, False),
    ("one step", 64, 512, 8, 31, 1, False),
    ("long", 2, 256, 4, 31, 8192, False),
    ("many taps", 8, 512, 8, 127, 512, False),
    ("many taps", 8, 512, 8, 255, 512, False),
    ("lightweight", 16, 512, 8, 31, 512, True),
    ("lightweight", 8, 512, 8, 255, 512, True),
    ("before a state space", 8, 2048, 2048, 4, 512, True),
]


def _make(
    call: tuple[str, int, int, int, int, int, bool],
    channels_last: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Sample:
    _, B, C, H, K, T, shared = call
    weight = (
        torch.randn(1, H, K, 1, device=device, dtype=dtype)
        if shared
        else torch.randn(B, T, H, K, device=device, dtype=dtype).permute(0, 2, 3, 1)
    )
    if not channels_last and not shared:
        weight = weight.contiguous()
    x = torch.randn(B, T, C, device=device, dtype=dtype).mT
    return Sample(
        (x if channels_last else x.contiguous(), weight),
        {"padding": K - 1},
        name=_name(call, channels_last),
    )


def _name(call: tuple[str, int, int, int, int, int, bool], channels_last: bool) -> str:
    purpose, B, C, H, K, T, shared = call
    size = f"{B} x {T} x {C}, channels last" if channels_last else f"{B} x {C} x {T}"
    heads = "1 head" if H == 1 else f"{H} heads"
    return f"{purpose}: {size}, {heads}, K={K}{', shared' if shared else ''}"


GRID = {
    _name(call, last): functools.partial(_make, call, last)
    for call in _CALLS
    for last in (False, True)
}
