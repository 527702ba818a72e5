"""Approximate matrix products, as function and as linear layer.

M, N rows and columns of a matrix product, K what it sums over.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fuzzing import approximate
from fuzzing.approximate import draw_options, wild
from fuzzing.cases import Call
from fuzzing.draw import Draw
from fuzzing.operators.approx_multiply import HALF, ROUNDED, faulty
from fuzzing.programs import Program
from hoconv import ApproxLinear, approx


def definition(a: Tensor, b: Tensor, functions: tuple) -> Tensor:
    """All rows of a are one matrix's where b is one matrix; else leading dimensions broadcast."""
    if b.dim() == 2:
        rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
        return approximate.defined(rows, b, *functions).reshape(*a.shape[:-1], b.shape[1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (t.expand(*batch, *t.shape[-2:]) for t in (a, b))
    return approximate.defined(a, b, *functions)


def draw(draw: Draw, program: Program, invalid: bool) -> Call:
    long = not draw.tiny and draw.chance(0.03)  # more than a chunk of 1,024, in one of the sums
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
    if batch_b:  # one that is broadcast has a gradient that PyTorch sums
        loose = {f"{what} 1": ROUNDED for what in ("gradient", "Jacobian") if batch_b != batch}
    tame = ("ste", "ste") if loose else kinds
    a, b = wild(draw, *batch, M, K, kinds=tame), wild(draw, *batch_b, K, N, kinds=tame)
    dtype = torch.float32
    if program.name == "under_autocast":
        dtype = draw.choice(HALF)
        a, b = a.to(dtype), b.to(dtype)
    options = {"multiplier": multiplier, "gradient": gradient}
    fault = ""
    if invalid:
        fault, a, b, options = faulty(draw, a, b, options)
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
    """PyTorch's own products; under vmap and in a graph of several calls, too."""
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
    """``x @ weight.T``, and the bias added last."""
    K, N = max(K, 1), max(N, 1)
    batch = draw.choice(((), (M,), (2, M), (1, 2, M)))
    bias = draw.chance(0.5)
    x = wild(draw, *batch, K, kinds=kinds)
    weight = wild(draw, N, K, kinds=kinds)
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
