"""Computes matrix products of whole sequences, on a CPU by csrc/recurrent/{product,outer}.h.

So a row of the result has the same bits whether a product is computed here or by the step
(:mod:`hoconv.recurrent.passes.stream`), and on any number of threads.

T time steps, B batch, n features of x, m of the result, or of the gradient g.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from hoconv.recurrent.codegen.cpp import ALIGNMENT
from hoconv.recurrent.ir import evaluate
from hoconv.recurrent.runtime.libraries import PRODUCTS
from hoconv.recurrent.runtime.pages import allocate, allocate_aligned

_ENOUGH = 64  # rows for which a matrix is worth packing
_BLOCK = 256  # kOuterBlock of outer.h
_TILE = 8  # the largest kTileRows of product.h
_NAMES = {torch.float32: "float", torch.float64: "double"}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, (T, B, n) to (T, B, m): :func:`evaluate.linear`, not differentiable."""
    if not _suits(x, weight):
        return evaluate.linear(x, weight, bias)
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    (T, B, n), m, size = x.shape, len(weight), x.element_size()
    out = allocate((T, B, m), (B * m, m, 1), x.dtype)
    padded = max(2 * ALIGNMENT, -(-m * size // ALIGNMENT) * ALIGNMENT)
    _memory, aligned = allocate_aligned((n + 1) * padded)
    row, column = weight.stride()
    _call("linear", x.dtype, out, x, weight, column, row, bias, T * B, n, m, aligned)
    return out


def outer(g: Tensor, x: Tensor) -> Tensor:
    """g^T x, (T, B, m) and (T, B, n) to (m, n): :func:`evaluate.outer`, not differentiable."""
    if not _suits(g, x):
        return evaluate.outer(g, x)
    g, x = g.contiguous(), x.contiguous()
    (T, B, m), n = g.shape, x.shape[-1]
    out = allocate((m, n), (n, 1), x.dtype)
    _memory, aligned = allocate_aligned(_BLOCK * -(-m // _TILE) * _TILE * x.element_size())
    _call("outer", x.dtype, out, g, x, T * B, m, n, aligned)
    return out


@functools.cache
def load() -> ctypes.CDLL:
    """Loads the products.

    Raises:
        hoconv.jit.BuildError: there is no compiler, or it failed.
    """
    return PRODUCTS.functions()


def _suits(a: Tensor, b: Tensor) -> bool:
    if a.shape[0] * a.shape[1] < _ENOUGH:  # the question that small calls answer
        return False
    return a.dtype == b.dtype and a.dtype in _NAMES and a.is_cpu and b.is_cpu


def _call(name: str, dtype: torch.dtype, *arguments: Tensor | int | None) -> None:
    """Calls a product; an address that is a number is passed as a size is."""
    given = [
        ctypes.c_int64(each)
        if isinstance(each, int)
        else ctypes.c_void_p(None if each is None else each.data_ptr())
        for each in arguments
    ]
    if load()[f"{name}_{_NAMES[dtype]}"](*given):
        raise RuntimeError(f"hoconv::recurrent: PyTorch's threads failed in the product {name}")
