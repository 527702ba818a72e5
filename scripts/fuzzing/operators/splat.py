"""Splatting, the adjoint of the high-order convolution.

B batch, C channels, G groups of channels, H height, W width, k kernel size.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hoconv
from fuzzing.cases import Call
from fuzzing.draw import Draw
from fuzzing.operators.high_order_conv2d import Axis, draw_call, dtype_for, sizes, windows
from fuzzing.programs import Program


def definition(x: Tensor, weight: Tensor, down: Axis, across: Axis, H: int, W: int) -> Tensor:
    """For every tap and pixel, x times the tap's weight is added to the pixel of an image of H x W
    that the tap of the convolution reads; what is outside is dropped."""
    kernels = weight.repeat_interleave(x.shape[1] // weight.shape[2], 2)  # (taps, B, C, H', W')
    out = x.new_zeros(*x.shape[:2], H * W)
    tap = 0
    for rows in down.positions(H):
        for columns in across.positions(W):
            at = [y * W + z if y >= 0 and z >= 0 else -1 for y in rows for z in columns]
            stays = torch.tensor([i for i, place in enumerate(at) if place >= 0], dtype=torch.int64)
            places = torch.tensor([place for place in at if place >= 0], dtype=torch.int64)
            products = (kernels[tap] * x).flatten(2)[..., stays.to(x.device)]
            out = out.index_add(2, places.to(x.device), products)
            tap += 1
    return out.unflatten(2, (H, W))


def draw(draw: Draw, program: Program, invalid: bool) -> Call:
    B, C, G, H, W, k = sizes(draw)
    H, W, down, across, options = windows(draw, H, W, k)
    if not options.keys() <= {"dilation"}:
        options["size"] = (H, W)
    dtype = dtype_for(draw, program)
    shape = B, C, down.count(H), across.count(W)
    special = program.name in ("forward", "backward") and draw.chance(0.25)
    return draw_call(
        hoconv.splat, lambda x, weight: definition(x, weight, down, across, H, W), draw, invalid,
        shape, (down.k * across.k, B, G, *shape[2:]), options, dtype, special,
    )  # fmt: skip
