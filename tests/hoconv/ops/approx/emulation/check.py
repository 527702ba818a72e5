"""Runs the CUDA kernels for products of integers, and compares all their bits with the definitions;
ends with 1 where they differ.

The argument is a library of emulated kernels, or "cuda", for those of a GPU. A process of its own:
what the library registers for tensors of a CPU stays.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from hoconv.ops.approx.accumulators import code_of
from hoconv.ops.approx.ops import OPS
from hoconv.ops.approx.reference import output_size
from tests.hoconv.ops.approx.test_c_functions import adder
from tests.hoconv.ops.emulation.compile import report

_CUDA, _REFERENCE = OPS["cuda"], OPS["reference"]
_RANDOM = 40  # windows of each kind
# Least and most of a register, and whether it wraps.
_KEPT = ((None, None, False), (-2048, 2047, False), (0, 4095, False), (-2048, 2047, True))


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.int32 if isinstance(value, int) else torch.float32)


def _whole(dtype: torch.dtype, *shape: int) -> Tensor:
    low, high = (-(2**31), 2**31) if dtype == torch.int32 else (-300, 300)
    t = torch.randint(low, high, shape).to(dtype)
    return t.contiguous(memory_format=torch.channels_last) if random.random() < 0.5 else t


def _bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _table(most: int) -> Tensor:
    return torch.randint(-most - 1, most + 1, (256, 256), dtype=torch.int32)


def _windows(taps: int) -> tuple[tuple[int, ...], list[tuple[int, int]], tuple[int, int]]:
    """Draws a kernel; stride, padding and dilation; and an image that the kernel fits."""
    kernel = random.randint(1, 8), random.randint(1, 8)
    if math.prod(kernel) > taps:
        kernel = 3, 3
    stride, dilation = ((random.randint(1, 3), random.randint(1, 3)) for _ in range(2))
    padding = random.randint(0, 4), random.randint(0, 4)
    least = [max(1, d * (n - 1) + 1 - 2 * p) for n, d, p in zip(kernel, dilation, padding)]
    size = least[0] + random.randint(0, 9), least[1] + random.randint(0, 9)
    return kernel, [stride, padding, dilation], size


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())


def _both(op: str, *args: Any) -> Iterator[str]:
    """Yields the call if the results differ."""
    device = "cuda" if sys.argv[1] == "cuda" else "cpu"
    there = (a.to(device) if isinstance(a, Tensor) else a for a in args)
    found = getattr(_CUDA, op)(*there)
    expected = getattr(_REFERENCE, op)(*args)
    if isinstance(found, Tensor):
        found, expected = [found], [expected]
    if not all(a.dtype == b.dtype and _equal(a.cpu(), b) for a, b in zip(found, expected)):
        shapes = [tuple(a.shape) if isinstance(a, Tensor) else a for a in args]
        yield f"{op}{tuple(shapes)}"


def _ranges() -> Iterator[str]:
    odd = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e38, 1e38)
    for _ in range(40 * _RANDOM):
        batch = sorted(random.choice((random.gauss(0, 3), *odd)) for _ in range(2))
        seen = [random.gauss(0, 3), random.gauss(0, 3)]
        if random.random() < 0.2:
            seen = [math.nan, math.nan]
        momentum = random.choice((None, 0.01, 0.25, 1.0))
        yield from _both("range_of_batches", *map(_number, batch + seen), momentum)
        if all(map(math.isfinite, batch)):
            bits, signed = random.randint(2, 16), random.random() < 0.5
            yield from _both("affine", *map(_number, batch), bits, signed)


def _integers() -> Iterator[str]:
    scale = _number(0.37)
    for zero, is_byte in itertools.product((-128, 0, 77), (True, False)):
        for shape in ((3, 5, 7, 2), (0, 2), (1030,)):
            real = scale * torch.randint(-255, 256, shape)
            yield from _both("integers", real, scale, _number(zero), is_byte)
            yield from _both("integers", real.mT if real.dim() > 1 else real[::2], scale,
                             _number(zero), is_byte)  # fmt: skip


def _unfolded() -> Iterator[str]:
    for dtype in (torch.uint8, torch.int8, torch.int32):
        for n in range(_RANDOM):
            kernel, windows, size = _windows(64)
            G = random.randint(1, 3)
            x = _whole(dtype, random.randint(1, 3), G * random.randint(1, 3), *size)
            fill = _number(random.choice((-128, 5, 255))) if n % 2 else None
            yield from _both("windows", x, fill, kernel, *windows, G)
    empty = torch.zeros(0, 2, 4, 4, dtype=torch.int8)
    yield from _both("windows", empty, None, (3, 3), (1, 1), (1, 1), (1, 1), 1)


def _totals() -> Iterator[str]:
    for dtype in (torch.int32, torch.int64):
        for B, M, N, pixels in (
            (1, 33, 65, 1), (2, 64, 3, 16), (3, 70, 40, 35), (1, 0, 2, 1), (2, 6, 1, 6)
        ):  # fmt: skip
            most = 2**31 if dtype == torch.int32 else 2**40
            products = torch.randint(-most, most, (B, M, N)).to(dtype)
            rows, columns = torch.randint(-9999, 9999, (B, M)), torch.randint(-9999, 9999, (B, N))
            grids = _number(0.013), _number(-101), _number(2.7e-3), _number(38)
            yield from _both("integer_total", products, rows, columns, *grids, 27, pixels)


def _depthwise() -> Iterator[str]:
    cases = itertools.product((True, False), _KEPT, (True, False), (900, 2**31 - 1))
    for signed, kept, real, most in cases:
        for n in range(_RANDOM // 4):
            kernel, windows, size = _windows(64)
            if n < 6:  # those with a kernel of their own, the first of more than a block at once
                stride, across = random.randint(1, 3), 1 + n % 3
                kernel, windows = (2 + n % 2, 3), [(stride, across), (1, n % 2), (stride, 1)]
                size = (30, 45) if n < 2 else (5 + n, 6 + n)
            C, dtype = random.randint(1, 3), torch.int8 if signed else torch.uint8
            x = _whole(dtype, random.randint(1, 2), C, *size)
            weight = _whole(dtype, C * random.randint(1, 3), 1, *kernel)
            grids = _number(0.013), _number(-101 if signed else 3), _number(2.7e-3), _number(38)
            yield from _both("table_depthwise", x, weight, _table(most), *windows, signed, *kept,
                             *(grids if real else ()))  # fmt: skip


def _products() -> Iterator[str]:
    """Yields what differs of products of matrices, with tiles of every width, of rows of either."""
    for B, M, K, N in (
        (1, 9, 41, 5), (1, 130, 33, 64), (2, 3, 70, 1100), (2, 1030, 5, 9), (1, 3, 0, 2),
        # As many tiles as multiprocessors: of four columns a thread; of two, twice.
        (132, 2, 3, 2000), (132, 1000, 3, 1), (132, 1, 3, 1001),
    ):  # fmt: skip
        for most, limits in itertools.product((900, 2**15 - 1, 2**20), ((None, None), (-999, 999))):
            if B > 2 and most != 900:
                continue
            a, b = _bytes(B, K, M).mT, _bytes(B, K, N)
            yield from _both("table_matmul", a, b, _table(most), *limits)
            a, b = _bytes(B, M, K), _bytes(B, N, K).mT
            yield from _both("table_matmul", a, b, abs(_table(most)), *limits)


def _layers(folder: Path) -> Iterator[str]:
    """Yields what differs of a whole convolution of real numbers, with any accumulator."""
    table = _table(900)
    for signed, kind in itertools.product((True, False), (None, "saturate", "wrap", "adder")):
        register = adder(folder, 17, signed) if kind == "adder" else kind and f"{kind}:bits=12"
        code = code_of(register, signed)
        for _ in range(4):
            kernel, windows, size = _windows(16)
            lowest = -128 if signed else 0
            zero_a, zero_b = (lowest + random.randint(0, 255) for _ in range(2))
            x, weight = (
                scale * (torch.randint(lowest, lowest + 256, shape) - zero)
                for scale, zero, shape in (
                    (0.5, zero_a, (2, 3, *size)), (0.25, zero_b, (6, 1, *kernel))
                )
            )  # fmt: skip
            grids = _number(0.5), _number(zero_a), _number(0.25), _number(zero_b)
            assert min(output_size(x.shape, weight.shape, *windows)) > 0
            yield from _both("integer_conv2d", x, weight, *grids, table, None, None, None, signed,
                             code, *windows, 3)  # fmt: skip


def _every() -> Iterator[str]:
    for check in (_ranges, _integers, _unfolded, _totals, _products, _depthwise):
        yield from check()
    with TemporaryDirectory() as folder:
        yield from _layers(Path(folder))


if __name__ == "__main__":
    sys.exit(report(_every()))
