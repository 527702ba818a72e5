"""Products of look-up tables: matrix products of integers, and the quantised layers.

The second definition reads integers modulo 2^bits, and files as they are described.

B batch, M, N rows and columns of a matrix product, K its inner dimension.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fuzzing.approximate import NotDifferentiable
from fuzzing.cases import Call
from fuzzing.draw import Draw
from fuzzing.programs import Program
from hoconv import approx


def draw(draw: Draw, program: Program, invalid: bool) -> Call:
    signed = draw.chance(0.5)
    products, table = _table(draw, signed)
    if not invalid and draw.chance(0.5):
        return _layer(draw, program, products, table)
    B, M, N = draw.batch(), draw.length(40), draw.length(70)
    K = draw.length(130)
    low, high = (-128, 127) if signed else (0, 255)
    dtype = torch.int8 if signed else torch.uint8

    def integers(*shape: int) -> Tensor:
        some = torch.randint(low, high + 1, shape, generator=draw.generator())
        some = some.to(draw.device, dtype)
        # PyTorch cannot save a program that holds an empty tensor with unusual strides.
        return draw.layout(some) if some.numel() or not draw.plain_layouts else some

    a, b = integers(B, M, K), integers(B, K, N)
    given, fault = table, ""
    kind, bits = draw.choice((None, "saturate", "wrap")), draw.integer(2, 32 if signed else 31)
    register = f"{kind}:bits={bits}" if kind and not invalid else None
    if invalid:
        fault = draw.choice(("shape", "dtype", "sum"))
        if fault == "shape":
            b = integers(B, K + 1, N) if draw.chance(0.5) else integers(B + 1, K, N)
        elif fault == "dtype":
            a = a.to(
                draw.choice((torch.int32, torch.float32, torch.uint8 if signed else torch.int8))
            )
        else:
            given = approx.LookupTable(np.full(products.shape, 2**30), signed=signed)
            a, b = integers(1, 1, 2 + K), integers(1, 2 + K, 1)
    nothing = torch.zeros((), device=draw.device)  # added, since programs differentiate a tensor

    def function(x: Tensor, impl: str) -> Tensor:
        return approx.table_matmul(a, b, given, accumulator=register, impl=impl) + x

    def exact(x: Tensor) -> Tensor:
        left, right = (
            t.cpu().numpy().astype(np.int64) % size
            for t, size in zip((a, b), products.shape, strict=True)
        )
        terms = products[left[:, :, :, None], right[:, None]]
        out = terms.sum(2)
        if register:
            least = -(1 << bits - 1) if signed else 0
            out = np.zeros_like(out)
            for term in np.moveaxis(terms, 2, 0):
                out = out + term
                if kind == "wrap":
                    out = (out - least) % (1 << bits) + least
                out = out.clip(least, least + (1 << bits) - 1)
        return torch.from_numpy(out).to(torch.int32) + x

    sizes = f"{tuple(a.shape)} {a.stride()} {tuple(b.shape)} {b.stride()}"
    what = f"table_matmul {sizes} {table.dtype} {register}"
    return Call(
        function, exact, [nothing], what, torch.float32, {torch.float32: 0.0}, exact=True,
        in_float32=True, invalid=fault, chains=False,
        loose=dict.fromkeys(("first", "gradient", "Jacobian"), 2e-5),  # sums over the output
    )  # fmt: skip


def _table(draw: Draw, signed: bool) -> tuple[np.ndarray, approx.LookupTable]:
    """Draws a table of products, from an array in any layout or from a file."""
    bits = draw.choice(((8, 8), (8, 8), (draw.integer(2, 8), draw.integer(2, 8))))
    most = draw.choice((100, 2**15 - 1, 2**22))
    random = np.random.default_rng(draw.integer(0, 2**31))
    products = random.integers(-most if signed else 0, most + 1, [2**n for n in bits])
    way = draw.choice(
        ("array", "fortran", "strided", "list", "npy", "npy flat", "npy fortran", "raw", "text",
         "text by value", "text in one line", "npy by value")
    )  # fmt: skip
    if way == "array":
        return products, approx.LookupTable(
            products.astype(draw.choice((np.int32, np.int64))), signed=signed
        )
    if way == "fortran":
        return products, approx.LookupTable(np.asfortranarray(products), signed=signed)
    if way == "strided":
        return products, approx.LookupTable(products.T[::-1].copy()[::-1].T, signed=signed)
    if way == "list":
        return products, approx.LookupTable(products.tolist(), signed=signed)
    # By value the numbers above the middle of the indices, which are negative, come first.
    halves = [np.r_[n // 2 : n, 0 : n // 2] if signed else np.arange(n) for n in products.shape]
    written = products[np.ix_(*halves)] if "by value" in way else products
    with tempfile.TemporaryDirectory() as folder:
        suffix = {"npy": "npy", "raw": "bin", "tex": "txt"}[way[:3]]
        path = Path(folder, f"table.{suffix}")
        if way == "raw":
            two = most < 2**15
            products.astype(("<i2" if signed else "<u2") if two else "<i4").tofile(path)
        elif way.startswith("npy"):
            array = written.flatten() if way == "npy flat" else written
            np.save(path, np.asfortranarray(array) if way == "npy fortran" else array)
        else:
            array = written.reshape(1, -1) if way == "text in one line" else written
            np.savetxt(path, array, "%d", draw.choice((" ", "\t", ", ")))
        order = "value" if "by value" in way else "index"
        given = bits if way in ("raw", "npy flat", "text in one line") else None
        return products, approx.LookupTable.load(
            os.fspath(path), signed=signed, bits=given, order=order
        )


def _layer(draw: Draw, program: Program, products: np.ndarray, table: approx.LookupTable) -> Call:
    """Draws a quantised layer: x = scale * (q - zero point), 255 steps from the least number to the
    largest one, 0 included."""
    K, N, rows = max(1, draw.length(40)), max(1, draw.length(20)), draw.choice((0, 1, 2, 5))
    convolution = draw.chance(0.5)
    chosen = [_derivatives(draw, products, table.signed, operand) for operand in range(2)]
    gradient, derivatives = [pair[0] for pair in chosen], [pair[1] for pair in chosen]
    straight_through = gradient == ["ste", "ste"]
    weight = draw.tensor(N, K, dtype=torch.float32) if not convolution else None
    stride, padding, G = draw.choice((1, 2)), draw.choice((0, 1, 2)), draw.choice((1, 1, 2))
    if convolution:
        C, R = G * draw.choice((1, 2, 3)), draw.choice((1, 2, 3))
        weight = draw.tensor(G * draw.choice((1, 2)), C // G, R, R, dtype=torch.float32)
        x = draw.tensor(
            rows, C, 3 + draw.integer(0, 4), 3 + draw.integer(0, 4), dtype=torch.float32
        )
        module = approx.TableConv2d(
            C, weight.shape[0], R, table=table, stride=stride, padding=padding, groups=G,
            bias=False, gradient=gradient,
        )  # fmt: skip
    else:
        x = draw.tensor(*draw.choice(((), (rows,), (2, rows))), K, dtype=torch.float32)
        module = approx.TableLinear(K, N, table=table, bias=False, gradient=gradient)
    least, most = sorted(draw.values(2).float().tolist())
    assert weight is not None
    module.quantizer.input.least.fill_(least)
    module.quantizer.input.most.fill_(most)
    module = module.eval().to(draw.device)
    bits = [n.bit_length() - 1 for n in products.shape]
    ranges = ((least, most), _limits(weight))
    x, weight = (
        _between_ties(t, *limits, n, table.signed)
        for t, limits, n in zip((x, weight), ranges, bits, strict=True)
    )

    def function(x: Tensor, weight: Tensor, impl: str) -> Tensor:
        module.impl = impl
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        """Has the value of the table's sums, and the derivatives that were drawn."""
        ranges = ((least, most), _limits(weight))
        if not straight_through:
            x, weight = _FirstOrder.apply(x, weight)  # pyright: ignore
        (on_x, q_x, scale_x, zero_x), (on_w, q_w, scale_w, zero_w) = (
            _quantised(t, *limits, n, table.signed)
            for t, limits, n in zip((x, weight), ranges, bits, strict=True)
        )
        rows, columns = products.shape
        dims = (3, 6, 7) if convolution else (-1,)

        def pair(left: Tensor, right: Tensor, zero: float) -> tuple[Tensor, Tensor]:
            if not convolution:
                return left[..., None, :], right
            R = right.shape[2]
            framed = torch.nn.functional.pad(left, (padding,) * 4, value=zero)
            windows = framed.unfold(2, R, stride).unfold(3, R, stride)  # (B, C, OH, OW, R, R)
            windows = windows.unflatten(1, (G, 1, -1))  # (B, G, 1, C / G, OH, OW, R, R)
            # (G, O / G, C / G, 1, 1, R, R)
            return windows, right.unflatten(0, (G, -1))[..., None, None, :, :]

        left, right = pair(q_x, q_w, zero_x)
        real_left, real_right = pair(on_x, on_w, 0)
        looked_up, slope_x, slope_w = (
            torch.from_numpy(t)[left % rows, right % columns] for t in (products, *derivatives)
        )
        sums = (looked_up - zero_w * left - zero_x * right + zero_x * zero_w).sum(dims)
        if straight_through:
            straight = (real_left * real_right).sum(dims)
        else:
            straight = scale_w * (slope_x - zero_w) * real_left
            straight = (straight + scale_x * (slope_w - zero_x) * real_right).sum(dims)
        if convolution:
            sums, straight = sums.flatten(1, 2), straight.flatten(1, 2)
        value = scale_x * scale_w * sums.double()
        return value + (straight - straight.detach())

    named = [g if isinstance(g, str) else f"{g.dim()}-D table" for g in gradient]
    what = f"{type(module).__name__} {named} x in [{least:.3g}, {most:.3g}] {table.dtype}"
    return Call(
        function, exact, [x, weight], f"{what} stride={stride} padding={padding} groups={G}",
        torch.float32, {torch.float32: 2e-6}, in_float32=True, chains=False,
        special=straight_through,
    )  # fmt: skip


