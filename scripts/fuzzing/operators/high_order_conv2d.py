"""The high-order convolution.

B batch, C channels, G groups of channels, H height, W width, k kernel size.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hoconv
from fuzzing.cases import Call
from fuzzing.draw import Draw
from fuzzing.programs import Program
from fuzzing.windows import gather_taps
from hoconv.dispatch.declaration import find

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def definition(x: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """``out[b, c, h, w] = sum over i of weight[i, b, g(c), h, w] * x[b, c, h + dy(i), w + dx(i)]``
    with ``dy = dilation * (i // k) - before``, ``dx = dilation * (i % k) - before``,
    ``before = dilation * (k - 1) // 2``, ``g(c) = c // (C / G)``; x is zero outside."""
    k, G = round(weight.shape[0] ** 0.5), weight.shape[2]
    before = dilation * (k - 1) // 2
    offsets = [dilation * i - before for i in range(k)]
    windows = gather_taps(x, offsets, offsets)  # (B, C, k, k, H, W)
    kernels = weight.permute(1, 2, 0, 3, 4).unflatten(2, (k, k))  # (B, G, k, k, H, W)
    kernels = kernels.repeat_interleave(x.shape[1] // G, 1)
    return (windows * kernels).sum((2, 3))


def sizes(draw: Draw) -> tuple[int, int, int, int, int, int]:
    """B, C, G, H, W, k."""
    G, C = draw.groups()
    k = draw.choice((1, 2, 3) if draw.tiny else (1, 2, 3, 3, 4, 5, 5, 6, 7, 8, 9, 11))
    W = draw.length()
    H = draw.length(3 if W * k * k * C > 10_000 else 17)
    return draw.batch(), C, G, H, W, k


def dilated(draw: Draw) -> int:
    return draw.choice((1, 1, 1, 1, 2, 3, 7, 40, 4000, 10**6, 2**31, 2**40, 2**62))


def dtype_for(draw: Draw, program: Program) -> torch.dtype:
    if program.name == "under_autocast":  # PyTorch's for a CPU has no rule for float16
        return draw.choice(DTYPES[:3])
    return draw.choice(DTYPES if program.half else DTYPES[:2])


def draw(draw: Draw, program: Program, invalid: bool) -> Call:
    B, C, G, H, W, k = sizes(draw)
    dtype, dilation = dtype_for(draw, program), dilated(draw)
    special = program.name in ("forward", "backward") and draw.chance(0.25)
    x = draw.tensor(B, C, H, W, dtype=dtype, special=special)
    weight = draw.tensor(k * k, B, G, H, W, dtype=dtype, special=special)
    fault = ""
    options = {"dilation": dilation}
    if invalid:
        fault, x, weight, options = _faulty(draw, x, weight, options)

    def function(x: Tensor, weight: Tensor, impl: str) -> Tensor:
        return hoconv.high_order_conv2d(x, weight, **options, impl=impl)

    return Call(
        function, lambda x, weight: definition(x, weight, dilation), [x, weight],
        f"dilation={options['dilation']}", dtype, find("high_order_conv2d").tolerances,
        invalid=fault, like_input=True,
    )  # fmt: skip


def _faulty(draw: Draw, x: Tensor, weight: Tensor, options: dict) -> tuple:
    fault = draw.choice(
        (
            "dilation",
            "taps",
            "batch",
            "groups",
            "size",
            "dtype",
            "integers",
            "dimensions",
            "complex",
        )
    )
    taps, B, G, H, W = weight.shape
    if fault == "dilation":
        options = {"dilation": draw.choice((0, -1, True, 1.0, "1", None, (1, 1)))}
    elif fault == "taps":
        weight = weight.new_ones(
            draw.choice((0, 2, 12 * 12, taps + 1 if taps > 1 else 3)), B, G, H, W
        )
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
