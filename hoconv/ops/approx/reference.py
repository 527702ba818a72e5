"""The definition of the approximate matrix product, of the convolution and of their gradients.

Sums have a fixed order, so that every implementation gives the same bits. k is cut into chunks of
1,024 consecutive indices. The terms of a chunk are added to +0 in ascending k, each addition
rounded to float32; then the sums of the chunks are added, in ascending order.

B batch, C channels of the input, O of the output, G groups, H x W pixels of the input, OH x OW of
the output, L all pixels of the output, R x S the kernel; M, N rows and columns of a matrix product,
K what it sums over.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hoconv.ops.approx.multipliers import MULTIPLIERS, multiply_by_entries

CHUNK = 1024
TINY = torch.finfo(torch.float32).tiny  # the least scale
_MOST_PRODUCTS = 2**20  # held in memory at once, about: 4 MiB
Product = Callable[[Tensor, Tensor], Tensor]
Pair = tuple[int, int]


def product_of(multiplier: str, entries: Tensor | None) -> Product:
    """Returns the product of a multiplier, by its name or by the entries of its table."""
    if entries is None:
        return MULTIPLIERS[multiplier].multiply
    return functools.partial(multiply_by_entries, entries)


def multiply(a: Tensor, b: Tensor, multiplier: str, entries: Tensor | None = None) -> Tensor:
    """The elementwise product of a and b of equal shapes."""
    return product_of(multiplier, entries)(a, b)


def multiply_derivative(a: Tensor, b: Tensor, multiplier: str) -> Tensor:
    """The multiplier's own derivative with respect to a, elementwise, of equal shapes."""
    return MULTIPLIERS[multiplier].derivative(a, b).clone()  # an exact product's is b itself


def matmul(a: Tensor, b: Tensor, multiplier: str, entries: Tensor | None = None) -> Tensor:
    """a (M, K) times b (K, N), or a (B, M, K) times b (B, K, N): out[m, n] = sum over k of
    a[m, k] * b[k, n]."""
    return _sum_of_products(product_of(multiplier, entries), a, b)


