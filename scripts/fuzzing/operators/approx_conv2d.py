"""The approximate convolution: the function and the layer.

B batch, C channels of the input, O of the output, G groups, H x W pixels, R x S the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuzzing import approximate
from fuzzing.approximate import draw_options, draw_wild
from fuzzing.cases import Call
from fuzzing.draw import Draw
from fuzzing.operators.approx_multiply import HALF, ROUNDED, make_faulty
from fuzzing.programs import Program
from hoconv import ApproxConv2d, approx


def draw(draw: Draw, program: Program, invalid: bool) -> Call:
    G = draw.choice((1, 1, 1, 2, 3))
    C = G * draw.choice((1, 1, 2, 3) if draw.tiny else (1, 1, 2, 3, 4))
    O = G * draw.choice((1, 1, 2) if draw.tiny else (1, 2, 3, 5, 17, 37))  # noqa: E741
    R, S = (draw.choice((1, 1, 2, 3, 3) if draw.tiny else (1, 1, 2, 3, 3, 4, 5)) for _ in range(2))
    stride, dilation = (
        (draw.choice((1, 1, 1, 2, 3)), draw.choice((1, 1, 1, 2, 4))) for _ in range(2)
    )
    padding = (draw.choice((0, 0, 1, 2, 3)), draw.choice((0, 0, 1, 2, 3)))
    B = draw.batch()
    long = not draw.tiny and draw.chance(0.03)
    if long:  # more pixels than a chunk of 1,024
        B, C, O, G = 5, 1, 2, 1  # noqa: E741
    least = [max(1, dilation[i] * (n - 1) + 1 - 2 * padding[i]) for i, n in enumerate((R, S))]
    H, W = (n + (17 if long else draw.choice((0, 0, 1, 2, 3, 5, 8))) for n in least)
    if not draw.tiny and draw.chance(0.1):
        W += draw.choice((16, 33, 64))
    multiplier, kinds, gradient = draw_options(draw)
    x, weight = (
        draw_wild(draw, B, C, H, W, kinds=kinds),
        draw_wild(draw, O, C // G, R, S, kinds=kinds),
    )
    dtype = torch.float32
    if program.name == "under_autocast":
        dtype = draw.choice(HALF)
        x, weight = x.to(dtype), weight.to(dtype)
    given: object = padding
    before, same = padding, (0, 0)
    if draw.chance(0.15):
        given, before = "valid", (0, 0)
        if dilation[0] * (R - 1) + 1 > H or dilation[1] * (S - 1) + 1 > W:
            given, before = padding, padding
    elif draw.chance(0.15) and stride == (1, 1):
        total = [dilation[i] * (n - 1) for i, n in enumerate((R, S))]
        given, before, same = "same", (total[0] // 2, total[1] // 2), (total[0] % 2, total[1] % 2)
    functions = approximate.conv2d(multiplier, kinds, stride, before, dilation, G)
    loose = _tolerances(kinds)

    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        if same != (0, 0):  # one more at the end where the number is odd
            x = F.pad(x, (0, same[1], 0, same[0]))
        return approximate.apply(x, weight, *functions)

    options = {"stride": stride, "padding": given, "dilation": dilation, "groups": G}
    what = f"{multiplier} {gradient} {options}"
    if not invalid and dtype == torch.float32 and draw.chance(0.3):
        return _layer(draw, x, weight, multiplier, gradient, kinds, options, convolved, loose)
    arguments = options | {"multiplier": multiplier, "gradient": gradient}
    if stride[0] == stride[1] and draw.chance(0.5):
        arguments["stride"] = stride[0]
    fault = ""
    if invalid:
        fault, x, weight, arguments = make_faulty(draw, x, weight, arguments)
        if fault == "shape":
            fault, x, weight, arguments = _misshapen(draw, x, weight, arguments)

    def function(x: Tensor, weight: Tensor, impl: str) -> Tensor:
        return approx.conv2d(x, weight, **arguments, impl=impl)

    return Call(
        function, convolved, [x, weight], what, dtype, dict.fromkeys(HALF, 0.0), exact=True,
        special="ste" not in kinds, in_float32=True, loose=loose, invalid=fault,
        chains=C == O and given == "same",
    )  # fmt: skip


def _tolerances(kinds: tuple[str, str]) -> dict[str, float]:
    """Returns the tolerances of gradients that PyTorch sums: straight-through ones, and the
    analytic one of x, which adds overlapping windows in any order."""
    return {
        f"{what} {i}": ROUNDED * 3
        for what in ("gradient", "Jacobian")
        for i, kind in enumerate(kinds)
        if kind == "ste" or (kind, i) == ("analytic", 0)
    }


def _layer(
    draw: Draw, x: Tensor, weight: Tensor, multiplier: str, gradient: Any, kinds: tuple[str, str],
    options: dict[str, Any], convolved: Callable[[Tensor, Tensor], Tensor],
    loose: dict[str, float],
) -> Call:  # fmt: skip
    """Draws a layer with any padding mode of torch.nn.Conv2d, for a batch or one image."""
    (O, channels, R, S), G = weight.shape, options["groups"]  # noqa: E741
    padding: Any = options["padding"]
    mode = "zeros"
    one = x.shape[0] == 1 and draw.chance(0.5)
    bias = draw.chance(0.5)
    if x.numel() and not isinstance(padding, str) and max(padding) < min(x.shape[2:]):
        mode = draw.choice(("zeros", "zeros", "reflect", "replicate", "circular"))
    if mode != "zeros":
        windows = options["stride"], (0, 0), options["dilation"], G
        functions = approximate.conv2d(multiplier, kinds, *windows)
        rows, columns = options["padding"]
        sides = (columns, columns, rows, rows)
        loose = loose | {f"{what} 0": 3 * ROUNDED for what in ("gradient", "Jacobian")}

        def padded(x: Tensor, weight: Tensor) -> Tensor:
            return approximate.apply(F.pad(x, sides, mode), weight, *functions)

        convolved = padded
    module = ApproxConv2d(
        channels * G, O, (R, S), bias=bias, padding_mode=mode, multiplier=multiplier,
        gradient=gradient, **options,
    ).to(draw.device)  # fmt: skip
    tensors = [x[0] if one else x, weight]
    if bias:
        tensors.append(draw.tensor(O, dtype=torch.float32))
        loose = loose | {f"{what} 2": ROUNDED for what in ("gradient", "Jacobian")}

    def function(*tensors: Tensor, impl: str) -> Tensor:
        module.impl = impl
        named: dict[str, Tensor] = dict(zip(("weight", "bias"), tensors[1:], strict=False))
        return torch.func.functional_call(module, named, tensors[:1])

    def exact(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        out = convolved(x[None] if one else x, weight)
        out = out[0] if one else out
        return out + bias[0][:, None, None] if bias else out

    return Call(
        function, exact, tensors, f"layer {multiplier} {gradient} {options} {mode} bias={bias}",
        torch.float32, {torch.float32: 0.0}, exact=True,
        special="ste" not in kinds, in_float32=True, loose=loose,
        chains=False,
    )  # fmt: skip


def _misshapen(draw: Draw, x: Tensor, weight: Tensor, options: dict) -> tuple:
    fault = draw.choice(
        ("groups", "channels", "kernel", "dimensions", "stride", "padding", "dilation")
    )
    O, channels, R, S = weight.shape  # noqa: E741
    if fault == "groups":
        options = options | {"groups": draw.choice((0, -1, x.shape[1] + 1, 1.0, True, None))}
    elif fault == "channels":
        weight = weight.new_ones(O, channels + 1, R, S)
    elif fault == "kernel":
        large = (R, x.shape[3] + x.shape[2] + 300)  # which fits padding="same"
        sizes = ((0, S),) if options["padding"] == "same" else ((0, S), large)
        weight = weight.new_ones(O, channels, *draw.choice(sizes))
    elif fault == "dimensions":
        x = x[0] if x.shape[0] else x.sum(0)
    elif fault == "padding":
        options = options | {
            "padding": draw.choice((-1, (1,), (0, 0, 0), "SAME", 1.0, (1.0, 1), None))
        }
    else:
        options = options | {
            fault: draw.choice((0, -1, (1,), (1, 1, 1), (1, 0), 1.5, True, None, "1"))
        }
    return fault, x, weight, options
