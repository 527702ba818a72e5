"""Elementwise approximate products."""

from __future__ import annotations

import torch
from torch import Tensor

from fuzzing import approximate
from fuzzing.approximate import draw_options, draw_wild
from fuzzing.cases import Call
from fuzzing.draw import Draw
from fuzzing.programs import Program
from hoconv import approx

HALF = (torch.float32, torch.float16, torch.bfloat16)
# Tolerance of a straight-through gradient: PyTorch's float32 product, or sum in its own order.
ROUNDED = 1e-6


def draw(draw: Draw, program: Program, invalid: bool) -> Call:
    shape = [
        draw.length() if i == 0 else draw.choice((0, 1, 2, 3, 5)) for i in range(draw.integer(0, 3))
    ]
    shape = shape[::-1]
    other = [n if draw.chance(0.7) else 1 for n in shape][draw.choice((0, 0, 0, 1)) :]
    multiplier, kinds, gradient = draw_options(draw)
    # Where an operand is broadcast, its gradient is a sum.
    drawn_kinds = ("ste", "ste") if other != shape else kinds
    a, b = draw_wild(draw, *shape, kinds=drawn_kinds), draw_wild(draw, *other, kinds=drawn_kinds)
    if draw.chance(0.5):
        a, b = b, a
    dtype = torch.float32
    if program.name == "under_autocast":
        dtype = draw.choice(HALF)
        a, b = a.to(dtype), b.to(dtype)
    options = {"multiplier": multiplier, "gradient": gradient}
    fault = ""
    if invalid:
        fault, a, b, options = make_faulty(draw, a, b, options)
        if fault == "shape":
            a, b = a.new_ones(3), a.new_ones(4)
    functions = approximate.multiply(multiplier, kinds)

    def function(a: Tensor, b: Tensor, impl: str) -> Tensor:
        return approx.multiply(a, b, **options, impl=impl)

    def exact(a: Tensor, b: Tensor) -> Tensor:
        a, b = torch.broadcast_tensors(a, b)
        return approximate.apply(a, b, *functions)

    return Call(
        function, exact, [a, b], str(options), dtype, dict.fromkeys(HALF, 0.0), exact=True,
        in_float32=True, loose=broadcast_tolerances(a, b) if not fault else {}, invalid=fault,
        chains=list(a.shape) == shape,
    )  # fmt: skip


def broadcast_tolerances(a: Tensor, b: Tensor) -> dict[str, float]:
    """Returns the tolerances of gradients that PyTorch sums, since their operand is broadcast."""
    shape = torch.broadcast_shapes(a.shape, b.shape)
    return {
        f"{what} {i}": ROUNDED
        for what in ("gradient", "Jacobian")
        for i, t in enumerate((a, b))
        if t.shape != shape
    }


def make_faulty(draw: Draw, a: Tensor, b: Tensor, options: dict) -> tuple:
    """Draws a fault that any approximate product must refuse; returns it and the arguments."""
    fault = draw.choice(("multiplier", "gradient", "dtype", "shape"))
    if fault == "multiplier":
        options = options | {"multiplier": draw.choice(("mbm8", "", None, 16, "MBM16"))}
    elif fault == "gradient":
        options = options | {
            "gradient": draw.choice(
                ("exact", ("approx",), ("ste", "ste", "ste"), ("approx", None), 3)
            )
        }
    elif fault == "dtype":
        dtype = draw.choice((torch.float64, torch.float16, torch.bfloat16, torch.int32))
        if draw.chance(0.5):
            a = a.nan_to_num(0, 0, 0).to(dtype)
        b = b.nan_to_num(0, 0, 0).to(dtype)
    return fault, a, b, options
