"""Products, or sums of products, of integers by compiled functions in C.

A multiplier of 9 to 16 bits has no table, and an adder none either. A GPU runs the kernels of
function_kernels.py. On a CPU a thread takes a block of rows; a function runs in a compiled loop
over the products of a column and a row, which the compiler vectorises if it can.

B batch, M, N rows and columns of a matrix product, K what it sums over.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from hoconv.ops.approx.accumulators import parse
from hoconv.ops.approx.sources.c_functions import library

_BLOCK = 1 << 14  # sums of a thread at once, about: with their products, 256 KiB


def multiply(a: Tensor, b: Tensor, function: str) -> Tensor:
    """The products of integers a and b of equal shapes, int64."""
    if a.is_cuda:
        from hoconv.ops.approx import function_kernels  # here, since most programs compile nothing

        return function_kernels.multiply(a, b, function)
    left, right = (t.cpu().long().contiguous() for t in (a, b))
    products = torch.empty_like(left)
    call = library(function).hoconv_multiply
    call(left.data_ptr(), right.data_ptr(), products.data_ptr(), products.numel())
    return products.to(a.device)


def matmul(
    a: Tensor, b: Tensor, table: Tensor | None, function: str | None, signed: bool,
    accumulator: str | None = None,
) -> Tensor:  # fmt: skip
    """a (B, M, K) times b (B, K, N) of integers, (B, M, N) int64. Their products are those of a
    table (256, 256) of bytes, or of a function. `accumulator` adds them to 0 in ascending k."""
    if a.is_cuda:
        from hoconv.ops.approx import function_kernels

        return function_kernels.matmul(a, b, table, function, signed, accumulator)
    outer = None if function is None else library(function).hoconv_outer
    accumulate = parse(accumulator, signed)
    (B, M, K), N = a.shape, b.shape[2]
    with torch.inference_mode(False):  # the mode of the threads, which change `out`
        columns = a.cpu().long().mT.contiguous()  # (B, K, M)
        rows = b.cpu().long().contiguous()  # (B, K, N)
        out = torch.zeros(B, M, N, dtype=torch.int64)
        entries = None if table is None else table.cpu().long().flatten()
    height = max(1, _BLOCK // max(N, 1))

    def compute(block: tuple[int, int]) -> None:
        batch, first = block
        sums = out[batch, first : first + height]
        products = torch.empty_like(sums)
        for k in range(K):
            column, row = columns[batch, k, first : first + height], rows[batch, k]
            if outer is not None:
                outer(column.data_ptr(), len(column), row.data_ptr(), N, products.data_ptr())
            else:
                assert entries is not None
                index = ((column & 255) << 8)[:, None] + (row & 255)
                products = entries[index]
            if accumulate is None:
                sums += products
            else:
                accumulate.add(sums, products)

    blocks = [(batch, first) for batch in range(B) for first in range(0, M, height)]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(compute, blocks if N else []))
    return out.to(a.device)
