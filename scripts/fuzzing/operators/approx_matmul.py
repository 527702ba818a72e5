"""Approximate matrix products: the function and the linear layer.

M, N rows and columns of a matrix product, K its inner dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fuzzing import approximate
from fuzzing.approximate import draw_options, draw_wild
from fuzzing.cases import Call
from fuzzing.draw import Draw
from fuzzing.operators.approx_multiply import HALF, ROUNDED, make_faulty
from fuzzing.programs import Program
from hoconv import ApproxLinear, approx


def definition(a: Tensor, b: Tensor, functions: tuple) -> Tensor:
    """Multiplies all rows of a with b if b is one matrix; else leading dimensions broadcast."""
    if b.dim() == 2:
        rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
        return approximate.apply(rows, b, *functions).reshape(*a.shape[:-1], b.shape[1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (t.expand(*batch, *t.shape[-2:]) for t in (a, b))
    return approximate.apply(a, b, *functions)


def draw(draw: Draw, program: Program, invalid: bool) -> Call:
    long = not draw.tiny and draw.chance(0.03)  # one of the sums is longer than a chunk of 1,024
    M, K, N = (draw.choice((1, 2, 3)) if long else draw.length(70) for _ in range(3))
    if long:
        M, K, N = draw.choice(((M, 1500, N), (1100, K, N), (M, K, 2100)))
    multiplier, kinds, gradient = draw_options(draw)
    if not invalid and draw.chance(0.3):
        return _linear(draw, program, M, K, N, multiplier, kinds, gradient)
    batch = [draw.choice((0, 1, 2, 3)) for _ in range(draw.choice((0, 0, 1, 1, 2)))]
    if long:
        batch = []
    batch_b = [n if draw.chance(0.7) else 1 for n in batch][draw.choice((0, 0, 1, 9)) :]
    loose = {}
    if batch_b:  # PyTorch sums the gradient of an operand that is broadcast
        loose = {f"{what} 1": ROUNDED for what in ("gradient", "Jacobian") if batch_b != batch}
    drawn_kinds = ("ste", "ste") if loose else kinds
    a, b = (
        draw_wild(draw, *batch, M, K, kinds=drawn_kinds),
        draw_wild(draw, *batch_b, K, N, kinds=drawn_kinds),
    )
    dtype = torch.float32
    if program.name == "under_autocast":
        dtype = draw.choice(HALF)
        a, b = a.to(dtype), b.to(dtype)
    options = {"multiplier": multiplier, "gradient": gradient}
    fault = ""
    if invalid:
        fault, a, b, options = make_faulty(draw, a, b, options)
        if fault == "shape":
            shapes = draw.choice((
                ((2, 3), (4, 5)), ((3,), (3, 2)), ((2, 3), (3,)), ((2, 2, 3), (3, 3, 4)), ((), ()),
            ))  # fmt: skip
            a, b = (t.new_ones(shape) for t, shape in zip((a, b), shapes, strict=True))
    loose |= _straight_through(kinds)
    functions = approximate.matmul(multiplier, kinds)

    def function(a: Tensor, b: Tensor, impl: str) -> Tensor:
        return approx.matmul(a, b, **options, impl=impl)

    return Call(
        function, lambda a, b: definition(a, b, functions), [a, b], str(options), dtype,
        dict.fromkeys(HALF, 0.0), exact=True,
        special="ste" not in kinds, in_float32=True, loose=loose, invalid=fault,
        chains=K == N,
    )  # fmt: skip


def _straight_through(kinds: tuple[str, str]) -> dict[str, float]:
    """Returns the tolerances of straight-through gradients, which are PyTorch's own products."""
    return {
        f"{what} {i}": ROUNDED * 3
        for what in ("gradient", "Jacobian")
        for i, kind in enumerate(kinds)
        if kind == "ste"
    }


def _linear(
    draw: Draw, program: Program, M: int, K: int, N: int, multiplier: str, kinds: tuple,
    gradient: object,
) -> Call:  # fmt: skip
    """Draws a linear layer: ``x @ weight.T``, and the bias is added last."""
    K, N = max(K, 1), max(N, 1)
    batch = draw.choice(((), (M,), (2, M), (1, 2, M)))
    bias = draw.chance(0.5)
    x = draw_wild(draw, *batch, K, kinds=kinds)
    weight = draw_wild(draw, N, K, kinds=kinds)
    tensors = [x, weight]
    loose = _straight_through(kinds)
    if bias:
        tensors.append(draw.tensor(N, dtype=torch.float32))
        # PyTorch sums the gradient of the bias.
        loose |= {f"{what} 2": ROUNDED for what in ("gradient", "Jacobian")}
    module = ApproxLinear(K, N, bias, multiplier=multiplier, gradient=gradient).to(draw.device)  # pyright: ignore[reportArgumentType]
    functions = approximate.matmul(multiplier, kinds)

    def function(*tensors: Tensor, impl: str) -> Tensor:
        module.impl = impl
        names = ("weight", "bias")
        return torch.func.functional_call(
            module, dict(zip(names, tensors[1:], strict=False)), tensors[:1]
        )

    def exact(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        rows = x if x.dim() > 1 else x[None]
        out = definition(rows, weight.mT, functions)
        out = out if x.dim() > 1 else out[0]
        return out + bias[0] if bias else out

    return Call(
        function, exact, tensors, f"linear {multiplier} {gradient} bias={bias}", torch.float32,
        {torch.float32: 0.0}, exact=True,
        special="ste" not in kinds, in_float32=True, loose=loose, chains=K == N,
    )  # fmt: skip
