"""Definitions of the approximate products and their gradients, as sums in a fixed order.

B batch, C channels of the input, O of the output, G groups, H x W pixels of the input, OH x OW of
the output, R x S the kernel; M, N rows and columns of a matrix product, K its inner dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fuzzing.draw import Draw
from fuzzing.multipliers import NAMES, Floats, ordered_sum, product, slope
from fuzzing.verdicts import Undefined

GRADIENTS = ("approx", "ste", "analytic")
Pair = tuple[int, int]
Kinds = tuple[str, str]


def draw_options(draw: Draw) -> tuple[str, Kinds, Any]:
    """Draws a multiplier and the kinds of both gradients; returns also the argument `gradient`."""
    multiplier = draw.choice(NAMES)
    # A table has no derivative of its own.
    allowed = GRADIENTS[:2] if ":" in multiplier else GRADIENTS
    if draw.chance(0.7):
        kind = draw.choice(("approx", *allowed))
        return multiplier, (kind, kind), kind
    kinds = (draw.choice(allowed), draw.choice(allowed))
    return multiplier, kinds, draw.choice((kinds, list(kinds)))


def draw_wild(draw: Draw, *shape: int, kinds: Kinds) -> Tensor:
    """Draws float32 numbers, some of them infinite, NaN, or so large or small that products
    overflow or underflow.

    With straight-through gradients numbers are normal: PyTorch adds those in an order of its own,
    on which it would depend what overflows.
    """
    is_normal = "ste" in kinds
    values = draw.values(*shape, special=not is_normal and draw.chance(0.4))
    if not is_normal and draw.chance(0.3):
        exponents = torch.randint(-150, 128, shape, generator=draw.generator())
        values = torch.where(torch.rand(shape, generator=draw.generator()) < 0.3,
                             values * exponents.double().exp2(), values)  # fmt: skip
    return draw.layout(values.to(draw.device, torch.float32))


class NotDifferentiable(torch.autograd.Function):
    """Passes a first derivative on, and raises where it is differentiated again."""

    @staticmethod
    def forward(ctx: Any, derivative: Tensor, *sources: Tensor):
        return derivative.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        raise Undefined("an approximate product has no second derivative")


class NumPyFunction(torch.autograd.Function):
    """A function of two tensors and its gradients, all computed by NumPy functions."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, out: Callable, d_a: Callable, d_b: Callable):
        ctx.save_for_backward(a, b)
        ctx.functions = d_a, d_b
        return _tensor(out(a.numpy(), b.numpy()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        saved = ctx.saved_tensors
        twice = torch.is_grad_enabled()
        a, b = (t.detach().numpy() for t in saved)
        g = grad.detach().resolve_neg().contiguous().numpy()
        gradients = [
            _tensor(d(g, a, b)) if needed else None
            for d, needed in zip(ctx.functions, ctx.needs_input_grad, strict=False)
        ]
        if twice:
            gradients = [
                None if d is None else NotDifferentiable.apply(d, grad, *saved) for d in gradients
            ]
        return *gradients, None, None, None


def apply(a: Tensor, b: Tensor, out: Callable, d_a: Callable, d_b: Callable) -> Tensor:
    """Computes ``out(a, b)``, whose gradients are ``d_a(g, a, b)`` and ``d_b(g, a, b)``.

    The functions take arrays. 16-bit numbers are converted to float32, as under autocast.
    """
    a, b = (t.float().contiguous() for t in (a, b))
    return NumPyFunction.apply(a, b, out, d_a, d_b)  # pyright: ignore[reportReturnType]


def _tensor(a: Any) -> Tensor:
    return torch.from_numpy(np.array(a, np.float32, order="C"))


def multiply(name: str, kinds: Kinds) -> tuple[Callable, Callable, Callable]:
    """Returns the elementwise product of equal shapes, and its two gradients."""

    def of(kind: str, g: Floats, operand: Floats, other: Floats) -> Floats:
        with np.errstate(all="ignore"):
            if kind == "approx":
                return product(name, g, other)
            return g * (other if kind == "ste" else slope(name, operand, other))

    return (
        lambda a, b: product(name, a, b),
        lambda g, a, b: of(kinds[0], g, a, b),
        lambda g, a, b: of(kinds[1], g, b, a),
    )


def matmul(name: str, kinds: Kinds) -> tuple[Callable, Callable, Callable]:
    """Returns a (..., M, K) times b (..., K, N), of equal leading dimensions, and its gradients."""

    def times(a: Floats, b: Floats) -> Floats:
        return ordered_sum(
            ((product(name, a[..., :, k, None], b[..., None, k, :]), None)
             for k in range(a.shape[-1])),
            (*a.shape[:-1], b.shape[-1]),
        )  # fmt: skip

    def of_left(kind: str, g: Floats, a: Floats, b: Floats) -> Floats:
        if kind == "approx":
            return times(g, b.swapaxes(-1, -2))
        if kind == "ste":
            with np.errstate(all="ignore"):
                return (g.astype(np.float64) @ b.swapaxes(-1, -2)).astype(np.float32)
        with np.errstate(all="ignore"):
            return ordered_sum(
                ((g[..., :, n, None] * slope(name, a, b[..., None, :, n]), None)
                 for n in range(b.shape[-1])),
                a.shape,
            )  # fmt: skip

    def turned(t: Floats) -> Floats:
        return np.ascontiguousarray(t.swapaxes(-1, -2))

    return (
        times,
        lambda g, a, b: of_left(kinds[0], g, a, b),
        lambda g, a, b: of_left(kinds[1], turned(g), turned(b), turned(a)).swapaxes(-1, -2),
    )


def conv2d(
    name: str, kinds: Kinds, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> tuple[Callable, Callable, Callable]:
    """Returns the convolution of x (B, C, H, W), padded, and weight (O, C / G, R, S), and its
    gradients."""

    def padded(x: Floats) -> Floats:
        return np.pad(x, ((0, 0), (0, 0), *((p, p) for p in padding)))

    def size(x: Floats, w: Floats) -> Pair:
        down, right = (
            (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (w.shape[2 + i] - 1) - 1) // stride[i]
            + 1
            for i in range(2)
        )
        return down, right

    def window(image: Floats, r: int, s: int, OH: int, OW: int) -> Floats:
        """Returns the pixels that tap (r, s) of every output reads: (..., OH, OW)."""
        top, left = r * dilation[0], s * dilation[1]
        return image[..., top : top + (OH - 1) * stride[0] + 1 : stride[0],
                     left : left + (OW - 1) * stride[1] + 1 : stride[1]]  # fmt: skip

    def grouped(t: Floats, dim: int) -> Floats:
        shape = (*t.shape[:dim], groups, t.shape[dim] // groups, *t.shape[dim + 1 :])
        return t.reshape(shape)

    def forward(x: Floats, w: Floats) -> Floats:
        (O, channels, R, S), (OH, OW) = w.shape, size(x, w)  # noqa: E741
        image, filters = grouped(padded(x), 1), grouped(w, 0)  # (B, G, c, ...), (G, o, c, R, S)

        def terms() -> Iterator[tuple[Floats, None]]:
            for c, r, s in itertools.product(range(channels), range(R), range(S)):
                pixels = window(image[:, :, c], r, s, OH, OW)  # (B, G, OH, OW)
                yield product(name, pixels[:, :, None], filters[:, :, c, r, s, None, None]), None

        out = ordered_sum(terms(), (x.shape[0], groups, O // groups, OH, OW))
        return out.reshape(x.shape[0], O, OH, OW)

    def of_x(g: Floats, x: Floats, w: Floats) -> Floats:
        (O, channels, R, S), (B, C, H, W) = w.shape, x.shape  # noqa: E741
        OH, OW = g.shape[2:]
        g, filters = grouped(g, 1), grouped(w, 0)
        approx = kinds[0] == "approx"
        image = grouped(padded(x), 1)

        def terms() -> Iterator[tuple[Floats, Any]]:
            for o, r, s in itertools.product(range(O // groups), range(R), range(S)):
                there = np.zeros((H + 2 * padding[0], W + 2 * padding[1]), bool)
                window(there, r, s, OH, OW)[...] = True
                factor = filters[None, :, o, :, r, s, None, None]  # (1, G, c, 1, 1)
                if approx:
                    made = product(name, g[:, :, o, None], factor)
                elif kinds[0] == "ste":
                    made = g[:, :, o, None].astype(np.float64) * factor
                else:
                    pixels = window(image, r, s, OH, OW)
                    made = g[:, :, o, None] * slope(name, pixels, factor)
                whole = np.zeros((B, groups, channels, *there.shape), made.dtype)
                window(whole, r, s, OH, OW)[...] = made
                yield whole, there

        shape = (B, groups, channels, H + 2 * padding[0], W + 2 * padding[1])
        with np.errstate(all="ignore"):
            if approx:
                out = ordered_sum(terms(), shape)
            else:
                out = np.zeros(shape)
                for term, there in terms():
                    out = np.where(there, out + term, out)
        out = out[..., padding[0] : padding[0] + H, padding[1] : padding[1] + W]
        return out.reshape(B, C, H, W).astype(np.float32)

    def of_weight(g: Floats, x: Floats, w: Floats) -> Floats:
        (O, channels, R, S), B = w.shape, x.shape[0]  # noqa: E741
        OH, OW = g.shape[2:]
        image, g = grouped(padded(x), 1), grouped(g, 1)
        filters = grouped(w, 0)
        # The pixels that every tap reads: (B, G, c, R, S, OH, OW).
        pixels = np.stack([np.stack([window(image, r, s, OH, OW) for s in range(S)], 3)
                         for r in range(R)], 3)  # fmt: skip

        def terms() -> Iterator[tuple[Floats, None]]:
            for b, i, j in itertools.product(range(B), range(OH), range(OW)):
                left = g[b, :, :, i, j, None, None, None]  # (G, o, 1, 1, 1)
                right = pixels[b, :, None, :, :, :, i, j]  # (G, 1, c, R, S)
                if kinds[1] == "approx":
                    yield product(name, left, right), None
                elif kinds[1] == "ste":
                    yield left.astype(np.float64) * right, None
                else:
                    yield left * slope(name, filters, right), None

        shape = (groups, O // groups, channels, R, S)
        with np.errstate(all="ignore"):
            if kinds[1] == "ste":
                out = sum((term for term, _ in terms()), np.zeros(shape)).astype(np.float32)
            else:
                out = ordered_sum(terms(), shape)
        return out.reshape(w.shape)

    return forward, of_x, of_weight
