"""The high-order convolution.

B batch, C channels, G groups of channels, H height, W width, k kernel size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hoconv
from fuzzing.cases import Call
from fuzzing.draw import Draw
from fuzzing.programs import Program
from fuzzing.windows import gather_at
from hoconv.dispatch.declaration import find

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
KERNEL_SIZES = (1, 2, 3, 3, 4, 5, 5, 6, 7, 8, 9, 11)
# Most taps times pixels of a call: its definition holds what every tap reads. And of one whose
# whole Jacobian is computed.
MOST_READ = 60_000
MOST_READ_IF_TINY = 300


@dataclass
class Axis:
    """The windows along an axis: output pixel o reads, by tap i, the pixel at
    ``o // scale * stride + i * dilation - before``, with ``before = dilation * (k - 1) // 2``, or
    0 where the padding is "valid"."""

    k: int
    dilation: int = 1
    stride: int = 1
    scale: int = 1
    padding: str = "zeros"

    def count(self, size: int) -> int:
        """Counts the output pixels: as often as the stride fits, for every fraction."""
        if self.padding == "valid":
            size -= self.dilation * (self.k - 1)
        return len(range(0, size, self.stride)) * self.scale

    def least(self, size: int) -> int:
        """The least number of pixels, from `size` on, that these windows fit."""
        reach = self.dilation * (self.k - 1)
        if self.padding == "valid" and (size > 0 or reach > 0):
            return max(size, reach + 1)
        if self.padding == "reflect" and size > 0:
            return max(size, reach - reach // 2 + 1)
        return size

    def positions(self, size: int) -> list[list[int]]:
        """The pixel that each tap of each output pixel reads; -1 for a zero."""
        before = 0 if self.padding == "valid" else self.dilation * (self.k - 1) // 2
        return [
            [
                self._pixel(o // self.scale * self.stride + i * self.dilation - before, size)
                for o in range(self.count(size))
            ]
            for i in range(self.k)
        ]

    def _pixel(self, at: int, size: int) -> int:
        if 0 <= at < size:
            return at
        if self.padding == "replicate":
            return 0 if at < 0 else size - 1
        if self.padding == "reflect":
            return -at if at < 0 else 2 * (size - 1) - at
        return -1


def definition(x: Tensor, weight: Tensor, down: Axis, across: Axis) -> Tensor:
    """``out[b, c, h, w]`` is the sum over taps i, j of ``weight[i * kw + j, b, g(c), h, w]`` times
    x[b, c] at the pixel that they read; ``g(c) = c // (C / G)``."""
    rows = gather_at(x, 2, down.positions(x.shape[2]))  # (B, C, kh, H', W)
    windows = gather_at(rows, 4, across.positions(x.shape[3])).movedim(4, 3)
    kernels = weight.permute(1, 2, 0, 3, 4).unflatten(2, (down.k, across.k))
    kernels = kernels.repeat_interleave(x.shape[1] // weight.shape[2], 1)
    return (windows * kernels).sum((2, 3))


def sizes(draw: Draw) -> tuple[int, int, int, int, int, int]:
    """B, C, G, H, W, k."""
    G, C = draw.groups()
    k = draw.choice((1, 2, 3) if draw.tiny else KERNEL_SIZES)
    W = draw.length()
    H = draw.length(3 if W * k * k * C > 10_000 else 17)
    return draw.batch(), C, G, H, W, k


def dilated(draw: Draw) -> int:
    return draw.choice((1, 1, 1, 1, 2, 3, 7, 40, 4000, 10**6, 2**31, 2**40, 2**62))


def dtype_for(draw: Draw, program: Program) -> torch.dtype:
    if program.name == "under_autocast":  # PyTorch's for a CPU has no rule for float16
        return draw.choice(DTYPES[:3])
    return draw.choice(DTYPES if program.half else DTYPES[:2])


def windows(draw: Draw, H: int, W: int, k: int) -> tuple[int, int, Axis, Axis, dict[str, Any]]:
    """Draws windows and the options of a call that has them. Returns the size of an image that they
    fit, too: H x W or, where that is too small, larger."""
    if draw.chance(0.4):
        dilation = dilated(draw)
        return H, W, Axis(k, dilation), Axis(k, dilation), {"dilation": dilation}
    while True:
        padding = draw.choice(("zeros", "valid", "replicate", "reflect"))
        other = draw.choice((k, k, 1, 2) if draw.tiny else (k, k, 1, 2, 3, 13, 31))
        sizes = (k, other) if draw.chance(0.5) else (other, k)
        pairs = {
            name: draw.choice(values)
            for name, values in (
                ("dilation", (1, 1, 1, 2, (1, 3), (4, 1), 40)),
                ("stride", (1, 1, 1, 2, 3, (1, 2), (70, 1))),
                ("scale", (1, 1, 1, 2, (2, 1), (1, 3))),
            )
        }
        both = {n: v if isinstance(v, tuple) else (v, v) for n, v in pairs.items()}
        down, across = (
            Axis(sizes[i], both["dilation"][i], both["stride"][i], both["scale"][i], padding)
            for i in range(2)
        )
        height, width = down.least(H), across.least(W)
        read = down.k * across.k * max(height * width, down.count(height) * across.count(width))
        if read <= (MOST_READ_IF_TINY if draw.tiny else MOST_READ):
            return height, width, down, across, {"kernel_size": sizes, "padding": padding, **pairs}


def draw(draw: Draw, program: Program, invalid: bool) -> Call:
    B, C, G, H, W, k = sizes(draw)
    H, W, down, across, options = windows(draw, H, W, k)
    dtype = dtype_for(draw, program)
    shape = B, C, H, W
    special = program.name in ("forward", "backward") and draw.chance(0.25)
    return draw_call(
        hoconv.high_order_conv2d, lambda x, weight: definition(x, weight, down, across), draw,
        invalid, shape, (down.k * across.k, B, G, down.count(H), across.count(W)), options, dtype,
        special,
    )  # fmt: skip


def draw_call(
    operator: Callable[..., Tensor], definition: Callable[[Tensor, Tensor], Tensor], draw: Draw,
    invalid: bool, image: tuple[int, ...], kernels: tuple[int, ...], options: dict[str, Any],
    dtype: torch.dtype, special: bool,
) -> Call:  # fmt: skip
    """Draws a call of the convolution or of its adjoint, on x and weights of these shapes."""
    x = draw.tensor(*image, dtype=dtype, special=special)
    weight = draw.tensor(*kernels, dtype=dtype, special=special)
    fault = ""
    if invalid:
        fault, x, weight, options = _faulty(draw, x, weight, options)
    plain = options.keys() <= {"dilation"}

    def function(x: Tensor, weight: Tensor, impl: str) -> Tensor:
        return operator(x, weight, **options, impl=impl)

    return Call(
        function, definition, [x, weight], str(options), dtype, find(operator.__name__).tolerances,
        invalid=fault, like_input=plain, chains=plain,
    )  # fmt: skip


def _faulty(draw: Draw, x: Tensor, weight: Tensor, options: dict) -> tuple:
    fault = draw.choice(
        ("number", "number", "padding", "taps", "batch", "groups", "size", "dtype", "integers",
         "dimensions", "complex")
    )  # fmt: skip
    taps, B, G, H, W = weight.shape
    if fault == "number":
        name = draw.choice(("dilation", "stride", "scale", "kernel_size"))
        wrong = draw.choice((0, -1, True, 1.0, "1", (1, 1, 1), (2, 0), ()))
        options = options | {name: wrong}
    elif fault == "padding":
        options = options | {"padding": draw.choice(("same", "circular", 1, None, ""))}
    elif fault == "taps":
        weight = weight.new_ones(draw.choice((0, 2, 32 * 32, taps + 1)), B, G, H, W)
        if weight.shape[0] in (1, 4, 9, 16, 25, 36, 49, 64, 81, 100, 121, taps):
            weight = weight.new_ones(0, B, G, H, W)
    elif fault == "batch":
        weight = weight.new_ones(taps, B + 1, G, H, W)
    elif fault == "groups":
        weight = weight.new_ones(taps, B, draw.choice((0, x.shape[1] + 1)), H, W)
        if weight.shape[2] and x.shape[1] % weight.shape[2] == 0:
            weight = weight.new_ones(taps, B, 0, H, W)
    elif fault == "size":
        weight = weight.new_ones(taps, B, G, H + 1, W)
    elif fault == "dtype":
        weight = weight.to(draw.choice([d for d in DTYPES if d != weight.dtype]))
    elif fault == "integers":
        x, weight = x.nan_to_num(0, 0, 0).int(), weight.nan_to_num(0, 0, 0).int()
    elif fault == "complex":
        x, weight = x.to(torch.complex64), weight.to(torch.complex64)
    else:
        x = x.unsqueeze(0) if draw.chance(0.5) else x[0] if x.shape[0] else x.sum(0)
    return fault, x, weight, options