class _FirstOrder(torch.autograd.Function):
    """Passes two tensors on, and raises where their gradients are differentiated again."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor):
        ctx.save_for_backward(a, b)
        return a.clone(), b.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        if not torch.is_grad_enabled():
            return grads
        return tuple(NotDifferentiable.apply(g, g, *ctx.saved_tensors) for g in grads)


def _derivatives(
    draw: Draw, products: np.ndarray, signed: bool, operand: int
) -> tuple[str | Tensor, np.ndarray]:
    """Draws the gradient of an operand; returns it as a layer takes it, and its derivatives by
    index."""
    way = draw.choice(("ste", "ste", "difference", "one", "outer", "any"))
    random = np.random.default_rng(draw.integer(0, 2**31))
    # By value, the operand first.
    halves = [n // 2 if signed else 0 for n in products.shape]
    mine = np.roll(products, halves, (0, 1)).astype(np.float64)
    mine = mine.T if operand else mine
    size, others = mine.shape
    if way == "difference":
        window = draw.choice((1, 2, 5, 16, 255))
        given = f"difference:window={window}"
        last = np.minimum(np.arange(size) + window, size - 1)
        first = np.maximum(np.arange(size) - window, 0)
        found = (mine[last] - mine[first]) / (last - first)[:, None]
    elif way == "ste":
        given = way
        found = np.broadcast_to(np.arange(others) - halves[1 - operand], mine.shape)
    else:
        rows = 1 if way == "one" else size
        found = random.standard_normal((rows, others)).astype(np.float32)
        if way == "outer":
            found = np.outer(found[:, 0], found[0])
        shifts = [-halves[operand] * (rows > 1), -halves[1 - operand]]
        by_index = np.roll(found, shifts, (0, 1))
        by_index = by_index[0] if rows == 1 else by_index.T if operand else by_index
        given = torch.from_numpy(np.ascontiguousarray(by_index))
        found = np.broadcast_to(found, mine.shape)
    found = found.T if operand else found
    return given, np.roll(found, [-n for n in halves], (0, 1)).astype(np.float64)


def _limits(t: Tensor) -> tuple[float, float]:
    return (t.min().item(), t.max().item())


def _scale(least: float, most: float, bits: int, signed: bool) -> tuple[float, int, int, int]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    first, last = np.float32(min(least, 0)), np.float32(max(most, 0))
    scale = max((last - first) / np.float32(2**bits - 1), np.finfo(np.float32).tiny)
    zero = int(np.clip(np.round(np.float32(low) - first / scale), low, high))
    return float(scale), zero, low, high


def _quantised(t: Tensor, least: float, most: float, bits: int, signed: bool) -> tuple:
    """Quantises: returns the rounded t, with a gradient inside the range; q; scale; zero point."""
    scale, zero, low, high = _scale(least, most, bits, signed)
    wanted = (t.detach() / scale).round() + zero
    q = wanted.clamp(low, high)
    inside = (wanted >= low) & (wanted <= high)
    on = (q - zero) * scale + (t - t.detach()) * inside
    return on, q.long(), scale, zero


def _between_ties(t: Tensor, least: float, most: float, bits: int, signed: bool) -> Tensor:
    """Replaces numbers halfway between two integers, where rounding of t / scale decides."""
    scale = _scale(least, most, bits, signed)[0]
    ratio = t.double() / scale
    tie = ((ratio - ratio.floor()) - 0.5).abs() < 1e-2
    if t.is_inference() or not tie.any():
        return t
    return torch.where(tie, 0.0, t)