def matmul_derivative(grad: Tensor, a: Tensor, b: Tensor, multiplier: str) -> Tensor:
    """The gradient of a by the multiplier's own derivative d:
    out[m, k] = sum over n of grad[m, n] * d(a[m, k], b[k, n]), in the order of all sums."""
    derivative = MULTIPLIERS[multiplier].derivative
    step = max(1, _MOST_PRODUCTS // max(a.numel(), 1))

    def products(first: int, last: int) -> Tensor:
        slopes = derivative(a.unsqueeze(-1), b[..., None, :, first:last])  # (..., M, K, n)
        return (grad[..., None, first:last] * slopes).movedim(-1, 0)

    return _ordered_sum(products, b.shape[-1], step, torch.zeros_like(a))


def table_matmul(
    a: Tensor, b: Tensor, table: Tensor, least: int | None = None, most: int | None = None
) -> Tensor:
    """a (B, M, K) times b (B, K, N) of bytes, whose products are table (256, 256). Products are
    added in ascending k; a sum that leaves least to most ends at the limit, at each addition."""
    (B, M, K), N = a.shape, b.shape[2]
    out = table.new_zeros(B, M, N)
    is_limited = least is not None or most is not None
    step = max(1, _MOST_PRODUCTS // max(B * M * N, 1))
    a, b = (t.int() & 255 for t in (a, b))
    for k in range(0, K, step):
        products = table[a[:, :, k : k + step, None], b[:, None, k : k + step]]  # (B, M, k, N)
        if not is_limited:
            out += products.sum(2, dtype=torch.int32)
            continue
        for product in products.unbind(2):
            out = (out.long() + product).clamp(least, most).int()
    return out


def table_depthwise(
    x: Tensor, weight: Tensor, table: Tensor, stride: Pair, padding: Pair, dilation: Pair,
    signed: bool, least: int | None = None, most: int | None = None, wraps: bool = False,
    scale_a: Tensor | None = None, zero_a: Tensor | None = None, scale_b: Tensor | None = None,
    zero_b: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The convolution of bytes x (B, C, H, W), padded with zero_a or 0, with weight (O, 1, R, S):
    int32 sums as of :func:`table_matmul`, or their real numbers as of :func:`integer_total`. Sums
    that wrap do so from least to most."""
    (B, C), O = x.shape[:2], weight.shape[0]  # noqa: E741
    size = output_size(x.shape, weight.shape, stride, padding, dilation)
    a = windows(x, zero_a, weight.shape[2:], stride, padding, dilation, C).mT  # (C, B * L, K)
    b = weight.reshape(C, O // C, -1).mT
    sums = table_matmul(a, b, table, *(() if wraps else (least, most)))
    if wraps:
        assert least is not None
        assert most is not None
        sums = (((sums.long() - least) & (most - least)) + least).int()
    if scale_a is None or zero_a is None or scale_b is None or zero_b is None:
        return sums.unflatten(1, (B, size[0] * size[1])).permute(1, 0, 3, 2).reshape(B, O, *size)
    a, b = (t.view(torch.int8 if signed else torch.uint8) for t in (a, b))
    rows, columns = a.sum(2, dtype=torch.int64), b.sum(1, dtype=torch.int64)
    grids = scale_a, zero_a, scale_b, zero_b
    return integer_total(sums, rows, columns, *grids, a.shape[2], math.prod(size)).view(B, O, *size)


def range_of_batches(
    least: Tensor, most: Tensor, seen_least: Tensor, seen_most: Tensor, momentum: float | None
) -> tuple[Tensor, Tensor]:
    """The range seen so far, NaN at first, and that of another batch: exponential averages, or,
    without momentum, the extremes. A batch that is not finite changes nothing."""
    is_finite = least.isfinite() & most.isfinite()

    def join(new: Tensor, seen: Tensor, extreme: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        known = extreme(seen, new) if momentum is None else seen + momentum * (new - seen)
        return torch.where(is_finite, torch.where(seen.isnan(), new, known), seen)

    return join(least, seen_least, torch.minimum), join(most, seen_most, torch.maximum)


def limits(bits: int, signed: bool) -> tuple[int, int]:
    """Returns the least and the largest integer of so many bits."""
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


def affine(least: Tensor, most: Tensor, bits: int, signed: bool) -> tuple[Tensor, Tensor]:
    """The scale (float32) and zero point (int32) with which integers of so many bits cover a range
    and 0."""
    lowest, highest = limits(bits, signed)
    least, most = least.clamp(max=0), most.clamp(min=0)
    # By a tensor: on a GPU, PyTorch multiplies by the reciprocal of a number, which rounds twice.
    scale = ((most - least) / torch.full_like(least, highest - lowest)).clamp(min=TINY)
    zero_point = (lowest - least / scale).round().clamp(lowest, highest)
    return scale, zero_point.int()


def integers(real: Tensor, scale: Tensor, zero: Tensor, is_byte: bool) -> Tensor:
    """The integers of real numbers scale * (q - zero), int32; or their lowest bytes, uint8."""
    q = (real / scale).round().int() + zero
    return q.to(torch.uint8) if is_byte else q


def windows(
    x: Tensor, fill: Tensor | None, kernel: Sequence[int], stride: Pair, padding: Pair,
    dilation: Pair, groups: int,
) -> Tensor:  # fmt: skip
    """The windows of integers x (B, C, H, W), padded with `fill` or 0, as a matrix for each group:
    (G, C / G * R * S, B * L)."""
    B, C = x.shape[:2]
    OH, OW = output_size(x.shape, [0, 0, *kernel], stride, padding, dilation)
    if max(padding) > 0:
        outside = 0 if fill is None else fill.to(x.dtype)
        x = F.pad(x - outside, (padding[1], padding[1], padding[0], padding[0])) + outside
    taps = [
        x[:, :, top : top + (OH - 1) * stride[0] + 1 : stride[0],
          left : left + (OW - 1) * stride[1] + 1 : stride[1]].transpose(0, 1)
        for top in range(0, kernel[0] * dilation[0], dilation[0])
        for left in range(0, kernel[1] * dilation[1], dilation[1])
    ]  # fmt: skip
    return torch.stack(taps, 1).view(groups, C // groups * len(taps), B * OH * OW)


def integer_total(
    products: Tensor, rows: Tensor, columns: Tensor, scale_a: Tensor, zero_a: Tensor,
    scale_b: Tensor, zero_b: Tensor, K: int, pixels: int,
) -> Tensor:  # fmt: skip
    """The sums of (q_a - zero_a) (q_b - zero_b) as real numbers (M / pixels, B * N, pixels), given
    those of the products of q_a and q_b (B, M, N), of q_a (B, M) and of q_b (B, N), of K terms."""
    B, M, N = products.shape
    total = products - (zero_b * rows).unsqueeze(2) - (zero_a * columns).unsqueeze(1)
    total = total + K * zero_a.long() * zero_b
    real = (scale_a.double() * scale_b * total).float().view(B, M // pixels, pixels, N)
    return real.permute(1, 0, 3, 2).reshape(M // pixels, B * N, pixels)


def table_derivative(grad: Tensor, a: Tensor, b: Tensor, table: Tensor) -> Tensor:
    """The gradient of a by derivatives in a table: out[m, k] = sum over n of
    grad[m, n] * table[a[m, k], b[k, n]], of grad (B, M, N), bytes a (B, M, K) and b (B, K, N)."""
    a, b = a.int(), b.int()
    out = grad.new_zeros(a.shape)
    step = max(1, _MOST_PRODUCTS // max(a.numel(), 1))
    for n in range(0, b.shape[2], step):
        slopes = table[a.unsqueeze(-1), b[:, None, :, n : n + step]]  # (B, M, K, n)
        out += (slopes @ grad[:, :, n : n + step, None]).squeeze(-1)
    return out


def conv2d(
    x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    multiplier: str, entries: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out[o, oh, ow] = sum over k = (c, r, s) of x[c, ...] * weight[o, c, r, s].

    x (B, C, H, W), padded with zeros, which are operands like all others; weight (O, C / G, R, S);
    out (B, O, OH, OW).
    """
    windows = stride, padding, dilation
    return conv2d_by(lambda a, b: matmul(a, b, multiplier, entries), x, weight, windows, groups)


def conv2d_by(
    product: Product, x: Tensor, weight: Tensor, windows: Sequence[Pair], groups: int
) -> Tensor:
    """Computes a convolution by a product of matrices: unfolded windows (B * G, L, K) times filters
    (B * G, K, O / G). `windows` are stride, padding and dilation."""
    B, O = x.shape[0], weight.shape[0]  # noqa: E741
    unfolded = columns(x, weight.shape, *windows, groups=groups)  # (B * G, K, L)
    filters = weight.reshape(groups, O // groups, -1).repeat(B, 1, 1)  # (B * G, O / G, K)
    out = product(unfolded.mT, filters.mT)  # (B * G, L, O / G)
    return out.mT.reshape(B, O, *output_size(x.shape, weight.shape, *windows))


def conv2d_backward_input(
    grad: Tensor, weight: Tensor, size: list[int], stride: Pair, padding: Pair, dilation: Pair,
    groups: int, multiplier: str, entries: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of x: out[c, h, w] = sum over k = (o, r, s) of grad[o, ...] * weight[o, c, r, s]
    where an output multiplies x[c, h, w] by weight[o, c, r, s]; other terms are left out."""
    (B, O), (_, _, R, S) = grad.shape[:2], weight.shape  # noqa: E741
    shape = (B, O, *size[2:])

    def windows(t: Tensor) -> Tensor:
        """Gathers the outputs that a pixel of x contributes to: (B * G, O / G * R * S, H * W)."""
        spread = t.new_zeros(
            B, O, (t.shape[2] - 1) * stride[0] + 1, (t.shape[3] - 1) * stride[1] + 1
        )
        spread[:, :, :: stride[0], :: stride[1]] = t
        before = [dilation[i] * (n - 1) - padding[i] for i, n in enumerate((R, S))]
        whole = [shape[2 + i] + dilation[i] * (n - 1) for i, n in enumerate((R, S))]
        after = [whole[i] - before[i] - spread.shape[2 + i] for i in range(2)]
        spread = F.pad(spread, (before[1], after[1], before[0], after[0]))
        unfolded = F.unfold(spread, (R, S), dilation)
        unfolded = unfolded.unflatten(1, (groups, O // groups, R, S)).flip((3, 4))
        return unfolded.flatten(2, 4).flatten(0, 1)

    exists = windows(torch.ones_like(grad)) == 1
    filters = weight.unflatten(0, (groups, O // groups)).transpose(1, 2)  # (G, C / G, O / G, R, S)
    filters = filters.flatten(2).repeat(B, 1, 1)
    product = product_of(multiplier, entries)
    out = _sum_of_products(product, windows(grad).mT, filters.mT, exists.mT)
    return out.mT.reshape(size)


def conv2d_backward_weight(
    grad: Tensor, x: Tensor, size: list[int], stride: Pair, padding: Pair, dilation: Pair,
    groups: int, multiplier: str, entries: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of the weight: out[o, c, r, s] = sum over k = (b, oh, ow) of
    grad[b, o, oh, ow] * x[b, c, ...]."""
    B, O = grad.shape[:2]  # noqa: E741
    windows = columns(x, size, stride, padding, dilation, groups)
    windows = windows.unflatten(0, (B, groups)).permute(1, 0, 3, 2).flatten(1, 2)  # (G, B * L, K)
    grad = grad.flatten(2).unflatten(1, (groups, O // groups))  # (B, G, O / G, L)
    grad = grad.permute(1, 2, 0, 3).flatten(2)
    return matmul(grad, windows, multiplier, entries).reshape(size)


def output_size(
    x: torch.Size | list[int], weight: torch.Size | list[int], stride: Pair, padding: Pair,
    dilation: Pair,
) -> Pair:  # fmt: skip
    """Returns (OH, OW)."""
    rows, columns = (
        (x[2 + i] + 2 * padding[i] - dilation[i] * (weight[2 + i] - 1) - 1) // stride[i] + 1
        for i in range(2)
    )
    return rows, columns


def columns(
    x: Tensor, weight: torch.Size | list[int], stride: Pair, padding: Pair, dilation: Pair,
    groups: int,
) -> Tensor:  # fmt: skip
    """Unfolds the window of every output: (B * G, C / G * R * S, L)."""
    windows = F.unfold(x, (weight[2], weight[3]), dilation, padding, stride)
    return windows.unflatten(1, (groups, -1)).flatten(0, 1)


def _sum_of_products(
    product: Product, a: Tensor, b: Tensor, exists: Tensor | None = None
) -> Tensor:
    """Multiplies a (..., M, K) by b (..., K, N); leaves out terms where `exists`, of a's shape, is
    false."""
    out = a.new_zeros(*a.shape[:-1], b.shape[-1])

    def products(first: int, last: int) -> Tensor:
        terms = product(a[..., first:last, None], b[..., None, first:last, :])  # (..., M, k, N)
        if exists is not None:
            terms = torch.where(exists[..., first:last, None], terms, 0.0)
        return terms.movedim(-2, 0)

    step = max(1, _MOST_PRODUCTS // max(out.numel(), 1))
    return _ordered_sum(products, a.shape[-1], step, out)


def _ordered_sum(products: Callable[[int, int], Tensor], K: int, step: int, zero: Tensor) -> Tensor:
    """Adds K terms in the fixed order.

    ``products(first, last)`` computes terms first to last - 1, stacked; `step` of them at once.
    """
    total = None
    for chunk in range(0, K, CHUNK):
        end, partial = min(chunk + CHUNK, K), zero
        for first in range(chunk, end, step):
            for term in products(first, min(first + step, end)).unbind(0):
                partial = partial + term
        total = partial if total is None else total + partial
    return zero if total is None else total
